"""Workers that compare attention over a cut sequence with attention on one device."""

import numpy as np

from minidist import Tensor
from minidist.autograd.attention import CausalAttention
from minidist.backend import to_device, to_host
from tests.strategies import arrays


def inputs(B, H, D, held, seed=0, spread=1.0, dtype="float64"):
    """Return QKV[3, B, H, T, D] and dO[B, H, T, D] of a whole sequence."""
    T = held[0].length
    qkv = spread * arrays(3, B, H, T, D, seed=seed)
    return qkv.astype(dtype), arrays(B, H, T, D, seed=seed + 1).astype(dtype)


def attend(group, attention, held, qkv, grad):
    """Return this rank's O and dQKV, and the bytes it sent in forward and in backward."""
    own = held[group.rank].indices
    device = "cpu" if group.device == "cpu" else "gpu"
    x = Tensor(to_device(qkv[..., own, :].copy(), device), requires_grad=True)
    y = attention(x, group, held)
    forward = group.ledger.total
    y.backward(to_device(grad[..., own, :].copy(), device))
    sent = forward, group.ledger.total - forward
    return to_host(y.data), to_host(x.grad), sent


def on_one_device(qkv, grad):
    """Return O and dQKV, computed in float64 with all scores at once."""
    x = Tensor(qkv.astype("float64"), requires_grad=True)
    y = CausalAttention()(x)
    y.backward(grad.astype("float64"))
    return y.data, x.grad


def joined(pieces, held):
    """Return [..., T, D] of the ranks' [..., T/N, D], in the order of the sequence."""
    whole = np.empty((*pieces[0].shape[:-2], held[0].length, pieces[0].shape[-1]))
    for piece, own in zip(pieces, held, strict=True):
        whole[..., own.indices, :] = piece
    return whole


def errors(found, held, qkv, grad):
    """Return the largest errors of O and of dQ, dK, dV, in parts of the largest number."""
    y, dx = on_one_device(qkv, grad)
    pairs = [(joined([rank[0] for rank in found], held), y)]
    pairs += zip(joined([rank[1] for rank in found], held), dx, strict=True)
    scale = [max(abs(y).max(initial=0), 1e-300)] + [max(abs(dx).max(initial=0), 1e-300)] * 3
    off = [abs(got - want).max(initial=0) for got, want in pairs]
    return {
        name: error / size
        for name, error, size in zip(("O", "dQ", "dK", "dV"), off, scale, strict=True)
    }
