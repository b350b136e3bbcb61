"""Injected faults of matrix splits and meshes: each must turn the matching comparison red.

A fault is a context on a rank: it replaces one thing, for one run.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

from minidist import hybrid, nn, optim
from minidist.autograd import functions
from minidist.collective_functions import (
    AllGather,
    CopyTo,
    Gather,
    ReduceScatter,
    own_part,
    reduce_from,
    reduce_scatter_along,
)
from minidist.hybrid import Hybrid
from minidist.nn.linear import ACTIVATIONS
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.stage import Stage
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    parallel_attention,
    row_parallel,
    sequence_parallel,
    vocab_parallel,
)
from minidist.tensor_parallel.sequence_parallel import GatheredLinear, SequenceDropout
from minidist.tensor_parallel.vocab_parallel import VocabParallelCrossEntropy
from minidist.tools import equivalence, strategies
from tests.strategies import arrays
from tests.tensor_parallel.judges import config_of, judge_layers, judge_transformer
from tests.tensor_parallel.test_parallel_transformer import train_some_steps
from tests.test_collective_functions import adjoint
from tests.test_hybrid import three_steps


def instead(owner, name, value):
    return mock.patch.object(owner, name, value)


def with_fault(group, fault, worker, *arguments):
    with fault(group):
        return worker(group, *arguments)


# Faults of layers.


def a_bias_on_every_rank(group):
    """The bias is added before the sum, so N times."""

    def forward(self, x, randomness=None):
        x = row_parallel.scatter(x, self.group) if self.scatter_input else x
        y = reduce_from(functions.linear(x, self.weight, self.bias), self.group)
        return ACTIVATIONS[self.activation](y)

    return instead(RowParallelLinear, "forward", forward)


def no_bias(group):
    """The bias is added on no rank."""

    def forward(self, x, randomness=None):
        return reduce_from(functions.linear(x, self.weight), self.group) + self.bias * 0

    return instead(RowParallelLinear, "forward", forward)


def f_missing(group):
    """A column-parallel layer hands back what its own columns give."""
    return instead(CopyTo, "backward", lambda self, grad: grad)


def f_averages(group):
    """The gradient is divided by the ranks of the axis."""

    def backward(self, grad):
        return self.group.all_reduce(grad) / self.group.size

    return instead(CopyTo, "backward", backward)


@contextmanager
def f_and_g_swapped(group):
    with ExitStack() as faults:
        for module in (column_parallel, vocab_parallel):
            faults.enter_context(instead(module, "copy_to", reduce_from))
        faults.enter_context(instead(row_parallel, "reduce_from", column_parallel.copy_to))
        yield


def heads_in_equal_runs(group):
    """QKV's columns are cut in N equal runs: the first rank gets all queries."""

    def columns(attention, heads):
        return column_parallel.own_run(attention.qkv.weight.shape[1], group, "columns")

    return instead(parallel_attention, "columns_of_heads", columns)


def heads_before_blocks(group):
    """The columns are taken for [H, 3, D]."""

    def columns(attention, heads):
        full = attention.qkv.weight.shape[1]
        order = np.arange(full).reshape(attention.heads, 3, -1)[heads]
        return order.transpose(1, 0, 2).reshape(-1)

    return instead(parallel_attention, "columns_of_heads", columns)


def g_sums_backward_too(group):
    def backward(self, grad):
        return reduce_scatter_along(grad, self.group, self.axis)

    return instead(Gather, "backward", backward)


def norms_not_summed(group):
    """Every rank keeps the norms' gradient of its positions."""

    def all_reduce(x, label=None, total=group.all_reduce, **more):
        return x if label and ".norm" in label else total(x, label=label, **more)

    return instead(group, "all_reduce", all_reduce)


def positions_not_summed(group):
    def all_reduce(x, label=None, total=group.all_reduce, **more):
        return x if label == "embedding.position.weight" else total(x, label=label, **more)

    return instead(group, "all_reduce", all_reduce)


def masks_by_local_position(group):
    """Every rank draws its mask as if its positions were the first."""

    def forward(self, x, randomness=None):
        return self.dropout.forward(x, randomness)

    return instead(SequenceDropout, "forward", forward)


