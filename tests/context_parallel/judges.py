"""Workers that compare attention over a cut sequence with attention on one device."""

from functools import partial

import numpy as np

from minidist import Tensor
from minidist.autograd.recomputation import kept_bytes
from minidist.backend import to_device, to_host
from minidist.context_parallel.gathered_attention import gathered_attention
from minidist.context_parallel.ring_attention import ring_attention
from minidist.context_parallel.ulysses import ulysses
from minidist.context_parallel.usp import axes_of, usp
from tests.strategies import arrays

OVER = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses}


def inputs(B, H, D, held, seed=0, spread=1.0, dtype="float64", G=1):
    """Return QKV[G + 2, B, H / G, T, D] and dO[B, H, T, D] of a whole sequence."""
    T = held[0].length
    qkv = spread * arrays(G + 2, B, H // G, T, D, seed=seed)
    return qkv.astype(dtype), arrays(B, H, T, D, seed=seed + 1).astype(dtype)


def attend(group, attention, held, qkv, grad, documents=None, U=1):
    """Return this rank's O and dQKV, the bytes it sent each way, and the bytes it kept.

    U  neighbours that exchange heads, in a ring of groups
    """
    attention = OVER.get(attention, attention)
    axes = axes_of(group, U) if U > 1 else ()
    if axes:
        attention = partial(usp, axes=axes, attention=attention)
    own = held[group.rank].indices
    device = "cpu" if group.device == "cpu" else "gpu"
    x = Tensor(to_device(qkv[..., own, :].copy(), device), requires_grad=True)
    y = attention(x * 1, group, held, documents)  # a leaf would not count as kept, nor would O
    kept, forward = kept_bytes(y * y), sum(g.ledger.total for g in (group, *axes))
    y.backward(to_device(grad[..., own, :].copy(), device))
    sent = forward, sum(g.ledger.total for g in (group, *axes)) - forward
    return to_host(y.data), to_host(x.grad), sent, kept


def on_one_device(qkv, grad, documents=None):
    """Return O and dQKV in float64, with all T x T scores and a mask: nothing of the package."""
    q, k, v, do = (*np.split(qkv.astype("float64"), [-2, -1]), grad.astype("float64"))
    (k,), (v,), (B, H, T, D), G = k, v, do.shape, len(q)
    do = do.reshape(B, H // G, G, T, D).transpose(2, 0, 1, 3, 4)
    sees = np.zeros((B, T, T), bool)
    for i, runs in enumerate(documents or [[(0, T)]] * B):
        for a, b in runs:
            sees[i, a:b, a:b] = np.tri(b - a, dtype=bool)
    s = np.where(sees[:, None], q @ k.swapaxes(-1, -2) / np.sqrt(D), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-1e300))
    p /= p.sum(axis=-1, keepdims=True)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / np.sqrt(D)
    dk, dv = ((x.swapaxes(-1, -2) @ y).sum(axis=0) for x, y in ((ds, q), (p, do)))
    o = (p @ v).transpose(1, 2, 0, 3, 4).reshape(B, H, T, D)
    return o, np.concatenate([ds @ k, dk[None], dv[None]])


def joined(pieces, held):
    """Return [..., T, D] of the ranks' [..., T/N, D], in the order of the sequence."""
    whole = np.empty((*pieces[0].shape[:-2], held[0].length, pieces[0].shape[-1]))
    for piece, own in zip(pieces, held, strict=True):
        whole[..., own.indices, :] = piece
    return whole


def errors(found, held, qkv, grad, documents=None):
    """Return the largest errors of O and of dQ, dK, dV, in parts of the largest number.

    A gradient that is next to nothing is judged by a thousandth of the largest one.
    """
    y, dx = on_one_device(qkv, grad, documents)
    got, least = joined([rank[1] for rank in found], held), 1e-3 * abs(dx).max(initial=0)
    pairs = {"O": (joined([rank[0] for rank in found], held), y), "dQ": (got[:-2], dx[:-2])}
    pairs |= {"dK": (got[-2], dx[-2]), "dV": (got[-1], dx[-1])}
    return {
        name: abs(got - want).max(initial=0) / max(abs(want).max(initial=0), least, 1e-300)
        for name, (got, want) in pairs.items()
    }
