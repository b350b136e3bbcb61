"""What a rank holds, and what it sends: measured on real graphs and ledgers, against the formulas.

Held are the arrays that can be reached from what is in flight: graphs, inputs, outputs, and what is
put off. Views count as the memory they look at; parameters, and the batch that was given, do not.
"""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, programs
from minidist.pipeline_parallel.actions import last_stage
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate
from tests.strategies import SYNCHRONOUS, arrays, chunks_of, fitting

WIDTH, ROWS = 8, 6  # of every layer; examples per micro-batch


def base_of(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bytes_held(roots, excluded):
    """Return the bytes of all buffers that can be reached from roots, but for those excluded."""
    seen, buffers, stack = set(), {}, list(roots)
    while stack:
        x = stack.pop()
        if id(x) in seen or x is None or isinstance(x, str | int | float | type | np.dtype):
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            buffer = base_of(x)
            buffers[id(buffer)] = buffer.nbytes
        elif isinstance(x, nn.Parameter | nn.Module | Stage):
            continue
        elif isinstance(x, dict):
            stack.extend(x.values())
        elif isinstance(x, list | tuple | set):
            stack.extend(x)
        elif callable(x) and getattr(x, "__closure__", None):
            stack.extend(cell.cell_contents for cell in x.__closure__)
        else:
            slots = [name for c in type(x).__mro__ for name in getattr(c, "__slots__", ())]
            stack.extend(getattr(x, name, None) for name in slots)
            stack.extend(getattr(x, "__dict__", {}).values())
    return sum(size for at, size in buffers.items() if at not in excluded)


class Watched(Stage):
    """A stage that says what it holds, and tells when something is about to change."""

    about_to_change = staticmethod(lambda: None)

    def held(self):
        given = [x for part in self.batch for x in (part.inputs, part.targets)]
        given += [part.examples for part in self.batch]
        given = [x.data if isinstance(x, Tensor) else x for x in given]
        given += [x for p in self.parameters() for x in (p.data, p.grad, p.grad_buffer)]
        excluded = {id(base_of(x)) for x in given if x is not None}
        return bytes_held([self.inputs, self.outputs, self.deferred], excluded)

    def forward(self, i):
        self.about_to_change()
        super().forward(i)

    def _backward(self, i, later):
        self.about_to_change()
        super()._backward(i, later)

    def backward_weights(self, micro_batches):
        self.about_to_change()
        super().backward_weights(micro_batches)


def watched(group, schedule, m, chunks=1, layers=2, options=None):
    """Return the most bytes that this rank's stages hold together, and their `peak`."""
    stages = 1 + last_stage(programs(schedule, group.size, m, chunks).placement)
    model = nn.MLP([WIDTH] * (layers * stages + 1), "gelu", dtype="float64")
    pipeline = Pipeline(model, group, schedule, m, chunks, **(options or {}))
    found = []
    for stage in pipeline.stages:
        stage.__class__ = Watched
        stage.about_to_change = lambda: found.append(sum(s.held() for s in pipeline.stages))
    x, y = arrays(m * ROWS, WIDTH), np.arange(m * ROWS) % WIDTH
    pipeline.run(Batch(x, y).micro_batches(m))
    assert sum(stage.held() for stage in pipeline.stages) == 0
    return max(found), [stage.peak for stage in pipeline.stages]


def of_one_micro_batch(first, last, recompute=False, layers=2):
    """Return the bytes that a stage holds of one micro-batch after F, and after I."""
    model = nn.MLP([WIDTH] * (layers + 2), "gelu", dtype="float64")  # the last is linear alone
    part = model.layers[1:] if last else model.layers[:-1]
    stage = Watched(part, first, last, recompute=recompute)
    stage.begin(Batch(arrays(ROWS, WIDTH), np.arange(ROWS) % WIDTH).micro_batches(1))
    stage.received[0] = arrays(ROWS, WIDTH)
    stage.forward(0)
    if not last:
        stage.output(0)
        stage.output_gradients[0] = arrays(ROWS, WIDTH, seed=1)
    after_forward = stage.held()
    stage.backward_input(0)
    if not first:
        stage.input_gradient(0)
    return after_forward, stage.held()


ARRAY = ROWS * WIDTH * 8
KINDS = {"first": (True, False), "middle": (False, False), "last": (False, True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [2, 3])
def test_what_a_stage_keeps_of_one_micro_batch_has_a_formula(kind, layers):
    """Per layer of gelu(X W + b): X, and of gelu its input and factor. Y is kept by who uses it.

    After I there are X and dY per layer. The first stage's X is the batch's. The last layer has no
    gelu; the loss keeps its probabilities, two vectors of indices, of which one is the batch's, and
    itself.
    """
    linear, curved = layers, layers - (kind == "last")
    loss = ARRAY + ROWS * 8 + 8 if kind == "last" else 0
    own = ARRAY if kind == "first" else 0
    after_forward, after_input = of_one_micro_batch(*KINDS[kind], layers=layers)
    if kind != "last":
        loss = 8  # of Y, which is sent, a number in place of all: its shape
    assert after_forward == (linear + 2 * curved) * ARRAY - own + loss
    assert after_input == 2 * linear * ARRAY - own
    assert of_one_micro_batch(*KINDS[kind], True, layers)[0] == ARRAY - own + 8


def most_in_flight(program, kinds):
    """Walk through a program and add up what is held, per chunk, of passes after F and after I."""
    held, most = {}, 0
    for a in program:
        most = max(most, sum(held.values()))
        after_forward, after_input = kinds[a.chunk]
        if a.sign == "F":
            held[a.micro_batch, a.chunk] = after_forward
        elif a.sign == "I":
            held[a.micro_batch, a.chunk] = after_input
        else:
            del held[a.micro_batch, a.chunk]
    return most


def kinds_of(own, stages):
    return [of_one_micro_batch(k == 0, k == stages - 1) for k in own]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["layer_split", "gpipe", "1f1b"])
def test_measured_activations_are_the_peak_stash_times_those_of_one_micro_batch(
    cluster, schedule, p
):
    for m in (1, 2, 5):
        peaks = simulate(programs(schedule, p, m)).peak_stash
        for r, (held, counted) in enumerate(cluster(p, "thread").run(watched, schedule, m)):
            assert held == peaks[r] * of_one_micro_batch(r == 0, r == p - 1)[0], (r, m)
            assert counted == [peaks[r]]


SEVERAL = [
    ("interleaved", 2),
    ("interleaved", 3),
    ("looped_bfs", 2),
    ("interleaved_zb", 2),
    ("zb_v", 2),
    ("v_half", 2),
    ("v_min", 2),
    ("dualpipe_v", 2),
]


@pytest.mark.parametrize("schedule, chunks", SEVERAL)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_of_several_chunks_the_rank_holds_what_its_program_says(cluster, schedule, chunks, p):
    for m in {fitting(schedule, p, m) for m in (p, 2 * p)}:
        made = programs(schedule, p, m, chunks)
        stages = 1 + max(k for own in made.placement for k in own)
        peaks = simulate(made).peak_stash
        for r, (held, _) in enumerate(cluster(p, "thread").run(watched, schedule, m, chunks)):
            kinds = kinds_of(made.placement[r], stages)
            assert held == most_in_flight(made[r], kinds), (r, m)
            middle = {0, stages - 1}.isdisjoint(made.placement[r])
            if schedule in ("interleaved", "looped_bfs") and middle:  # its chunks are alike
                assert held == peaks[r] * chunks * kinds[0][0]


@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_after_the_input_half_less_is_held_and_its_share_is_exact(cluster, schedule, weights_last):
    for p, m in ((1, 3), (2, 5), (3, 6)):
        made = programs(schedule, p, m, weights_last=weights_last)
        peaks = simulate(made).peak_stash
        found = cluster(p, "thread").run(watched, schedule, m, 1, 2, {"weights_last": weights_last})
        for r, (held, counted) in enumerate(found):
            ((whole, half),) = kinds_of([r], p)
            assert held == most_in_flight(made[r], [(whole, half)]), (r, m)
            assert half < whole and held <= peaks[r] * whole and counted == [peaks[r]]


def test_with_recompute_gpipe_holds_its_inputs_alone(cluster):
    found = cluster(3, "thread").run(watched, "gpipe", 6, 1, 2, {"recompute": True})
    assert [held for held, _ in found] == [6 * 8, 6 * (ARRAY + 8), 6 * (ARRAY + 8)]


def test_what_was_received_is_let_go_with_its_backward(cluster):
    """No array of an earlier micro-batch lives when all is done, and none of an earlier batch."""

    def worker(group):
        pipeline = Pipeline(nn.MLP([WIDTH] * 5, dtype="float64"), group, "1f1b", 4)
        for _ in range(2):
            pipeline.backward(Batch(arrays(8, WIDTH), np.zeros(8, int)))
        (stage,) = pipeline.stages
        kept = (stage.received, stage.output_gradients, stage.inputs, stage.outputs, stage.deferred)
        return [len(x) for x in kept]

    assert cluster(3, "thread").run(worker) == [[0] * 5] * 3


def traced_peak(group, recompute, m, rows, width, layers):
    """Return the most bytes that were allocated at once while a batch ran, beyond the start."""
    model = nn.MLP([width] * (layers * group.size + 1), "gelu", dtype="float64")
    pipeline = Pipeline(model, group, "gpipe", m, recompute=recompute)
    batch = Batch(arrays(m * rows, width), np.arange(m * rows) % width).micro_batches(m)
    pipeline.run(batch)  # gradients and what is made once are there
    tracemalloc.start()
    try:
        pipeline.run(batch)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_with_recompute_the_allocator_sees_the_inputs_and_one_micro_batch(cluster):
    m, rows, width, layers = 12, 64, 32, 6
    array = rows * width * 8
    plain = cluster(2).run(traced_peak, False, m, rows, width, layers)
    less = cluster(2).run(traced_peak, True, m, rows, width, layers)
    whole = (3 * layers - 1) * array
    assert plain[0] > m * whole  # the first rank: 12 micro-batches of 17 arrays each
    on_the_way = 2 * m * array  # of both directions, however slow the other rank is
    assert less[0] < on_the_way + 8 * array + 2 * whole  # and one of them, with its gradients
    assert less[1] < on_the_way + 8 * array + 2 * whole + m * array  # the last one: and its inputs


def bytes_sent(group, schedule, stages, options):
    """Return what a rank sends for 5 examples of 3 positions, width 4, and for the tied table."""
    model = nn.Transformer(7, 4, 2, max(0, stages - 2), 3, dtype="float64", tied=True)
    pipeline = Pipeline(model, group, schedule, **options)
    tokens = np.arange(15).reshape(5, 3) % 7
    pipeline.backward(Batch(tokens, tokens))
    shared = pipeline.shared.get("embedding.token.weight")
    return dict(group.ledger.bytes), dict(shared.ledger.bytes) if shared is not None else {}


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_each_rank_sends_b_t_c_numbers_over_its_boundaries_whatever_m(cluster, schedule, p, safe):
    """An activation leaves its rank, and its gradient the next one. Tied: 2 (N - 1)/N S more."""
    boundary, table, chunks = 5 * 3 * 4 * 8, 7 * 4 * 8, chunks_of(schedule)
    for m in {fitting(schedule, p, m) for m in (p, 8)}:
        holder = {
            k: r for r, own in enumerate(programs(schedule, p, m, chunks).placement) for k in own
        }
        want = Counter()
        for k in range(len(holder) - 1):
            if holder[k] != holder[k + 1]:
                want.update({holder[k]: boundary, holder[k + 1]: boundary})
        tied = {holder[0], holder[len(holder) - 1]}
        options = {"micro_batches": m, "chunks": chunks, "rendezvous_safe": safe}
        found = cluster(p, "thread").run(bytes_sent, schedule, len(holder), options)
        for r, sent in enumerate(found):
            assert sent == (
                {"send": want[r]},
                {"all_reduce": table} if r in tied and len(tied) > 1 else {},
            )
