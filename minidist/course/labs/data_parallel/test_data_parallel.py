"""Data parallelism: shards, the sum, buckets, the three stages of ZeRO. Ranks are threads."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import datasets, nn, optim, run
from minidist.autograd import no_grad
from minidist.course.inside import inside, task
from minidist.course.labs.ranks import each_rank, on_ranks, refused
from minidist.data_parallel import bucketed, naive, zero
from minidist.events import EventLog


def build(sizes, seed, frozen=()):
    model = nn.MLP(sizes, "gelu", seed=seed, dtype="float64")
    return model.freeze(*frozen) if frozen else model


def slices(counts, micro_batches, rank):
    """Return the examples of each micro-batch of a rank, which has counts[rank] neighbours."""
    ends = np.cumsum([0, *counts])
    return np.array_split(np.arange(ends[rank], ends[rank + 1]), micro_batches)


def gradients(model):
    """Return a copy of every gradient that there is."""
    return {n: p.grad.copy() for n, p in model.named_parameters().items() if p.grad is not None}


@inside
def parts(examples, size):
    return [{"the examples": datasets.shard(examples, r, size)} for r in range(size)]


@inside
def dealt(examples, batch, seed, size, micro_batches, epochs):
    """Return, of each epoch and rank: all its micro-batches in a row, their lengths, totals."""
    answer = {}
    for e in range(epochs):
        for r in range(size):
            sampler = datasets.Sampler(examples, batch, seed, r, size, micro_batches)
            shares = list(sampler.epoch(e))
            cards = [m for share in shares for m in share.micro_batches]
            lengths = np.array([[len(m) for m in share.micro_batches] for share in shares])
            here = f"in epoch {e} on rank {r}"
            answer |= {
                f"the lengths of micro-batches {here}": lengths,
                f"the examples {here}": np.concatenate([np.zeros(0, int), *cards]),
                f"total {here}": [share.total for share in shares],
            }
    return answer


@inside
@each_rank("counts", len)
def all_reduced(group, sizes, seed, frozen, x, y, counts):
    """Return every rank's gradients, the bytes it gave, and its weights; it has counts[r] rows."""
    model = build(sizes, seed, frozen)
    (mine,) = slices(counts, 1, group.rank)
    if len(mine):  # else no gradient is there at all
        nn.cross_entropy(model(x[mine]), y[mine], reduction_size=len(x)).backward()
    naive.all_reduce_gradients(model, group)
    weights = np.concatenate([p.data.reshape(-1) for p in model.parameters()])
    return {**gradients(model), "bytes": group.ledger.total, "the weights": weights}


@inside
def buckets(sizes, cap):
    """Return the numbers of the parameters in each bucket; parameter i has sizes[i] elements.

    -1 is what is no parameter.
    """
    parameters = [nn.Parameter(np.zeros(n), f"p{i}") for i, n in enumerate(sizes)]
    number = {id(p): i for i, p in enumerate(parameters)}
    given = list(parameters)
    found = bucketed.plan(given, cap)
    answer = {
        f"bucket {b}": np.array([number.get(id(p), -1) for p in bucket], int)
        for b, bucket in enumerate(found)
    }
    same = list(map(id, given)) == list(map(id, parameters))
    return answer | {"the list of parameters is as it was": same}


@inside
def launches(buckets, arrivals):
    """Tell a reducer of gradients, one after another; return what it had launched after each.

    buckets  numbers of parameters; arrivals, the order in which their gradients are complete
    """
    parameters = {i: nn.Parameter(np.zeros(1), f"p{i}") for bucket in buckets for i in bucket}
    model = nn.Module()
    model.weights = list(parameters.values())
    plan = [[parameters[i] for i in bucket] for bucket in buckets]

    def worker(group):
        reducer = bucketed.Bucketed(model, group, check_weights=False, buckets=plan)
        launched = []
        reducer.orders, reducer.launched = SimpleNamespace(put=launched.append), 0
        reducer.ready(parameters[arrivals[0] if arrivals else buckets[0][0]])
        answer = {"the buckets launched before the last backward": np.array(launched, int)}
        reducer.missing = [len(bucket) for bucket in buckets]
        for k, i in enumerate(arrivals):
            reducer.ready(parameters[i])
            answer[f"the buckets launched after {k + 1} gradients"] = np.array(launched, int)
        reducer.launch_until(len(buckets))
        return answer | {"the buckets launched at the end": np.array(launched, int)}

    (answer,) = run(worker, 1, transport="thread", timeout=10)
    return answer


