"""Every strategy as its judge sees it: a worker to run on ranks, a promise, and a bill of bytes.

A worker starts from the weights of a single-device model, takes one batch, and returns the
gradients that it leaves on its rank.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Group
from minidist.data_parallel import bucketed, naive
from minidist.datasets import shard
from minidist.rng import Randomness, generator

INPUT = "(input)"  # the name under which a floating input's gradient is compared


@dataclass(frozen=True)
class Case:
    """What a strategy is tried on: inputs[B, ...] are tokens or floats, targets fit the loss."""

    name: str
    model: nn.Module
    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable = nn.cross_entropy
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """One rank's gradients by name, host arrays, and the bytes that others took from it."""

    gradients: dict[str, np.ndarray]
    bytes: int


@dataclass(frozen=True)
class Strategy:
    """A strategy as the tests see it.

    worker   (group, case, **options) -> Outcome, on every rank
    promise  "exact": equal to one device within the bound
    bytes    (case, ranks) -> bytes that all ranks together should move
    """

    name: str
    worker: Callable[..., Outcome]
    promise: str
    bytes: Callable[[Case, int], int]
    cases: Callable[[], list[Case]]


def one_device(case: Case) -> dict[str, np.ndarray]:
    """Return the gradients that one device computes; zero where a parameter is unused or frozen."""
    model = copy.deepcopy(case.model)
    x = _as_input(case.inputs)
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    case.loss(model(x, randomness), case.targets).backward()
    return collect(model, x)


def collect(model: nn.Module, x: Tensor | None = None) -> dict[str, np.ndarray]:
    """Return {name: gradient} of a model, zeros for None, and the input's if it has one."""
    named = dict(model.named_parameters())
    if isinstance(x, Tensor):
        named[INPUT] = x
    return {
        name: to_host(p.xp.zeros_like(p.data) if p.grad is None else p.grad).copy()
        for name, p in named.items()
    }


def _as_input(inputs):
    """Wrap floating inputs in a tensor, whose gradient is compared too; leave tokens alone."""
    return Tensor(inputs, requires_grad=True) if inputs.dtype.kind == "f" else inputs


def naive_worker(group: Group, case: Case, micro_batches: int = 1) -> Outcome:
    """Run one batch under data_parallel/naive.py, its examples dealt to ranks and micro-batches."""
    pieces = [_backward(case, part) for part in _parts(group, case, micro_batches)]
    naive.all_reduce_gradients(case.model, group)
    return _data_parallel_outcome(group, case, pieces, group.ledger.total)


def bucketed_worker(group: Group, case: Case, micro_batches: int = 1, cap: int = 300) -> Outcome:
    """Run one batch under data_parallel/bucketed.py, in buckets of `cap` bytes."""
    case.model.flatten(group.empty)
    reducer = bucketed.Bucketed(case.model, group, cap)
    *first, last = _parts(group, case, micro_batches)
    pieces = [_backward(case, part) for part in first]
    with reducer.reduce():
        pieces.append(_backward(case, last))
    return _data_parallel_outcome(group, case, pieces, reducer.group.ledger.total)


def _parts(group: Group, case: Case, micro_batches: int) -> list[np.ndarray]:
    """Return this rank's examples, cut into micro-batches."""
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    return np.array_split(mine, micro_batches)


def _backward(case: Case, examples: np.ndarray):
    """Add the gradient of these examples to the model's; return their input."""
    x = _as_input(case.inputs[examples])
    logits = case.model(x, Randomness(case.seed, 0, examples))
    case.loss(logits, case.targets[examples], reduction_size=case.targets.size).backward()
    return x


def _data_parallel_outcome(group: Group, case: Case, pieces: list, moved: int) -> Outcome:
    """Collect the gradients of a model that every rank holds, and of the input, which none does."""
    result = collect(case.model)
    if isinstance(pieces[0], Tensor):
        rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in pieces]
        result[INPUT] = group.all_gather(np.concatenate(rows))
    return Outcome(result, moved)


def data_parallel_bytes(case: Case, ranks: int) -> int:
    """Return 2 (N - 1) S: all parameters that are not frozen, once scattered, once gathered."""
    return 2 * (ranks - 1) * sum(p.data.nbytes for p in case.model.parameters() if p.requires_grad)


def small_cases() -> list[Case]:
    """An MLP on 7 examples and on 2, and a tied Transformer with dropout on 6."""
    random = generator(0, "cases")
    images, labels = random.standard_normal((7, 6)), random.integers(0, 3, 7)
    tokens, nexts = random.integers(0, 11, (2, 6, 5))
    mlp = nn.MLP([6, 9, 5, 3], activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2, tied=True)
    return [
        Case("MLP, 7 examples", mlp, images, labels),
        Case("Transformer, 6 examples", transformer, tokens, nexts),
        Case("MLP, 2 examples", mlp, images[:2], labels[:2]),
    ]


STRATEGIES = {
    "naive": Strategy("naive", naive_worker, "exact", data_parallel_bytes, small_cases),
    "bucketed": Strategy("bucketed", bucketed_worker, "exact", data_parallel_bytes, small_cases),
}
