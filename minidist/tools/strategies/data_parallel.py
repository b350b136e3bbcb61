"""The data-parallel strategies as workers: every rank holds the model and some of the examples."""

import numpy as np

from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel import bucketed, naive
from minidist.datasets import shard
from minidist.rng import Randomness
from minidist.tools.strategies.cases import INPUT, Case, Outcome, as_input, collect


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
    x = as_input(case.inputs[examples])
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