@inside
def overlapped(sizes, seed, x, y, counts, micro_batches, moved, buckets):
    """Return every rank's gradients, reduced in the buckets given; bytes and number of calls.

    moved  whether gradients of earlier micro-batches are outside of the flat vector
    """

    def worker(group):
        model = build(sizes, seed).flatten(group.empty)
        parameters = model.parameters()
        plan = [[parameters[i] for i in bucket] for bucket in buckets]
        reducer = bucketed.Bucketed(model, group, buckets=plan)
        *earlier, last = slices(counts, micro_batches, group.rank)
        for mine in earlier:
            nn.cross_entropy(model(x[mine]), y[mine], reduction_size=len(x)).backward()
        if moved:
            for p in model.parameters():
                p.grad = p.grad.copy()
        with reducer.reduce():
            if len(last):
                nn.cross_entropy(model(x[last]), y[last], reduction_size=len(x)).backward()
        return {**gradients(model), "bytes": reducer.group.ledger.total}

    log = EventLog()
    answers = on_ranks(worker, len(counts), log)
    calls = [event.rank for event in log.events if event.name.startswith("all_reduce")]
    return [own | {"calls of all_reduce": calls.count(r)} for r, own in enumerate(answers)]


@inside
@each_rank("counts", len)
def reduced_to_shards(group, sizes, seed, frozen, x, y, counts, micro_batches, stage, shards):
    """Return what every rank keeps of each layer's gradient after a step's micro-batches."""
    share = zero.Zero(build(sizes, seed, frozen).flatten(group.empty), group, stage, shards)
    for s in share.shards:
        s.whole.gradient[...] = 1e6  # what lies there before is no gradient
    for i, mine in enumerate(slices(counts, micro_batches, group.rank)):
        last = i == micro_batches - 1
        if counts[group.rank] or stage == 2:
            loss = nn.cross_entropy(share.model(x[mine]), y[mine], reduction_size=len(x))
            share.accumulate(loss, last)
        else:  # this rank has no gradient at all
            share.copies.end_backward(last)
        if not last:
            for p in share.model.parameters():
                p.grad = None if p.grad is None else p.grad.copy()  # elsewhere
    whole = [p.name for p in share.model.parameters() if p.grad is not None]
    kept = {f"its part of layer {k}": s.parameter.grad for k, s in enumerate(share.shards)}
    moved = share.inside.ledger.bytes["reduce_scatter"]
    return {**kept, "whole gradients kept": len(whole), "bytes of reduce_scatter": moved}


@inside
@each_rank("size")
def updated(group, sizes, seed, stage, lr, momentum, size, steps, clip):
    """Give each shard a gradient, clip, update; return norms, all weights, and the bytes.

    steps  per step and layer, the flat gradient, of which each rank has its part
    """

    share = zero.Zero(build(sizes, seed).flatten(group.empty), group, stage)
    optimizer = optim.SGD(share.parameters(), lr=lr, momentum=momentum)
    without = refused(share.step, optimizer)
    norms = []
    for step in steps:
        for s, flat in zip(share.shards, step, strict=True):
            s.parameter.accumulate(flat[s.elements])
        norms.append(optimizer.clip_global_norm(clip, share.sum_squares))
        share.step(optimizer)
    moved = share.inside.ledger.bytes["all_gather"]
    left = sum(s.parameter.grad is not None for s in share.shards)
    return {
        **share.state(),
        "the norm of each step": norms,
        "bytes of all_gather": moved,
        "gradients of shards kept after a step": left,
        "a step without gradients is refused": without,
    }


