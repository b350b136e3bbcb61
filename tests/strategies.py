"""What hypothesis draws: shapes, arrays, splits, models; and how tests look into a graph."""

from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import Function
from minidist.backend import to_host
from minidist.context_parallel import plain, zigzag
from minidist.nn.embedding import BEGIN, PAD
from minidist.pieces import Positions
from minidist.pipeline_parallel import SCHEDULES, add_communication, add_reductions, programs
from minidist.pipeline_parallel.actions import Forward, Programs, looped, passes_backward, updates
from minidist.pipeline_parallel.execution_order import Stuck, in_order
from minidist.pipeline_parallel.random_order import random_order, random_placement
from minidist.pipeline_parallel.zero_bubble import v_shaped
from minidist.planning.graph import Graph, Op, Value
from minidist.planning.plans.plan import Machine

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
def transformers(draw, dropout=(0.0, 0.3), experts=(0, 0, 1, 3)):
    """Draw a small Transformer in float64, perhaps with experts."""
    heads, experts = draw(st.integers(1, 3)), draw(st.sampled_from(experts))
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
        experts=experts,
        top_k=draw(st.integers(1, max(1, experts))),
        capacity=draw(st.sampled_from([None, 0.5, 1.0])) if experts else None,
    )


@st.composite
def translators(draw, dropout=(0.0,)):
    """Draw a small encoder-decoder in float64, none of whose parameters is 0."""
    heads = draw(st.integers(1, 2))
    model = nn.Seq2Seq(
        source_vocab=draw(st.integers(3, 7)),
        target_vocab=draw(st.integers(3, 7)),
        width=heads * draw(st.integers(2, 3)),
        heads=heads,
        depth=draw(st.integers(1, 2)),
        source_length=draw(st.integers(1, 4)),
        target_length=draw(st.integers(1, 4)),
        dtype="float64",
        dropout=draw(st.sampled_from(dropout)),
    )
    random = np.random.default_rng(draw(seeds))
    for p in model.parameters():
        p.data[...] = random.standard_normal(p.shape)
    return model


@st.composite
def sentences(draw, model, most=3):
    """Draw tokens[B, S + T] for an encoder-decoder: sources of any lengths, then any targets."""
    B, S, T = draw(st.integers(1, most)), model.source_length, model.target_length
    random = np.random.default_rng(draw(seeds))
    source = random.integers(PAD + 1, model.source_vocab, (B, S))
    lengths = draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
    source[np.arange(S) >= np.array(lengths)[:, None]] = PAD
    target = random.integers(0, model.vocab, (B, T))
    target[:, 0] = BEGIN
    return np.concatenate([source, target], axis=1)


SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 2, 4))]
LOOPED = [name for name in SYNCHRONOUS if SCHEDULES[name].most_chunks is None]
GROUPED = ("interleaved", "interleaved_zb")  # p micro-batches at a time


def chunks_of(schedule):
    """Return how many chunks a schedule has in a test: two, if it can have as many."""
    return SCHEDULES[schedule].most_chunks or 2


