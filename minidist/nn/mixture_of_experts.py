"""A mixture of experts: every position runs through k of E small networks, chosen by a gate.

Shazeer et al. 2017, equations 1 and 3 to 5, without their noise; Fedus et al. 2021, equations 3
to 6: capacity and balancing loss. Letters: E experts, T positions of an example, R rows: choices
that are kept (see router.py). A dropped choice adds nothing: in a residual block the position
passes by. The balancing loss is decided for each example alone, as the queues are, so it does not
depend on how a batch is split. All decisions are made on the host: they are the sizes of arrays.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minidist.autograd import Function, Tensor, functions
from minidist.autograd.kernels import rows_of, sum_into_rows
from minidist.backend import Array, array_module, on_device_of, to_host
from minidist.errors import check_number
from minidist.nn.feed_forward import Expert
from minidist.nn.linear import Linear
from minidist.nn.module import Module, check_sizes
from minidist.nn.router import Routing, route, rows_of_capacity
from minidist.rng import Randomness


class Pick(Function):
    """Y[..., k] = P[..., chosen[..., k]]  =>  dP = dY at the chosen elements, 0 elsewhere."""

    def __init__(self, chosen: np.ndarray):
        self.chosen = chosen

    def forward(self, p: Array) -> Array:
        self.shape, rows = p.shape, p.reshape(-1, p.shape[-1])
        chosen = on_device_of(self.chosen.reshape(len(rows), self.chosen.shape[-1]), p)
        self.where = array_module(p).arange(len(rows))[:, None], chosen
        return rows[self.where].reshape(self.chosen.shape)

    def backward(self, grad: Array) -> Array:
        dp = array_module(grad).zeros((self.where[1].shape[0], self.shape[-1]), grad.dtype)
        dp[self.where] = grad.reshape(self.where[1].shape)
        return dp.reshape(self.shape)


class Balance(Function):
    """Y = P  =>  dP = dY + w: adds the gradient of the loss sum(w P) to a loss that has none."""

    def __init__(self, weights: Array):
        self.weights = weights

    def forward(self, p: Array) -> Array:
        return p

    def backward(self, grad: Array) -> Array:
        return grad + self.weights


class Combine(Function):
    """Y[n] = sum of g_r X_r over the rows r of token n  =>  dX_r = g_r dY[n], dg_r = <X_r, dY[n]>.

    X[R, C], g[R, 1], Y[tokens, C].
    """

    def __init__(self, token: np.ndarray, tokens: int):
        self.token, self.tokens = token, tokens

    def forward(self, x: Array, g: Array) -> Array:
        self.x, self.g, self.token = x, g, on_device_of(self.token, x)
        y = array_module(x).empty((self.tokens, x.shape[1]), x.dtype)
        return sum_into_rows(x * g, self.token, y)

    def backward(self, grad: Array) -> tuple[Array, Array]:
        dy = rows_of(grad, self.token)
        return self.g * dy, (self.x * dy).sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Report:
    """What a mixture did in its last forward pass, with the examples and positions it was given.

    load     rows per expert, [E];  dropped: choices beyond the capacity, per expert, [E]
    balance  this pass's part of the balancing loss: parts of one batch add up to the whole
    """

    load: np.ndarray
    dropped: np.ndarray
    balance: float


class MixtureOfExperts(Module):
    """X[B, T, C] -> Y = sum over the k chosen experts e that are kept of g_e expert_e(X).

    P[B, T, E] = softmax(X W[C, E]). The k largest are chosen; g is P of the chosen, divided by
    their sum if k > 1: Shazeer's softmax over the k largest logits; for k = 1, P itself (Fedus).

    capacity  an expert takes at most ceil(k T / E capacity) choices of an example; None: all
    balance   alpha of the balancing loss, alpha E / B * sum over examples b and experts e of
              f_be P_be: f is the share of b's choices that fall on e, dropped ones too; P_be is the
              mean of P over b's positions. Its gradient is added in backward, times
              `randomness.loss_scale`; B is `randomness.batch`: give it where a batch is split,
              else B is the examples of x alone
    run_experts     (experts, X[R, C], rows per expert [E]) -> Y[R, C], rows sorted by expert
    gather_choices  (chosen[B, T/N, k], randomness) -> chosen[B, T, k], if the sequence is cut
    report    of the last forward pass

    >>> x = np.random.default_rng(0).standard_normal((2, 6, 8))
    >>> nn.MixtureOfExperts(8, experts=4, top_k=2, dtype="float64")(Tensor(x)).shape
    (2, 6, 8)
    """

    report: Report | None = None

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int = 2,
        capacity: float | None = 1.25,
        balance: float = 0.01,
        *,
        name="mixture",
        seed=0,
        dtype="float32",
    ):
        check_sizes(width=width, experts=experts, top_k=top_k)
        if top_k > experts:
            raise ValueError(f"cannot choose {top_k} of {experts} experts; use top_k={experts}")
        if capacity is not None:
            words = "capacity is a positive number or None"
            check_number(words, capacity, lambda x: 0 < x < math.inf)
        check_number("balance is a number from 0", balance, lambda x: 0 <= x < math.inf)
        more = {"seed": seed, "dtype": dtype}
        self.top_k, self.capacity, self.balance = top_k, capacity, balance
        self.run_experts: Callable = run_each
        self.gather_choices: Callable = whole_sequences
        self.gate = Linear(width, experts, bias=False, name=f"{name}.gate", **more)
        self.experts = [Expert(width, name=f"{name}.experts.{e}", **more) for e in range(experts)]

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, T, C = x.shape
        p = functions.softmax(self.gate(x))  # [B, T, E]
        routing, weights = self.decide(to_host(p.data), randomness)
        top = Pick(routing.chosen)(Balance(on_device_of(weights, p.data))(p))  # [B, T, k]
        gates = top / top.sum(axis=-1, keepdims=True) if self.top_k > 1 else top
        order = routing.order()
        token = order // self.top_k
        rows = functions.embedding(token, x.reshape(B * T, C))  # [R, C]
        rows = self.run_experts(self.experts, rows, routing.load)
        g = functions.embedding(order, gates.reshape(-1, 1))  # [R, 1]
        return Combine(token, B * T)(rows, g).reshape(B, T, C)

    def decide(self, p: np.ndarray, randomness: Randomness | None) -> tuple[Routing, np.ndarray]:
        """Return the routing by P[B, T, E], and dL/dP [B, 1, E] of the balancing loss L."""
        k, E = self.top_k, p.shape[-1]
        chosen = np.argsort(-p, axis=-1, kind="stable")[..., :k]
        whole, routing = self.routed(chosen, E, randomness)
        T = whole.chosen.shape[1]
        batch = len(p) if randomness is None or randomness.batch is None else randomness.batch
        scale = self.balance * E / max(1, batch * T * k * T)
        weights = scale * whole.counts[:, None]
        dropped = np.bincount(routing.chosen[~routing.kept], minlength=E)
        self.report = Report(routing.load, dropped, float((p * weights.astype(p.dtype)).sum()))
        factor = 1.0 if randomness is None else randomness.loss_scale
        return routing, (factor * weights).astype(p.dtype)

    def routed(
        self, chosen: np.ndarray, experts: int, randomness: Randomness | None
    ) -> tuple[Routing, Routing]:
        """Return the routing of whole sequences, and of the positions that this rank holds.

        Where a sequence is cut, both the queues and the capacity are of all its T positions. So the
        same choices are dropped, whatever the cut.

        chosen      [B, T/N, k], the experts that the positions of this rank chose
        randomness  its `positions` say which ones this rank holds; None: all
        """
        whole = self.gather_choices(chosen, randomness)
        capacity = rows_of_capacity(self.capacity, self.top_k, whole.shape[1], experts)
        routing = route(whole, experts, capacity)
        held = None if randomness is None else randomness.positions
        return routing, routing if held is None else routing.at(held.indices)


def run_each(experts: list[Module], rows: Tensor, load: np.ndarray) -> Tensor:
    """Run each expert on its rows of X[R, C]; a strategy puts its own function in this place."""
    ends = [0, *np.cumsum(load).tolist()]
    parts = [expert(rows[a:b]) for expert, (a, b) in zip(experts, pairwise(ends), strict=True)]
    return functions.concatenate(parts) if parts else rows


def mixtures(module: Module) -> Iterator[MixtureOfExperts]:
    """Yield the mixtures of a model, in its order."""
    return module.modules(MixtureOfExperts)


def whole_sequences(chosen: np.ndarray, randomness: Randomness | None) -> np.ndarray:
    """Return the choices as they are; ValueError if they are those of a part of each sequence."""
    held = None if randomness is None else randomness.positions
    if held is not None and not held.whole:
        raise ValueError(
            f"these choices are of {len(held)} of {held.length} positions; where a sequence is "
            "cut, set gather_choices, which gathers the choices of all its ranks"
        )
    return chosen