@inside
@each_rank("size")
def gathered(group, sizes, seed, x, size, order):
    """Run stage 3 forward; then ask for layers in an order, each time with the one that is next.

    order  [(layer, the one after it)]; the layer that is coming is -1 if none is
    """

    share = zero.Zero(build(sizes, seed).flatten(group.empty), group, 3)
    (apart,) = share.copies.gatherer.groups.values()
    ledger = apart.ledger
    with no_grad():
        answer = {"the output": share.model(x).data}
    answer["bytes of the forward pass"] = ledger.total
    for k, (layer, then) in enumerate(order):
        share.copies.gatherer.need(layer, then=then)
        called = f"after need({layer}, then={then})"
        answer[f"the weights {called}, call {k},"] = share.shards[layer].whole.vector.copy()
        coming = share.copies.gatherer.coming
        answer[f"the coming layer {called}, call {k},"] = -1 if coming is None else coming
    share.copies.gatherer.wait()
    return answer | {"bytes": ledger.total}


def problem(rng, counts):
    """Draw an MLP and a batch of sum(counts) examples."""
    sizes, n = rng.integers(2, 6, int(rng.integers(3, 5))).tolist(), sum(counts)
    x, y = rng.standard_normal((n, sizes[0])), rng.integers(0, sizes[-1], n)
    return {"sizes": sizes, "seed": int(rng.integers(1000)), "x": x, "y": y, "counts": counts}


def uneven(rng, size):
    """Draw how many examples each rank has: all different from the mean where that can be."""
    counts = rng.integers(0, 4, size).tolist()
    counts[int(rng.integers(size))] += 2
    return counts


@task("3.1")
@pytest.mark.parametrize("size", [1, 3, 4])
def test_shards_are_as_equal_as_can_be(size, rng):
    few = size == 4  # fewer than ranks
    examples = rng.permutation(int(rng.integers(1, 3) if few else rng.integers(5, 12)))
    parts.check(examples, size)


@task("3.1")
@pytest.mark.parametrize(
    "batch, size, micro_batches", [(4, 1, 1), (5, 2, 1), (3, 2, 3), (50, 3, 2)]
)
def test_an_epoch_deals_every_example_once(batch, size, micro_batches, rng):
    n, seed = int(rng.integers(10, 20)), int(rng.integers(1000))
    dealt.check(n, batch, seed, size, micro_batches, 2)


@task("3.2")
@pytest.mark.parametrize(
    "group, counts, frozen",
    [
        ("examples on every rank", [3], []),
        ("examples on every rank", [1, 3], []),
        ("uneven and empty shards", 2, []),
        ("uneven and empty shards", 4, []),
        ("uneven and empty shards", [2, 0, 1], []),
        ("frozen parameters", 3, ["layers.0.weight"]),
    ],
)
def test_every_rank_has_the_whole_batchs_gradient(group, counts, frozen, rng):
    counts = uneven(rng, counts) if isinstance(counts, int) else counts
    all_reduced.check(**problem(rng, counts), frozen=frozen)


@task("3.3")
@pytest.mark.parametrize("group", ["several parameters fit", "too large, empty, or none"])
def test_buckets_are_filled_in_the_order_of_backward(group, rng):
    all_in_one = rng.integers(1, 5, 6).tolist()
    if group == "several parameters fit":
        buckets.check(all_in_one, 8 * sum(all_in_one))
        for most in (3, 6, 12):
            sizes = rng.integers(1, most, int(rng.integers(4, 9))).tolist()
            buckets.check(sizes, 8 * int(rng.integers(2, 12)))
    else:
        for sizes, cap in ((all_in_one, 1), ([2, 20, 1, 1, 2], 32), ([0, 3, 0, 2], 16), ([], 16)):
            buckets.check(sizes, cap)


