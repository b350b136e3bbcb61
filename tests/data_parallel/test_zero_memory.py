"""What ZeRO moves and holds: ledgers, arrays and the allocator, against closed forms."""

import tracemalloc

import numpy as np
import pytest

from minidist import Tensor, nn, optim, run
from minidist.autograd import Function
from minidist.data_parallel.zero import Zero
from minidist.events import EventLog
from minidist.pieces import split_sizes
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.planning.costs.zero import zero_bytes_held, zero_bytes_moved, zero_passes
from tests import causes
from tests.strategies import arrays

STAGES = [1, 2, 3]
each_stage = pytest.mark.parametrize("stage", STAGES)
UNEVEN = [7, 9, 2, 5, 3]


def sizes_of(model):
    return [layer.flat.size for layer in model.layers]


def step_of(model, zero, optimizer, group, micro_batches=1, rows=2):
    x = np.ones((rows, zero.shards[0].whole.shapes[0][0]), "float32")
    for i in range(micro_batches):
        loss = nn.cross_entropy(model(x), np.zeros(rows, int), rows * group.size * micro_batches)
        zero.accumulate(loss, last=i == micro_batches - 1)
    zero.step(optimizer)


@each_stage
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_moved_are_the_closed_form_on_every_rank(cluster, stage, size, micro_batches):
    def worker(group, shared):
        model = nn.MLP(UNEVEN)
        if shared:
            model.flatten(group.empty)
        zero = Zero(model, group, stage)
        step_of(model, zero, optim.AdamW(zero.parameters(), 0.01), group, micro_batches)
        return sum(part.ledger.total for part in zero.groups)

    sizes = sizes_of(nn.MLP(UNEVEN))
    forms = [zero_bytes_moved(stage, sizes, 4, size, r, micro_batches) for r in range(size)]
    for shared in (True, False):
        assert cluster(size, "thread").run(worker, shared) == forms
    passes = {1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    assert sum(forms) == passes * (size - 1) * 4 * sum(sizes)
    if stage < 3 and micro_batches == 1:  # what plain data parallelism moves, a call per layer
        plain = [all_reduce_bytes(None, n, 4, size) for n in sizes]
        assert forms == [sum(per_layer) for per_layer in zip(*plain, strict=True)]


def bytes_of(arrays):
    """Return the bytes of the union: what is a view of another array does not count again."""
    ends = sorted((a.__array_interface__["data"][0], a.nbytes) for a in arrays)
    total = reached = 0
    for start, nbytes in ends:
        total += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return total


def held(zero, optimizer):
    """Return the bytes of parameters, gradients and optimizer state that exist on this rank."""
    homes = [home for s in zero.shards for home in (s.whole, s.part)]
    return {
        "parameters": bytes_of([*(home.vector for home in homes), *zero.copies.buffers[1:]]),
        "gradients": bytes_of([*(home.gradient for home in homes), *zero.copies.buffers[:1]]),
        "optimizer state": bytes_of([array for state in optimizer.state for array in state]),
    }


@each_stage
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_bytes_held_are_the_closed_form_on_every_rank(cluster, stage, size, shared):
    def worker(group):
        model = nn.MLP(UNEVEN)
        if shared:
            model.flatten(group.empty)
        zero = Zero(model, group, stage)
        optimizer = optim.AdamW(zero.parameters(), 0.01)
        for _ in range(2):
            step_of(model, zero, optimizer, group, 2)
        return held(zero, optimizer), zero.peak

    sizes = sizes_of(nn.MLP(UNEVEN))
    for rank, (found, peak) in enumerate(cluster(size, "thread").run(worker)):
        want = zero_bytes_held(stage, sizes, size, rank)
        said = causes.of_bytes_held(found, want, zero_bytes_held(0, sizes, size, rank))
        assert said is None, f"stage {stage}, rank {rank} of {size}: {said}"
        assert found == want
        assert peak == want["parameters"] + want["gradients"]


class Looking(Function):
    """Y = X; call `look` when backward comes here."""

    def __init__(self, look):
        self.look = look

    def forward(self, x):
        return x

    def backward(self, grad):
        self.look()
        return grad


class Measured(nn.Module):
    """A layer that notes the bytes in use when its backward begins, and when it ends."""

    def __init__(self, layer, seen):
        self.layer, self.flat = layer, layer.flat
        self.look = lambda: seen.append(tracemalloc.get_traced_memory()[0])

    def forward(self, x, randomness=None):
        x = Tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x
        return Looking(self.look)(self.layer(Looking(self.look)(x)))


WIDE = [512] * 7  # 6 layers of 1 MiB
SMALL = 1 << 18  # bytes: activations of two examples, and Python's own objects


@each_stage
def test_the_allocator_sees_no_more_at_any_boundary_of_layers(cluster, stage):
    """tracemalloc counts all arrays, also messages that have come early.

    The others can be ahead by one collective: of one layer's gradient, and, in stage 3, where a
    second thread gathers meanwhile, of one layer's weights as well.
    """

    def worker(group):
        tracemalloc.start()
        model, seen = nn.MLP(WIDE), []
        layers = [Measured(layer, seen) for layer in model.layers]
        model.sequence[:] = layers
        zero = Zero(model, group, stage)
        optimizer = optim.AdamW(zero.parameters(), 0.01)
        step_of(model, zero, optimizer, group)
        seen.clear()
        for _ in range(2):
            step_of(model, zero, optimizer, group)
        tracemalloc.stop()
        return seen, held(zero, optimizer)

    sizes, size = sizes_of(nn.MLP(WIDE)), 4
    early = (2 if stage == 3 else 1) * 4 * max(sizes) * (size - 1) // size
    for rank, (seen, found) in enumerate(cluster(size).run(worker)):
        want = sum(zero_bytes_held(stage, sizes, size, rank).values())
        assert sum(found.values()) == want
        assert len(seen) == 2 * 2 * len(sizes)
        assert want <= min(seen) <= want + SMALL
        assert max(seen) <= want + SMALL + early


# Stage 3: weights that come while the layer before computes.


class LookedAfter(nn.Module):
    """A layer that logs its forward, and compares its weights with what they should be."""

    def __init__(self, layer, number, log, wrong):
        self.layer, self.number, self.log, self.wrong = layer, number, log, wrong
        self.right = layer.flat.vector.copy()

    def look(self):
        if not np.array_equal(self.layer.flat.vector, self.right):
            self.wrong.append(self.number)

    def forward(self, x, randomness=None):
        self.look()
        with self.log.span(f"forward {self.number}"):
            y = self.layer(x)
        self.look()
        return Looking(self.look)(y)


def prefetching(group, width, steps):
    """Train without changing weights; return the layers whose weights were wrong when used."""
    wrong, rows = [], 3 if group.rank else 300
    model = nn.MLP([width] * 7).flatten(group.empty)
    layers = [LookedAfter(layer, k, group.log, wrong) for k, layer in enumerate(model.layers)]
    for outer in layers:
        outer.flat = outer.layer.flat
    model.sequence[:] = layers
    zero = Zero(model, group, 3)
    optimizer = optim.SGD(zero.parameters(), 0.0)
    x = np.ones((rows, width), np.float32)
    for _ in range(steps):
        zero.accumulate(nn.cross_entropy(model(x), np.zeros(rows, int), rows * group.size))
        zero.step(optimizer)
    apart = [
        not np.may_share_memory(a.whole.vector, b.whole.vector)
        for a, b in zip(zero.shards, zero.shards[1:], strict=False)
    ]
    return wrong, all(apart) and len(apart) == 5


def test_weights_come_in_a_second_thread_and_are_right_when_used_at_any_speed():
    log = EventLog()
    assert run(prefetching, 3, 40, 4, transport="thread", log=log) == [([], True)] * 3
    for rank in range(3):
        events = [e for e in log.events if e.rank == rank]
        for k in range(1, 6):
            forward = [e for e in events if e.name == f"all_gather layer {k}"][::2]  # and backward
            two_before = [e for e in events if e.name == f"forward {k - 2}"]
            assert len(forward) == 4 and all(e.thread == "gather" for e in forward)
            for gather, earlier in zip(forward, two_before, strict=False):
                assert gather.start > earlier.end  # whose place it takes


# Ranks of a host share a copy.

HOSTS = [7, 9, 2, 5]


def sent(group, stage, shards, micro_batches):
    """Return the bytes that this rank sends in a step, inside its copy and between copies."""
    model = nn.MLP(HOSTS, "gelu", dtype="float64")
    zero = Zero(model, group, stage, shards)
    optimizer = optim.SGD(zero.parameters(), 0.1)
    for i in range(micro_batches):
        loss = nn.cross_entropy(model(arrays(2, HOSTS[0])), np.zeros(2, int), 2)
        zero.accumulate(loss, last=i == micro_batches - 1)
    zero.step(optimizer)
    inside = [part.ledger.total for part in zero.groups if part is not zero.between]
    return sum(inside), zero.between.ledger.total


@pytest.mark.parametrize("stage, shards, m", [(1, 2, 3), (2, 1, 3), (3, 2, 3), (3, 4, 1)])
def test_only_one_all_reduce_of_shards_leaves_a_host(cluster, stage, shards, m):
    """With N/k = h copies, of all ranks: h (k - 1) S per pass inside, 2 (h - 1) S between."""
    found = cluster(4, "thread").run(sent, stage, shards, m)
    S, h = nn.MLP(HOSTS, dtype="float64").flatten(), 4 // shards
    nbytes = sum(layer.flat.vector.nbytes for layer in S.layers)
    passes = sum(zero_passes(stage, m))
    assert sum(inside for inside, _ in found) == passes * h * (shards - 1) * nbytes
    assert sum(between for _, between in found) == 2 * (h - 1) * nbytes
    for r, (_, between) in enumerate(found):
        own = [split_sizes(layer.flat.size, shards)[r % shards] for layer in S.layers]
        pieces = [split_sizes(n, h)[r // shards] for n in own]
        assert between == 8 * sum(n - s + (h - 1) * s for n, s in zip(own, pieces, strict=True))