def every_rank_at_the_first_positions(group):
    def positions(T, group):
        return slice(0, T // group.size)

    parts = replace(sequence_parallel.SEQUENCE_PARALLEL, positions=positions)
    return instead(sequence_parallel, "SEQUENCE_PARALLEL", parts)


def a_part_instead_of_a_sum(group):
    """Backward of the gathered sequence takes this rank's part of its own dX."""
    return instead(sequence_parallel, "reduce_scatter_along", own_part)


def not_gathered_once_more(group):
    """dW is computed from this rank's positions only, repeated."""

    def backward(self, grad, sound=GatheredLinear.backward):
        def all_gather(x, axis=0, label=None, gather=self.group.all_gather):
            again = label == "sequence, once more"
            return np.concatenate([x] * self.group.size, axis) if again else gather(x, axis, label)

        with instead(self.group, "all_gather", all_gather):
            return sound(self, grad)

    return instead(GatheredLinear, "backward", backward)


MATRICES = [f_missing, f_averages, f_and_g_swapped, heads_in_equal_runs, heads_before_blocks]
MATRICES += [a_bias_on_every_rank, no_bias]
SEQUENCE = [norms_not_summed, positions_not_summed, masks_by_local_position]
SEQUENCE += [every_rank_at_the_first_positions, a_part_instead_of_a_sum, not_gathered_once_more]
SEQUENCE += [heads_in_equal_runs]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "kind, fault",
    [("matrices", fault) for fault in MATRICES] + [("sequence", fault) for fault in SEQUENCE],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_fault_in_a_split_transformer_is_found(cluster, kind, fault, size):
    config = config_of(heads=6, width=12)
    found = cluster(size).run(with_fault, fault, judge_transformer, kind, config, 12)
    assert any(comparison.error > 1e-3 for comparison in found), found
    sound = cluster(size).run(judge_transformer, kind, config, 12)  # and the fault is gone again
    assert all(comparison.ok for comparison in sound)


def columns_gathered(group):
    build = partial(nn.Linear, 3, 12, dtype="float64")
    split = partial(ColumnParallelLinear, gather_output=True)
    return judge_layers(group, build, split, arrays(4, 3), 0)


def test_a_gathered_output_whose_gradient_is_summed_is_n_times_too_large(cluster):
    for comparison in cluster(3).run(with_fault, g_sums_backward_too, columns_gathered):
        assert not comparison.ok and comparison.ratio == pytest.approx(3)
    assert all(comparison.ok for comparison in cluster(3).run(columns_gathered))


def a_part_of_its_own(group):
    return instead(AllGather, "backward", Gather.backward)


def reduce_scatter_hands_back_its_part(group):
    """Backward of reduce_scatter without the others' parts: zeros there."""

    def backward(self, grad):
        shape = list(grad.shape)
        pieces = [np.zeros(shape) if r != group.rank else grad for r in range(group.size)]
        return np.concatenate(pieces, self.axis)

    return instead(ReduceScatter, "backward", backward)


@pytest.mark.parametrize(
    "name, fault",
    [
        ("all_gather", a_part_of_its_own),
        ("gather", g_sums_backward_too),
        ("copy_to", f_missing),
        ("copy_to", f_averages),
        ("reduce_scatter", reduce_scatter_hands_back_its_part),
    ],
)
def test_a_backward_that_is_not_the_adjoint_is_found(cluster, name, fault):
    arguments = (adjoint, name, [4, 6], 1, 0, 3)
    for forward, backward, _ in cluster(2).run(with_fault, fault, *arguments):
        assert not abs(forward - backward) < 1e-3


# Faults of the vocabulary.


def padding_gets_a_gradient(group):
    """Forward masks the padding, backward does not."""

    def backward(self, grad, sound=VocabParallelCrossEntropy.backward):
        real = self.vocab - self.group.rank * self.p.shape[-1]
        self.p[:, max(0, real) :] = 0.1
        return sound(self, grad)

    return instead(VocabParallelCrossEntropy, "backward", backward)


def padding_takes_part(group):
    """The logits of padding count in the maximum and the sum."""

    def __init__(self, targets, vocab, *more, sound=VocabParallelCrossEntropy.__init__):
        sound(self, targets, 10**6, *more)

    return instead(VocabParallelCrossEntropy, "__init__", __init__)


@pytest.mark.parametrize("kind", ["matrices", "sequence"])
@pytest.mark.parametrize("fault", [padding_gets_a_gradient, padding_takes_part])
def test_padding_that_learns_is_found(cluster, kind, fault):
    rule = partial(optim.SGD, lr=0.1)
    found = cluster(4).run(with_fault, fault, train_some_steps, kind, rule, 5, False)
    assert max(largest for _, largest, _ in found) > 1e-3


# Faults of the mesh.


def tied_embedding_summed_twice(group):
    def twice(self, before, sound=Pipeline._sum_shared_gradients):
        sound(self, before)
        for p in self.parameters():
            p.summed = None
        sound(self, before)

    return instead(Pipeline, "_sum_shared_gradients", twice)


def tied_embedding_not_summed(group):
    return instead(Pipeline, "_sum_shared_gradients", lambda self, before: None)


def averaged_over_dp(group):
    def scaled(self, sound=Hybrid._sum_gradients):
        sound(self)
        for p in self.parameters():
            p.grad /= self.mesh.dp.size

    return instead(Hybrid, "_sum_gradients", scaled)


def averaged_over_tp(group):
    """As if the copies that the tp ranks hold had been summed."""

    def scaled(self, sound=Hybrid._sum_gradients):
        sound(self)
        for p in self.parameters():
            p.grad /= self.mesh.tp.size if p.shard is None else 1

    return instead(Hybrid, "_sum_gradients", scaled)


def scaled_at_every_stage(group):
    """dX is divided by the stages whenever it crosses to another one."""

    def scaled(self, i, sound=Stage.input_gradient):
        return sound(self, i) / 2

    return instead(Stage, "input_gradient", scaled)


def divided_by_the_own_share(group):
    """Every dp rank divides by its own targets."""

    def cut(inputs, targets, m, seed, step, examples, total, sound=hybrid.micro_batches):
        return sound(inputs, targets, m, seed, step, examples)

    return instead(hybrid, "micro_batches", cut)


def masks_by_local_example(group):
    """Every dp rank draws masks for examples 0, 1, ..."""

    def cut(inputs, targets, m, seed, step, examples, total, sound=hybrid.micro_batches):
        return sound(inputs, targets, m, seed, step, None, total)

    return instead(hybrid, "micro_batches", cut)


def local_norm(group):
    """Every rank clips by the norm of what it holds."""
    return instead(Hybrid, "sum_squares", lambda self, own=0.0: own)


def copies_count_in_the_norm(group):
    """What all tp ranks hold counts tp times."""

    def sum_squares(self, own=0.0):
        return float(self.mesh.pp.all_reduce(self.mesh.tp.all_reduce(np.array(own))))

    return instead(Hybrid, "sum_squares", sum_squares)


def worst(found):
    """Return the largest errors of gradients, norms and weights over ranks and steps."""
    steps = [row for rows, _ in found for row in rows]
    return (
        max(comparison.error for comparison, _, _ in steps),
        max(abs(norm) for _, _, norm in steps),
        max(weights.error for _, weights in found),
    )


ON_THE_MESH = [
    (tied_embedding_summed_twice, (1, 2, 1)),
    (tied_embedding_summed_twice, (1, 2, 2)),
    (tied_embedding_not_summed, (1, 2, 2)),
    (averaged_over_dp, (2, 1, 2)),
    (averaged_over_tp, (2, 1, 2)),
    (scaled_at_every_stage, (1, 2, 1)),
    (divided_by_the_own_share, (2, 1, 1)),
    (masks_by_local_example, (2, 1, 1)),
    (f_averages, (1, 2, 2)),
]


@pytest.mark.parametrize("fault, mesh", ON_THE_MESH)
def test_a_fault_on_the_mesh_is_found_in_the_gradients(cluster, fault, mesh):
    """Not always in the weights: clipping and AdamW do not see a common factor."""
    found = cluster(int(np.prod(mesh))).run(with_fault, fault, three_steps, mesh, {}, True)
    gradients, norms, _ = worst(found)
    assert gradients > 1e-3 and norms > 1e-3


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (2, 1, 2)])
@pytest.mark.parametrize("fault", [local_norm, copies_count_in_the_norm])
def test_a_wrong_norm_is_found_though_the_first_gradients_are_right(cluster, fault, mesh):
    found = cluster(int(np.prod(mesh))).run(with_fault, fault, three_steps, mesh, {}, True)
    assert all(rows[0][0].ok for rows, _ in found)
    _, norms, weights = worst(found)
    assert norms > 1e-3 and weights > 1e-6


@pytest.mark.parametrize("name, options", [("row", {}), ("hybrid", {"dp": 1, "tp": 2})])
def test_verify_sees_a_bias_that_every_rank_adds(cluster, monkeypatch, name, options):
    """Its models have random biases: new ones are zeros, and zeros may be added twice."""
    sound = strategies.STRATEGIES[name]
    case = sound.cases(2)[0]

    def faulty(group, case, **options):
        return with_fault(group, a_bias_on_every_rank, partial(sound.worker, **options), case)

    for worker in (sound.worker, faulty):
        monkeypatch.setitem(strategies.STRATEGIES, name, replace(sound, worker=worker))
        row = equivalence.check(name, replace(case, options=options), 2, cluster(2))
        assert row["ok"] == (worker is sound.worker), row