def runs(ends):
    """Return buckets of neighbours, the last ones first."""
    return [list(range(a, b)) for a, b in pairwise(ends)][::-1]


THREE = [[4, 5], [2, 3], [0, 1]]


@task("3.4")
@pytest.mark.parametrize(
    "group",
    [
        f"gradients that {how}"
        for how in ("come in their order", "come in another order", "do not all come")
    ],
)
def test_a_bucket_is_launched_when_it_and_those_before_are_complete(group, rng):
    for count in (1, 4, 7):
        plan = runs(sorted({0, count, *rng.integers(0, count, 3).tolist()}))
        if "their order" in group:
            launches.check(plan, list(range(count))[::-1])
        elif "another order" in group:
            launches.check(plan, rng.permutation(count).tolist())
    if "another order" in group:
        launches.check(THREE, [0, 1, 4, 2, 5, 3])
    elif "not all" in group:
        launches.check(THREE, [5, 4, 0, 1])
        launches.check(THREE, [])


@task("3.4")
@pytest.mark.parametrize("counts, micro_batches", [([3], 1), (3, 2), ([2, 0], 1)])
def test_sums_beside_backward_are_the_whole_batchs(counts, micro_batches, rng):
    given = problem(rng, uneven(rng, counts) if isinstance(counts, int) else counts)
    count = 2 * (len(given["sizes"]) - 1)
    plan = runs(sorted({0, count, int(rng.integers(1, count))}))
    given |= {"micro_batches": micro_batches, "moved": micro_batches > 1, "buckets": plan}
    overlapped.check(**given)


# ZeRO.


@task("3.5")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "group, counts, shards, frozen",
    [
        ("each rank has a shard", [2], 1, []),
        ("each rank has a shard", 2, 2, []),
        ("each rank has a shard", [1, 3, 0], 3, []),
        ("several copies, frozen weights", [2, 0, 1, 1], 2, ["layers.1.weight"]),
    ],
)
def test_gradients_are_reduced_to_their_shards(group, counts, shards, frozen, stage, rng):
    given = problem(rng, uneven(rng, counts) if isinstance(counts, int) else counts)
    given |= {"stage": stage, "micro_batches": shards, "frozen": frozen, "shards": shards}
    reduced_to_shards.check(**given)


@task("3.6")
@pytest.mark.parametrize(
    "group, stage, size",
    [("stages 1, 2", 1, 1), ("stages 1, 2", 1, 3), ("stages 1, 2", 2, 2), ("stage 3", 3, 4)],
)
def test_a_shard_is_updated_by_one_norm_and_gathered(group, stage, size, rng):
    sizes, seed = rng.integers(2, 6, int(rng.integers(3, 5))).tolist(), int(rng.integers(1000))
    lengths = [layer.flat.size for layer in build(sizes, seed).layers]
    steps = [[rng.standard_normal(n) for n in lengths] for _ in range(2)]
    norms = [float(np.sqrt(sum((g**2).sum() for g in step))) for step in steps]
    lr, momentum, shorter = rng.uniform([0.05, 0.5, 0.5], [0.2, 0.9, 0.8]).tolist()
    given = {"sizes": sizes, "seed": seed, "stage": stage, "lr": lr, "momentum": momentum}
    updated.check(**given, size=size, steps=steps, clip=min(norms) * shorter)


@task("3.7")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_come_as_forward_and_backward_need_them(size, rng):
    given = problem(rng, [2])
    given |= {"order": [[k, k - 1] for k in reversed(range(len(given["sizes"]) - 1))]}
    gathered.check(**{name: given[name] for name in ("sizes", "seed", "x", "order")}, size=size)


@task("3.7")
def test_weights_come_though_another_layer_is_coming(rng):
    given = problem(rng, [2])  # 1 is coming when 0, whose place layer 2 has, is needed
    order, sizes = [[2, 1], [0, 1], [1, 2], [2, 3]], [*given["sizes"], 3][:4]
    gathered.check(sizes=sizes, seed=given["seed"], x=given["x"], size=2, order=order)
