"""The sums over dp that begin inside the pipeline: the same bits, earlier; faults end the run."""

import threading

import numpy as np
import pytest

from minidist import Mesh, nn, run
from minidist.errors import RankFailed
from minidist.events import EventLog
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel.actions import Reduce
from minidist.pipeline_parallel.executor import NO_SUMS
from minidist.rng import generator
from minidist.verify.strategies.cases import random_weights
from tests.strategies import assert_same_bits

AXES = ("dp", "pp", "cp", "tp")
TWO = {"schedule": "interleaved", "chunks": 2, "micro_batches": 2}
CASES = [
    ((2, 1, 1, 1), TWO),
    ((2, 1, 1, 1), {"schedule": "zb_v", "micro_batches": 3, "zero": 1}),
    ((2, 2, 1, 1), {**TWO, "zero": 1}),  # a tied embedding is on both ranks
    ((2, 1, 1, 2), {"schedule": "looped_bfs", "chunks": 2, "split_sequence": True}),
    ((2, 1, 2, 1), {**TWO, "ep": 2, "zero": 1, "weights_last": True}),
]


def hybrid_on(group, sizes, options, tied=False, frozen=False):
    experts = {"experts": 4, "capacity": 0.8} if options.get("ep") else {}
    model = nn.Transformer(11, 12, 4, 3, 8, 3, "float64", 0.2, tied, **experts)
    if frozen:
        model.freeze("embedding.position.weight", *list(model.layers[2].named_parameters())[:3])
    mesh = Mesh(group, **dict(zip(AXES, sizes, strict=True)))
    return Hybrid(random_weights(model), mesh, **options)


def after_the_program(hybrid):
    """Sum all gradients when the program has ended, on the rank's own thread, layer by layer."""
    pipeline = hybrid.pipeline
    pipeline.sums = NO_SUMS
    whole = pipeline.run

    def then_sum(batch):
        loss = whole(batch)
        hybrid.sum_gradients(pipeline.model.layers)
        return loss

    pipeline.run = then_sum
    return hybrid


def two_batches(group, sizes, options, tied, frozen, prepare):
    """Return gradients and bytes of two batches, with zero_grad between them."""
    tokens, rows = generator(0, "sums").integers(0, 11, (2, 2, 5, 8)), []
    hybrid = prepare(hybrid_on(group, sizes, options, tied, frozen))
    for step, (inputs, targets) in enumerate(tokens):
        loss = hybrid.backward(Batch(inputs, targets, seed=1, step=step))
        rows.append(hybrid.gradients() | {"loss": np.array(loss)})
        for p in [*hybrid.parameters(), *hybrid.named_parameters().values()]:
            p.grad = None
    return rows, [group.ledger.bytes for group in hybrid.groups]


@pytest.mark.parametrize(
    "case, transport",
    [
        (CASES[0], "process"),
        (CASES[2], "thread"),
        *(pytest.param(case, "thread", marks=pytest.mark.slow) for case in CASES),
    ],
    ids=str,
)
def test_the_bits_and_bytes_are_those_of_sums_after_the_program(cluster, case, transport):
    """Tied or not, frozen or not: every rank adds up in the same order, and sends as much."""
    sizes, options = case
    ranks = cluster(int(np.prod(sizes)), transport)
    for tied in (False, True):
        beside, after = (
            ranks.run(two_batches, sizes, options, tied, tied, prepare)
            for prepare in (lambda hybrid: hybrid, after_the_program)
        )
        for (got, sent), (want, due) in zip(beside, after, strict=True):
            assert sent == due
            for batch in range(2):
                assert_same_bits(got[batch], want[batch])


def test_the_first_sum_is_under_way_before_the_last_backward_ends():
    def worker(group):
        model = nn.Transformer(64, 96, 4, 4, 32)
        hybrid = Hybrid(model, Mesh(group, dp=2, pp=1, tp=1), "interleaved", 4, chunks=2)
        begun, calls, sound = threading.Event(), [], hybrid.copies.sum_gradients

        def sum_gradients(vectors):
            begun.set()
            sound(vectors)

        def waits(p):
            calls.append(p)
            assert len(calls) < 4 or begun.wait(5)  # in the backward of the last micro-batch

        hybrid.copies.sum_gradients = sum_gradients
        hybrid.pipeline.model.layers[0].flat.parameters[0].add_hook(waits)
        hybrid.backward(Batch(*np.ones((2, 32, 32), int)))

    log = EventLog()
    run(worker, 2, log=log)
    for rank in (0, 1):
        events = [e for e in log.events if e.rank == rank]
        (inner,), (outer,) = (
            [e for e in events if e.name == str(Reduce(chunk))] for chunk in (1, 0)
        )
        backward = [e for e in events if e.name[0] == "B"]
        assert inner.thread == "sums" and outer.thread == "main"
        assert inner.start < max(e.end for e in backward) <= outer.start
        sums = [e for e in events if e.name == "all_reduce copies"]
        assert {e.thread for e in sums} == {"sums", "main"}


def faulty(group, fault, sizes=(2, 1, 1, 1), rank=1):
    """Run a batch; on one rank, `fault` comes in the first sum that the second thread does."""
    hybrid = hybrid_on(group, sizes, TWO)
    sound, calls = hybrid.copies.sum_gradients, []

    def sum_gradients(vectors):
        calls.append(vectors)
        if group.rank == rank and len(calls) == 1:
            fault()
        sound(vectors)

    hybrid.copies.sum_gradients = sum_gradients
    hybrid.backward(Batch(*np.ones((2, 4, 8), int)))


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_an_error_in_the_second_thread_is_the_error_of_its_rank(cluster, transport):
    def fault():
        raise ArithmeticError("the sum broke")

    with pytest.raises(RankFailed, match=r"(?s)rank 1 .*ArithmeticError: the sum broke"):
        cluster(2, transport).run(faulty, fault)
    assert cluster(2, transport).run(lambda group: group.size) == [2, 2]


def test_after_an_error_in_the_middle_no_batch_adds_to_what_is_partly_summed(cluster):
    def worker(group):
        hybrid = hybrid_on(group, (2, 1, 1, 1), {**TWO, "zero": 1})
        broken = np.full((2, 4, 8), 11)  # a token that the vocabulary lacks
        for batch, message in (
            (broken, "outside a voc"),
            (np.ones((2, 4, 8), int), "earlier batch"),
        ):
            with pytest.raises(ValueError, match=message):
                hybrid.backward(Batch(*batch))

    cluster(2, "thread").run(worker)