def fitting(schedule, p, m):
    """Return how many micro-batches a schedule takes on p ranks: m, or a number near it."""
    if schedule in GROUPED:
        return p * max(1, m // p)
    return max(m, 2 * p) if schedule == "dualpipe_v" else m


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
                for chunks in range(1, (most_chunks if schedule in LOOPED else 1) + 1):
                    for last in (False, True):
                        if fitting(schedule, p, m) == m:
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
    """Draw (programs, p, m) that are in no paper: any order that ranks can execute.

    Any placement, some of those in use; some neighbours are pairs.
    """
    p, m = draw(st.integers(1, max_p)), draw(st.integers(1, max_m))
    random = draw(st.randoms(use_true_random=False))
    used = [looped(p, 1), looped(p, 2), looped(p, 3), v_shaped(p)]
    any_of = random_placement(random, p, random.randint(p, 3 * p))
    made = random_order(random, draw(st.sampled_from([*used, any_of])), m)
    return with_pairs(made, random), p, m


def with_pairs(made, random):
    """Return programs of which some neighbours, a forward and a backward, are pairs that can be."""
    pairs = [
        (r, f, b)
        for r, program in enumerate(made)
        for f, b in pairwise(program)
        if isinstance(f, Forward) and passes_backward(b)
    ]
    for some in (pairs, random.sample(pairs, len(pairs) // 2)):
        paired = Programs(made, made.placement, some)
        try:
            for _ in in_order(paired, overlap=True):
                pass
        except Stuck:
            continue
        return paired
    return made


@st.composite
def pipelines(draw, max_p=4, max_m=8):
    """Draw how a synchronous pipeline is run: a dictionary with p, m, chunks and all the options.

    m is anything, also more than there are examples and less than there are stages. `stages` are
    the virtual ones.
    """
    schedule = draw(st.sampled_from(SYNCHRONOUS))
    p = draw(st.integers(1, max_p))
    chunks = draw(st.integers(1, 3 if p < 3 else 2)) if schedule in LOOPED else 1
    m = fitting(schedule, p, draw(st.integers(1, max_m)))
    options = {
        "recompute": draw(st.booleans()),
        "rendezvous_safe": draw(st.booleans()),
        "weights_last": draw(st.booleans()),
    }
    stages = p * (chunks if schedule in LOOPED else chunks_of(schedule))
    more = {"schedule": schedule, "micro_batches": m, "chunks": chunks}
    return {"p": p, "stages": stages, "options": more | options}


@st.composite
def cuts(draw, layers, stages):
    """Draw a cut of so many layers into contiguous stages, even or not."""
    between = st.permutations(range(1, layers)).map(lambda order: sorted(order[: stages - 1]))
    return [range(a, b) for a, b in pairwise([0, *draw(between), layers])]


@st.composite
def cut_sequences(draw, max_ranks=4, max_positions=24):
    """Draw the positions of each rank: plain, zig-zag, or any pieces dealt to any ranks."""
    N = draw(st.integers(1, max_ranks))
    T, how = draw(st.integers(N, max_positions)), draw(st.sampled_from(["plain", "zigzag", "any"]))
    if how != "any":
        return {"plain": plain, "zigzag": zigzag}[how](T, N)
    pieces = draw(cuts(T, draw(st.integers(N, min(T, 3 * N)))))
    of = [*range(N), *(draw(st.integers(0, N - 1)) for _ in pieces[N:])]
    return [
        Positions(
            tuple((p[0], p[-1] + 1) for p, own in zip(pieces, of, strict=True) if own == r), T
        )
        for r in range(N)
    ]


@st.composite
def windows(draw, T, B):
    """Draw the documents of B windows of T positions, (first, last + 1) each; or None: one each."""
    if draw(st.booleans()):
        return None
    inner = st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set())
    return [list(pairwise([0, *sorted(draw(inner)), T])) for _ in range(B)]


def with_or_without_communication(drawn):
    """Map a strategy of (programs, p, m) to one whose programs may have their transfers."""

    def some(args):
        (made, p, m), how = args
        made = made if how is None else add_communication(made, rendezvous_safe=how)
        return made, p, m

    return st.tuples(drawn, st.sampled_from([None, False, True])).map(some)


def with_or_without_reductions(drawn):
    """Map a strategy of (programs, p, m) to one whose programs may sum gradients inside them."""

    def some(args):
        (made, p, m), sums = args
        return (add_reductions(made) if sums and not updates(made) else made), p, m

    return st.tuples(drawn, st.booleans()).map(some)


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
    """Collect the dtypes of all results of functions, and of all their gradients, in a set.

    A loss does not count: of float16 it is float32.
    """
    found, call = set(), Function.__call__

    def watched_call(function, *inputs):
        result, backward = call(function, *inputs), function.backward
        found.update([result.dtype] if result.ndim else [])

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


@st.composite
def profiles(draw, most_layers=6):
    """Draw (seconds, activation bytes, parameter bytes) of some layers, in whole numbers."""
    small, huge = st.integers(0, 12), st.just(10**20)
    layer = st.tuples(small | huge, small | huge, small | huge)
    return draw(st.lists(layer, min_size=1, max_size=most_layers))


@st.composite
def index_graphs(draw, max_ops=4):
    """Draw a small graph of ops with index descriptions: products, sums, a softmax, and a loss."""
    values, ops, B = {}, [], draw(st.sampled_from([2, 3, 4]))

    def value(name, shape, kind):
        dtype = draw(st.sampled_from(["float32", "float64"]))
        values[name] = Value(name, shape, dtype, kind)
        return name

    alive = [value("x", (B, draw(st.integers(1, 4))), "input")]
    for i in range(draw(st.integers(1, max_ops))):
        source = draw(st.sampled_from(alive))
        C = values[source].shape[1]
        twins = [name for name in alive if values[name].shape == (B, C)]
        kind = draw(st.sampled_from(["matmul", "add", "relu", "softmax", "multiply"]))
        F = draw(st.sampled_from([1, 2, 4, 6])) if kind == "matmul" else C
        shape = {"matmul": (C, F), "add": (C,)}.get(kind)
        weights = [n for n, v in values.items() if v.kind == "parameter" and v.shape == shape]
        if shape and not (weights and draw(st.booleans())):  # else it is tied to another
            weights = [value(f"w{i}", shape, "parameter")]
        indices, inputs = {
            "matmul": ("bi,io->bo", (source, *weights[:1])),
            "add": ("bo,o->bo", (source, *weights[:1])),
            "relu": ("bo->bo", (source,)),
            "softmax": ("bo->bo", (source,)),
            "multiply": ("bo,bo->bo", (source, draw(st.sampled_from(twins)))),
        }[kind]
        whole = frozenset("o" if kind == "softmax" else "")
        ops.append(Op(kind, inputs, value(f"h{i}", (B, F), "result"), indices, whole))
        alive.append(f"h{i}")
    if draw(st.booleans()):
        last = alive[-1]
        ops.append(Op("sum", (last,), value("loss", (), "result"), "bo->", frozenset("o")))
    return Graph(values, ops)


def machines(most=4):
    """Draw a machine of few ranks whose rates are powers of two, so that most times are exact."""
    rates = st.sampled_from([1, 2, 8, 32])
    return st.builds(
        Machine,
        ranks=st.integers(1, most),
        per_node=st.sampled_from([1, 2, 4]),
        flops=rates,
        memory=st.just(10**9),
        link=rates,
        network=rates,
        latency=st.sampled_from([0, 1, 0.25]),
        memory_bandwidth=st.sampled_from([1, 4, float("inf")]),
        overhead=st.sampled_from([0, 0.5]),
    )
