"""What the data-parallel lab asks of a student's code; it runs beside that code, judges nothing.

Ranks are threads, models are MLPs in float64.
"""

from types import SimpleNamespace

import numpy as np

from minidist import datasets, nn, optim, run
from minidist.autograd import no_grad
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


def parts(examples, size):
    return {f"the examples on rank {r}": datasets.shard(examples, r, size) for r in range(size)}


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
    answer = on_ranks(worker, len(counts), log)
    for r in range(len(counts)):
        events = [e for e in log.events if e.rank == r and e.name.startswith("all_reduce")]
        answer[f"calls of all_reduce on rank {r}"] = len(events)
    return answer


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
