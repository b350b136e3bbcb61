"""What hypothesis draws: shapes, arrays, splits, models; and how tests look into a graph."""

from collections import deque
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import Function
from minidist.backend import to_host
from minidist.pipeline_parallel import SCHEDULES, add_communication, programs
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    looped,
)
from minidist.pipeline_parallel.schedules import updates
from minidist.pipeline_parallel.zero_bubble import v_shaped

seeds = st.integers(0, 2**32 - 1)


def arrays(*shape, seed=0, dtype="float64"):
    """Return normal numbers from a seed: values that no two elements share."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def leaf(*shape, seed=0, dtype="float64"):
    """Return a tensor of such numbers that requires a gradient."""
    return Tensor(arrays(*shape, seed=seed, dtype=dtype), requires_grad=True)


def shapes(min_axes=0, max_axes=3, max_side=4, min_side=1):
    return st.lists(st.integers(min_side, max_side), min_size=min_axes, max_size=max_axes).map(
        tuple
    )


@st.composite
def broadcastable(draw, shape):
    """Draw a shape that broadcasts to `shape`: some axes have length 1, some leading ones are
    missing.
    """
    narrowed = [draw(st.sampled_from([n, 1])) for n in shape]
    return tuple(narrowed[draw(st.integers(0, len(shape))) :])


@st.composite
def mlps(draw):
    """Draw a nonlinear MLP in float64, and its input width."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    activation = draw(st.sampled_from(["relu", "gelu"]))
    return nn.MLP(sizes, activation, seed=draw(st.integers(0, 99)), dtype="float64"), sizes


@st.composite
def transformers(draw, dropout=(0.0, 0.3)):
    """Draw a small Transformer in float64."""
    heads = draw(st.integers(1, 3))
    return nn.Transformer(
        vocab=draw(st.integers(2, 9)),
        width=heads * draw(st.integers(1, 3)),
        heads=heads,
        depth=draw(st.integers(1, 2)),
        context=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 99)),
        dtype="float64",
        dropout=draw(st.sampled_from(dropout)),
        tied=draw(st.booleans()),
    )


SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 2, 2))]


def compositions(n):
    """Return every list of numbers from 1 whose sum is n: replicas of stages on n ranks."""
    if n == 0:
        return [[]]
    return [[first, *rest] for first in range(1, n + 1) for rest in compositions(n - first)]


def every_program(ps, ms, most_chunks=3):
    """Yield (what it is, programs without transfers, p, m): all schedules with all options."""
    for p in ps:
        for m in ms:
            for schedule in SYNCHRONOUS:
                for chunks in range(1, (most_chunks if schedule == "interleaved" else 1) + 1):
                    for last in (False, True):
                        if schedule != "interleaved" or m % p == 0:
                            made = programs(schedule, p, m, chunks, weights_last=last)
                            yield f"{schedule}, {chunks=}, {last=}", made, p, m
            for replicas in compositions(p):
                yield f"{replicas=}", programs("pipedream", p, m, replicas=replicas), p, m
            for every in sorted({max(1, p - 1), p, p + 2}):
                yield f"2bw, {every=}", programs("pipedream_2bw", p, m, update_every=every), p, m


@st.composite
def schedules(draw, max_p=4, max_m=5):
    """Draw (programs, p, m): one of `every_program`."""
    found = programs_of(draw(st.integers(1, max_p)), draw(st.integers(1, max_m)))
    return draw(st.sampled_from(found))[1:]


@cache
def programs_of(p, m):
    return list(every_program([p], [m]))


