"""A mixture of experts: every position runs through k of E small networks, chosen by a gate.

Shazeer et al. 2017, equations 1 and 3 to 5, without their noise; Fedus et al. 2021, equations 3
to 6: capacity and balancing loss. Letters: E experts, T positions of an example, R rows: choices
that are kept (see router.py). A dropped choice adds nothing: in a residual block the position
passes by. The balancing loss is decided for each example alone, as the queues are, so it does not
depend on how a batch is split. All decisions are made on the host: they are the sizes of arrays.

Dai et al., DeepSeekMoE (2024), section 3: fine-grained experts, m times as many of F/m, of which m
times as many are chosen (`expert_width`); and shared ones, which every position runs through. To
keep a balance without a loss: router.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from minidist.autograd import Function, Tensor, functions
from minidist.autograd.kernels.layers import rows_of, sum_into_rows
from minidist.autograd.recording import is_recording
from minidist.backend import Array, array_module, on_device_of, sum_over, to_host
from minidist.errors import WrongInput, check_number, check_sizes
from minidist.nn.linear import Linear
from minidist.nn.mlp import Expert
from minidist.nn.module import Module
from minidist.nn.router import BiasBalance, Routing, check_groups, choose, route, rows_of_capacity
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
        return self.g * dy, sum_over(self.x * dy, axis=1, keepdims=True)


@dataclass(frozen=True)
class Report:
    """What a mixture did in its last forward pass, with the examples and positions it was given.

    routing  of these positions
    dropped  choices beyond the capacity, per expert, [E]
    balance  this pass's part of the balancing loss: parts of one batch add up to the whole
    knows_batch
             whether Randomness said how large the whole batch is, or the pass was only evaluated
    """

    routing: Routing
    dropped: np.ndarray
    balance: float
    knows_batch: bool = False

    @property
    def load(self) -> np.ndarray:
        """Rows per expert: [E]."""
        return self.routing.load


class MixtureOfExperts(Module):
    """X[B, T, C] -> Y = sum over the k chosen experts e that are kept of g_e expert_e(X).

    P[B, T, E] = softmax(X W[C, E]). The k largest are chosen; g is P of the chosen, divided by
    their sum if k > 1: Shazeer's softmax over the k largest logits; for k = 1, P itself (Fedus).

    capacity  an expert takes at most ceil(k T / E capacity) choices of an example; None: all, so
              that nothing is dropped (Gale et al., MegaBlocks, 2022)
    balance   alpha of the balancing loss, alpha E / n * sum over examples b and experts e of
              n_b f_be P_be: n_b of b's positions count, of n in the whole batch; f_be is the share
              of their choices that fall on e, dropped ones too; P_be is the mean of P over them.
              Its gradient is added in backward, times `randomness.loss_scale`. Where a batch is
              split, `randomness.batch` says how many examples it has, or `total` what n is
    expert_width
              F inside an expert; by default 4C
    shared    experts that every position runs through, with no gate: as one of F = shared times
              expert_width, which every rank has
    bias_rate u of BiasBalance; 0: experts are chosen by P alone
    groups, most_groups
              the experts are this many equal runs, and a position chooses from the best most_groups
              of them: see router.choose
    run_experts     (experts, X[R, C], rows per expert [E]) -> Y[R, C], rows sorted by expert
    run_positions   None, or what a strategy has in the place of `run_rows`
    enter, leave    around the experts, if ranks hold parts of each
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
        expert_width: int | None = None,
        shared: int = 0,
        bias_rate: float = 0.0,
        groups: int = 1,
        most_groups: int = 1,
        activation="gelu",
        bias=True,
        name="mixture",
        seed=0,
        dtype="float32",
    ):
        check_sizes(width=width, experts=experts, top_k=top_k)
        check_sizes(least=0, shared=shared)
        check_sizes(expert_width=4 * width if expert_width is None else expert_width)
        if top_k > experts:
            raise WrongInput(f"cannot choose {top_k} of {experts} experts; use top_k={experts}")
        check_groups(experts, top_k, groups, most_groups)
        if capacity is not None:
            allowed = "capacity is a positive number or None"
            check_number(allowed, capacity, lambda x: 0 < x < math.inf)
        check_number("balance is a number from 0", balance, lambda x: 0 <= x < math.inf)
        options, F = {"seed": seed, "dtype": dtype}, expert_width or 4 * width
        expert = partial(Expert, width, activation=activation, bias=bias, **options)
        self.top_k, self.capacity, self.balance = top_k, capacity, balance
        self.groups, self.most_groups = groups, most_groups
        self.expert_width, self.shared_experts = F, shared
        self.run_experts: Callable = run_each
        self.run_positions: Callable | None = None
        self.enter: Callable[[Tensor], Tensor] = unchanged
        self.leave: Callable[[Tensor], Tensor] = unchanged
        self.gather_choices: Callable = whole_sequences
        self.gate = Linear(width, experts, bias=False, name=f"{name}.gate", **options)
        self.bias = None
        if bias_rate:
            self.bias = BiasBalance(experts, bias_rate, self.gate.weight, name=f"{name}.gate")
        self.shared = expert(hidden=shared * F, name=f"{name}.shared") if shared else None
        # Last, so that copies are in one run on ranks with experts and without.
        self.experts = [expert(hidden=F, name=f"{name}.experts.{e}") for e in range(experts)]

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, T, C = x.shape
        p = functions.softmax(self.gate(x))  # [B, T, E]
        routing, weights = self.decide(to_host(p.data), randomness)
        if self.bias is not None:
            p = self.bias.counted(p, routing.chosen[routing.counted])
        top = Pick(routing.chosen)(Balance(on_device_of(weights, p.data))(p))  # [B, T, k]
        gates = top / top.sum(axis=-1, keepdims=True) if self.top_k > 1 else top
        order = routing.order()
        g = functions.embedding(order, gates.reshape(-1, 1))  # [R, 1]
        run = self.run_positions or self.run_rows
        x = self.enter(x.reshape(B * T, C))
        y = run(self.experts, x, self.enter(g), order // self.top_k, routing.load)
        y = y if self.shared is None else y + self.shared(x)
        return self.leave(y).reshape(B, T, C)

    def run_rows(
        self, experts: list[Expert], x: Tensor, g: Tensor, token: np.ndarray, load: np.ndarray
    ) -> Tensor:
        """X[tokens, C] -> Y[tokens, C] = sums of g[R, 1] times the rows' results: see Combine.

        token[R] of each row, sorted by expert; load: rows per expert, [E]
        """
        rows = self.run_experts(experts, functions.embedding(token, x), load)  # [R, C]
        return Combine(token, len(x.data))(rows, g)

    def decide(self, p: np.ndarray, randomness: Randomness | None) -> tuple[Routing, np.ndarray]:
        """Return the routing by P[B, T, E], and dL/dP of the balancing loss L.

        dL/dP is [B, 1, E] where all positions count, else [B, T, E].
        """
        k, E = self.top_k, p.shape[-1]
        scores = p if self.bias is None else p + self.bias.values
        chosen = choose(scores, k, self.groups, self.most_groups)
        if randomness is None:  # a Batch without examples is one, and is false
            randomness = Randomness(0, 0, np.arange(len(p)))
        whole, routing = self.routed(chosen, E, randomness)
        total, counted = randomness.total_of(whole.counted), routing.counted
        scale = self.balance * E / np.maximum(1, total * k * whole.counted.sum(axis=1))
        weights = (scale[:, None] * whole.counts)[:, None]
        weights = weights if counted.all() else weights * counted[..., None]
        dropped = np.bincount(routing.chosen[~routing.kept], minlength=E)
        loss = float((p * weights.astype(p.dtype)).sum())
        knows_batch = randomness.knows_batch() or not is_recording()
        self.report = Report(routing, dropped, loss, knows_batch)
        return routing, (randomness.loss_scale * weights).astype(p.dtype)

    def routed(
        self, chosen: np.ndarray, experts: int, randomness: Randomness
    ) -> tuple[Routing, Routing]:
        """Return the routing of whole sequences, and of the positions that this rank holds.

        Where a sequence is cut, both the queues and the capacity are of all its T positions. So the
        same choices are dropped, whatever the cut.

        chosen      [B, T/N, k], the experts that the positions of this rank chose
        randomness  its `positions` say which ones this rank holds; None: all
        """
        positions = randomness.positions
        T = chosen.shape[1] if positions is None else positions.length
        counted = randomness.positions_that_count(len(chosen), T)
        whole = self.gather_choices(chosen, randomness)
        capacity = rows_of_capacity(self.capacity, self.top_k, whole.shape[1], experts)
        routing = route(whole, experts, capacity, to_host(counted))
        return routing, routing if positions is None else routing.at(positions.indices)


def unchanged(x: Tensor) -> Tensor:
    return x


def run_each(experts: list[Module], rows: Tensor, load: np.ndarray) -> Tensor:
    """Run each expert on its rows of X[R, C]; a strategy puts its own function in this place."""
    ends = [0, *np.cumsum(load).tolist()]
    parts = [expert(rows[a:b]) for expert, (a, b) in zip(experts, pairwise(ends), strict=True)]
    return functions.concatenate(parts) if parts else rows


def mixtures(module: Module) -> Iterator[MixtureOfExperts]:
    """Yield the mixtures of a model, in its order."""
    return module.modules(MixtureOfExperts)


def whole_sequences(chosen: np.ndarray, randomness: Randomness | None) -> np.ndarray:
    """Return the choices as they are; ValueError if they are of a part of each sequence."""
    positions = None if randomness is None else randomness.positions
    if positions is not None and not positions.whole:
        raise WrongInput(
            f"these choices are of {len(positions)} of {positions.length} positions; where a "
            "sequence is cut, set gather_choices, which gathers the choices of all its ranks"
        )
    return chosen
