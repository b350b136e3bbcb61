"""What ZeRO moves and holds: ledgers, arrays and the allocator, against closed forms."""

import resource
import sys
import tracemalloc

import numpy as np
import pytest

from minidist import Cluster, Tensor, nn, optim, run
from minidist.autograd import Function
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.events import EventLog
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.planning.costs.zero import FP32_ADAM, zero_bytes_held, zero_bytes_moved
from minidist.verify.compare import compare
from tests import causes

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
@pytest.mark.parametrize("size", [1, 2, 3, 4])
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
@pytest.mark.parametrize("size", [1, 2, 3, 4])
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


def test_the_convention_is_sixteen_bytes_per_parameter():
    P = 1000
    assert sum(FP32_ADAM.values()) == 16
    totals = [sum(zero_bytes_held(stage, [P // 50] * 50, 4, 0).values()) for stage in range(4)]
    blocks = P // 50
    assert totals[:2] == [16 * P, 8 * P + 8 * P // 4]
    assert totals[2] == 4 * P + 12 * P // 4 + 4 * blocks
    assert totals[3] == 16 * P // 4 + 12 * blocks


class Measured(nn.Module):
    """A layer that notes the bytes in use when its backward begins, and when it ends."""

    def __init__(self, layer, seen):
        self.layer, self.flat, self.seen = layer, layer.flat, seen

    def forward(self, x, randomness=None):
        x = Tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x
        return Measure(self.seen)(self.layer(Measure(self.seen)(x)))


class Measure(Function):
    def __init__(self, seen):
        self.seen = seen

    def forward(self, x):
        return x

    def backward(self, grad):
        self.seen.append(tracemalloc.get_traced_memory()[0])
        return grad


WIDE = [512] * 7  # 6 layers of 1 MiB
SMALL = 1 << 18  # bytes: activations of two examples, and Python's own objects


@each_stage
@pytest.mark.parametrize("size", [1, 4])
def test_the_allocator_sees_no_more_at_any_boundary_of_layers(cluster, stage, size):
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

    sizes = sizes_of(nn.MLP(WIDE))
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
        return Look(self.look)(y)


class Look(Function):
    """Y = X; look when backward comes to the layer, whose weights are there by then."""

    def __init__(self, look):
        self.look = look

    def forward(self, x):
        return x

    def backward(self, grad):
        self.look()
        return grad


def prefetching(group, width, rows, steps):
    """Train without changing weights; return the layers whose weights were wrong when used."""

    wrong = []
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


def test_weights_come_while_the_layer_before_computes_and_are_right_when_used():
    log = EventLog()
    assert run(prefetching, 2, 512, 256, 4, log=log) == [([], True)] * 2
    overlaps = []
    for rank in (0, 1):
        events = [e for e in log.events if e.rank == rank]
        for k in range(1, 6):
            first = [e for e in events if e.name == f"all_gather layer {k}"]
            assert all(e.thread == "gather" for e in first[::2])  # forward, backward in turn
            before = [e for e in events if e.name == f"forward {k - 1}"]
            two_before = [e for e in events if e.name == f"forward {k - 2}"]
            assert len(first) == 8 and len(before) == 4
            overlaps += [g.start < f.end for g, f in zip(first[::2], before, strict=True)]
            for gather, earlier in zip(first[::2], two_before, strict=False):
                assert gather.start > earlier.end  # whose place it takes
        for k in range(5):  # backward: the layer after k is reduced when its backward has ended
            second = [e for e in events if e.name == f"all_gather layer {k}"][1::2]
            assert all(e.thread == "gather" for e in second)
            shard = f"reduce_scatter shard from layers.{k + 1}.weight on"
            after = [e for e in events if e.name == shard]
            overlaps += [g.start < r.start for g, r in zip(second, after, strict=True)]
    assert len(overlaps) == 80 and np.mean(overlaps) > 0.8


def test_ranks_at_different_speeds_find_the_right_weights(cluster):
    def worker(group):
        group.log = EventLog()
        return prefetching(group, 40, 3 if group.rank else 300, 10)

    assert cluster(3).run(worker) == [([], True)] * 3


# A model whose optimizer state does not fit one rank.

BIG = [1024] * 9  # 8 layers of 4 MiB: P = 32 MiB


def train_in(group, budget, stage, steps=2):
    """Train in as much memory as is in use now, and `budget` bytes more; return some weights."""

    def training(widths):
        model = nn.MLP(widths, activation="gelu")
        x = np.random.default_rng(group.rank).standard_normal((4, widths[0]), np.float32)
        zero = Zero(model, group, stage) if stage else None
        optimizer = optim.AdamW(zero.parameters() if stage else model.parameters(), 1e-3)
        for _ in range(steps):
            loss = nn.cross_entropy(model(x), np.arange(4), 4 * group.size)
            if stage:
                zero.accumulate(loss)
                zero.step(optimizer)
            else:
                loss.backward()
                all_reduce_gradients(model, group)
                optimizer.step()
                optimizer.zero_grad()
        return zero or model

    training([512] * 4)  # BLAS, threads and messages get what they need once for all
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + budget, limits[1]))
    try:
        trained = training(BIG)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return {name: w.reshape(-1)[::97] for name, w in trained.state().items()}


def private_bytes():
    """Return the bytes of private memory that this process may write to, used or not."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="RLIMIT_DATA of mappings is Linux's"
)
def test_a_model_whose_optimizer_state_does_not_fit_trains_in_stage_3():
    """Plain data parallelism needs 4 P; stage 3 on two ranks 2 P, 3 of 8 layers, and the stacks of
    the threads that gather: 8 MiB each, P/4, one beginning while the other ends.

    The limit is on private memory that can be written to. One on addresses (RLIMIT_AS) would be
    blurred: the C library reserves 64 MiB of them for each thread, and then uses those.
    """
    P = 4 * sum(sizes_of(nn.MLP(BIG)))
    with Cluster(2) as ranks:
        want = ranks.run(train_in, None, 0)
    with Cluster(2) as ranks:
        with pytest.raises(RankFailed, match="MemoryError"):
            ranks.run(train_in, 7 * P // 2, 0)
        found = ranks.run(train_in, 7 * P // 2, 3)
    comparison = compare(found, want[0], 1e-4)  # float32
    assert comparison.ok, comparison
