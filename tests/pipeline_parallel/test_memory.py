"""What a rank holds, and what it sends: measured on real graphs and ledgers, against the formulas.

Held are the arrays that can be reached from what is in flight: graphs, inputs, outputs, and what is
put off. Views count as the memory they look at; parameters, and the batch that was given, do not.
"""

from collections import Counter

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import SCHEDULES, Pipeline, programs
from minidist.pipeline_parallel.actions import last_stage
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate
from tests.strategies import SYNCHRONOUS, arrays, chunks_of

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

    def backward(self, i):
        self.about_to_change()
        super().backward(i)

    def backward_input(self, i):
        self.about_to_change()
        super().backward_input(i)

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
def test_what_a_stage_keeps_of_one_micro_batch_has_a_formula(kind, layers=3):
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


def test_a_rank_holds_what_its_program_says_and_its_peak_stash_counts(cluster):
    for schedule, p, m, options in (
        ("layer_split", 2, 3, {}),
        ("gpipe", 3, 5, {}),
        ("1f1b", 3, 5, {}),
        ("1f1b", 2, 5, {"weights_last": True}),
        ("zb_h1", 3, 6, {}),
        ("zb_h2", 2, 5, {}),
        *((schedule, 2, 4, {}) for schedule in SYNCHRONOUS if SCHEDULES[schedule].most_chunks != 1),
    ):
        chunks = chunks_of(schedule)
        made = programs(schedule, p, m, chunks, **options)
        stages, peaks = 1 + last_stage(made.placement), simulate(made).peak_stash
        found = cluster(p, "thread").run(watched, schedule, m, chunks, 2, options)
        for r, (held, counted) in enumerate(found):
            kinds = [of_one_micro_batch(k == 0, k == stages - 1) for k in made.placement[r]]
            assert held == most_in_flight(made[r], kinds), (schedule, r, m)
            if len(kinds) == 1:
                ((whole, half),) = kinds
                assert half < whole and held <= peaks[r] * whole and counted == [peaks[r]]


def test_with_recompute_gpipe_holds_its_inputs_alone(cluster):
    found = cluster(3, "thread").run(watched, "gpipe", 6, 1, 2, {"recompute": True})
    assert [held for held, _ in found] == [6 * 8, 6 * (ARRAY + 8), 6 * (ARRAY + 8)]


def bytes_sent(group, schedule, stages, options):
    """Return what a rank sends for 5 examples of 3 positions, width 4, and for the tied table."""
    model = nn.Transformer(7, 4, 2, max(0, stages - 2), 3, dtype="float64", tied=True)
    pipeline = Pipeline(model, group, schedule, **options)
    tokens = np.arange(15).reshape(5, 3) % 7
    pipeline.backward(Batch(tokens, tokens))
    shared = pipeline.shared.get("embedding.token.weight")
    return dict(group.ledger.bytes), dict(shared.ledger.bytes) if shared is not None else {}


@pytest.mark.parametrize("safe", [False, True])
def test_each_rank_sends_b_t_c_numbers_over_its_boundaries_whatever_m(cluster, safe):
    """An activation leaves its rank, and its gradient the next one. Tied: 2 (N - 1)/N S more."""
    boundary, table, p = 5 * 3 * 4 * 8, 7 * 4 * 8, 3
    for schedule, m in (("1f1b", 3), ("1f1b", 8), ("interleaved", 6), ("zb_v", 4)):
        chunks = chunks_of(schedule)
        placement = programs(schedule, p, m, chunks).placement
        holder = {k: r for r, stages in enumerate(placement) for k in stages}
        want = Counter()
        for k in range(len(holder) - 1):
            if holder[k] != holder[k + 1]:
                want.update({holder[k]: boundary, holder[k + 1]: boundary})
        tied = {holder[0], holder[len(holder) - 1]}
        options = {"micro_batches": m, "chunks": chunks, "rendezvous_safe": safe}
        found = cluster(p, "thread").run(bytes_sent, schedule, len(holder), options)
        for r, sent in enumerate(found):
            sums = {"all_reduce": table} if r in tied and len(tied) > 1 else {}
            assert sent == ({"send": want[r]}, sums), (schedule, m, r)
