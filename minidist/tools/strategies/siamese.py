"""Siamese branches as a worker: one rank runs both, or two ranks one each."""

from collections import Counter

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.pipeline_parallel import branch_placement
from minidist.rng import Randomness, generator
from minidist.tools.strategies.cases import INPUT, Case, Outcome, bill, collect


def siamese_worker(group: Group, case: Case, micro_batches: int = 1) -> Outcome:
    """Run one batch of pairs under pipeline_parallel/branch_placement.py."""
    model = case.model
    inputs = []
    for examples in np.array_split(np.arange(len(case.inputs)), micro_batches):
        x = Tensor(case.inputs[examples], requires_grad=True)
        inputs.append(x)
        branch_placement.forward_backward(
            model,
            x,
            case.targets[examples],
            group,
            case.loss,
            case.targets.size,
            Randomness(case.seed, 0, examples),
        )
    branch_placement.all_reduce_shared(model, group)
    return _outcome(group, model, inputs, bill(group))


def _outcome(group: Group, model: nn.Siamese, inputs: list[Tensor], moved: Counter) -> Outcome:
    """Show to every rank what one of them holds: the join's gradient, each half of the input's."""
    result = collect(model)
    for name in model.join.named_parameters():
        result[name] = group.broadcast(result[name], branch_placement.JOIN)
    rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in inputs]
    result[INPUT] = group.all_reduce(np.concatenate(rows))  # the half of the other rank is zero
    return Outcome(result, moved.total(), operations=dict(moved))


def siamese_bytes(case: Case, ranks: int) -> int:
    """Return 0 on one rank; on two, an embedding there, its gradient back, 2 S to add up S bytes.

    The embedding has B E numbers of the parameters' dtype, S is what the branch does not freeze.
    """
    model = case.model
    weight = model.join.weight
    embedding = len(case.inputs) * weight.shape[0] * weight.dtype.itemsize
    shared = branch_placement.shared_parameters(model)
    return (ranks - 1) * 2 * (embedding + sum(p.data.nbytes for p in shared if p.requires_grad))


def siamese_cases(ranks: int) -> list[Case]:
    """Seven pairs in three classes, and a single pair with an output to fit."""
    random = generator(0, "siamese cases")
    pairs, labels = random.standard_normal((7, 2, 6)), random.integers(0, 3, 7)
    model = nn.Siamese([6, 9, 4], classes=3, activation="gelu", seed=1, dtype="float64")
    single = nn.Siamese([6, 5, 5], classes=2, activation="relu", seed=2, dtype="float64")
    outputs = random.standard_normal((1, 2))
    return [
        Case("7 pairs", model, pairs, labels),
        Case("1 pair", single, pairs[:1], outputs, nn.squared_error),
    ]