@st.composite
def linear_extensions(draw, max_p=4, max_m=4):
    """Draw (programs, p, m) that are in no textbook: any order in which nobody waits for ever.

    Some passes have their backward in two halves. All actions stand in one random order that is
    possible; each rank gets its own of them, in this order.
    """
    p, m = draw(st.integers(1, max_p)), draw(st.integers(1, max_m))
    placement = draw(st.sampled_from([looped(p, 1), looped(p, 2), looped(p, 3), v_shaped(p)]))
    random = draw(st.randoms(use_true_random=False))
    where = {k: (r, c) for r, own in enumerate(placement) for c, k in enumerate(own)}
    ahead = []  # per micro-batch, what is still to come; beside them, weight halves
    for i in range(m):
        path = [(where[k][0], Forward(i, where[k][1])) for k in sorted(where)]
        for k in sorted(where, reverse=True):
            path.append((where[k][0], random.choice([Backward, BackwardInput])(i, where[k][1])))
        ahead.append(deque(path))
    result = [[] for _ in range(p)]
    while ahead:
        steps = random.choice(ahead)
        rank, action = steps.popleft()
        result[rank].append(action)
        if type(action) is BackwardInput:
            ahead.append(deque([(rank, BackwardWeight(action.micro_batch, action.chunk))]))
        if not steps:
            ahead.remove(steps)
    return Programs(result, placement), p, m


@st.composite
def pipelines(draw, max_p=4, max_m=8):
    """Draw how a synchronous pipeline is run: a dictionary with p, m, chunks and all the options.

    m is anything, also more than there are examples and less than there are stages. `stages` are
    the virtual ones.
    """
    schedule = draw(st.sampled_from(SYNCHRONOUS))
    p = draw(st.integers(1, max_p))
    chunks = draw(st.integers(1, 3 if p < 3 else 2)) if schedule == "interleaved" else 1
    m = draw(st.integers(1, max_m))
    if schedule == "interleaved":
        m = p * max(1, m // p)
    options = {
        "recompute": draw(st.booleans()),
        "rendezvous_safe": draw(st.booleans()),
        "weights_last": draw(st.booleans()),
    }
    stages = p * (2 if schedule == "zb_v" else chunks)
    more = {"schedule": schedule, "micro_batches": m, "chunks": chunks}
    return {"p": p, "stages": stages, "options": more | options}


@st.composite
def cuts(draw, layers, stages):
    """Draw a cut of so many layers into contiguous stages, even or not."""
    between = st.permutations(range(1, layers)).map(lambda order: sorted(order[: stages - 1]))
    return [range(a, b) for a, b in pairwise([0, *draw(between), layers])]


def with_or_without_communication(drawn):
    """Map a strategy of (programs, p, m) to one whose programs may have their transfers."""

    def some(args):
        (made, p, m), how = args
        made = made if how is None else add_communication(made, rendezvous_safe=how)
        return made, p, m

    return st.tuples(drawn, st.sampled_from([None, False, True])).map(some)


def host(x):
    """Return the array of a tensor, or an array of any device, as a NumPy array."""
    return to_host(x.data if isinstance(x, Tensor) else x)


def gradients(model):
    """Return copies of a model's gradients by name; None where there is none."""
    named = model.named_parameters().items()
    return {name: None if p.grad is None else host(p.grad).copy() for name, p in named}


def assert_same_bits(got, want):
    """Compare two dictionaries of arrays, or None, without any tolerance."""
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name, strict=True)


def functions_below(tensor):
    """Return the set of functions that a tensor was made by, directly or not."""
    found, stack = set(), [tensor]
    while stack:
        source = stack.pop()
        function = source.creator if isinstance(source, Tensor) else source
        if function is not None and function not in found:
            found.add(function)
            stack.extend(function.inputs)
    return found


@contextmanager
def watch_dtypes():
    """Collect the dtypes of all results of functions, and of all their gradients, in a set."""
    found, call = set(), Function.__call__

    def watched_call(function, *inputs):
        result, backward = call(function, *inputs), function.backward
        found.add(result.dtype)

        def watched_backward(grad):
            gradients = backward(grad)
            for g in gradients if isinstance(gradients, tuple) else (gradients,):
                if g is not None:
                    found.add((g() if callable(g) else g).dtype)
            return gradients

        function.backward = watched_backward
        return result

    with mock.patch.object(Function, "__call__", watched_call):
        yield found
