"""What a caller may get wrong is a ValueError that shows it, before anything is sent."""

import re

import numpy as np
import pytest

masked = np.ma.masked_array([1.0, 2.0], [True, False])
WRONG = [
    (lambda g: g.split(0, key=0.9), "a key is a whole number, not 0.9"),
    (lambda g: g.split(2**63), f"a color is a whole number or None of 64 bits, not {2**63}"),
    (lambda g: g.split(1.5), "a color is a whole number or None, not 1.5"),
    (lambda g: g.send(np.ones(1), to=0, tag="a"), "a tag is a whole number, not 'a'"),
    (lambda g: g.recv(source=0.0), "source is a whole number, not 0.0"),
    (lambda g: g.recv_any([0, None]), "source is a whole number, not None"),
    (lambda g: g.recv_any(0), "sources are a list, not 0"),
    (lambda g: g.send(np.ones(1), to=None), "to is a whole number, not None"),
    (lambda g: g.broadcast(np.ones(1), root=1.5), "root is a whole number, not 1.5"),
    (lambda g: g.all_gather(np.ones(1), axis=None), "an axis is a whole number"),
    (lambda g: g.reduce_scatter(np.ones(3), [1.5, 1.5]), "a size is a whole number"),
    (lambda g: g.reduce_scatter(np.ones(3), 3), "sizes are a list, not 3"),
    (lambda g: g.all_to_all(np.float64(3)), "arrays are a list, not "),
    (lambda g: g.scatter(3, root=g.rank), "pieces are a list, not 3"),
    (lambda g: g.all_reduce(np.ones(1), op=["sum"]), r"unknown reduction \['sum'\]"),
    (lambda g: g.all_reduce(np.ones(1), algorithm=[]), r"unknown algorithm \[\]"),
    (
        lambda g: g.all_reduce(np.ones(1), out=[0.0]),
        r"out must be an array, not list; use group.empty",
    ),
    (
        lambda g: g.all_gather(np.ones(1), out=[0.0]),
        r"out must be an array, not list; use group.empty",
    ),
    (lambda g: g.all_reduce(np.ones(1), out=np.broadcast_to(0.0, 1)), "out is read-only"),
    (lambda g: g.send(masked, to=0), r"use .filled\(\), .compressed\(\) or .data"),
    (lambda g: g.all_reduce(np.ones(2), out=masked), r"use .filled\(\), .compressed\(\) or .data"),
    (lambda g: g.barrier(label=["a"]), r"a label is a string or None, not \['a'\]"),
    (lambda g: g.all_gather(np.ones(1), out=np.ones(2), label=3), "a label is a string or None"),
    (lambda g: g.empty(3, object), "arrays of object do not travel between ranks; use numbers"),
    (lambda g: g.empty((-1,)), "no negative sides"),
    (lambda g: g.empty(3, "float23"), "'float23' is not a dtype"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(5)), "part of out"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(2), sizes=[2, 0]), "part of out"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(2), sizes=[2, 1]), "do not cut 2 rows"),
    (lambda g: g.all_gather(np.zeros(1), sizes=[1, 1]), "give out, or no sizes"),
    (lambda g: g.all_gather(np.zeros(2, "float32"), out=np.zeros(4)), "part of out"),
    (lambda g: g.reduce_scatter(g.empty(4), [1, 2]), "do not cut 4 rows into 2 pieces"),
    (lambda g: g.reduce_scatter(g.empty(4), [5, -1]), "do not cut 4 rows into 2 pieces"),
    (lambda g: g.send(np.ones(1), to=2), "to=2 is no rank of a group of 2; use 0 to 1"),
    (lambda g: g.recv(-1), "source=-1 is no rank"),
    (lambda g: g.recv_any([0, 2]), "source=2 is no rank of a group of 2"),
    (lambda g: g.recv_any([]), "recv_any needs a source"),
    (lambda g: g.broadcast(np.ones(1), root=5), "root=5 is no rank"),
    (lambda g: g.all_reduce(np.ones(1), op="mean"), "unknown reduction 'mean'"),
    (lambda g: g.all_reduce(np.ones(1), algorithm="magic"), "unknown algorithm 'magic'"),
    (lambda g: g.all_reduce("text"), "only arrays travel between ranks, not str"),
    (lambda g: g.all_reduce(np.array([None])), "arrays of object do not travel"),
    (
        lambda g: g.all_reduce(np.ones(2), out=np.ones(3)),
        r"out is float64\[3\], x is float64\[2\]",
    ),
    (lambda g: g.all_gather(np.ones(2), axis=1), r"axis 1 does not exist .* \[2\]"),
    (lambda g: g.all_to_all([np.ones(1)]), "one array per rank: 2, got 1"),
    (lambda g: g.all_to_all([np.ones(1), np.ones(1, "f4")]), "one dtype, got float64, float32"),
    (lambda g: g.scatter([np.ones(1)], root=g.rank), "one piece per rank on the root: 2"),
]


def test_what_a_caller_can_get_wrong_is_a_value_error_that_shows_it(ranks):
    """No rank sends anything, so one run tries them all."""

    def worker(group):
        found = []
        for wrong, _ in WRONG:
            try:
                found.append(f"no error: {wrong(group)}")
            except ValueError as error:
                found.append(str(error))
        return found

    for found in ranks(2).run(worker, timeout=8):
        for (_, message), said in zip(WRONG, found, strict=True):
            assert re.search(message, said), (message, said)


def test_recv_any_does_not_take_what_belongs_to_a_request(ranks):
    def worker(group):
        group.send(np.array(group.rank), to=0)
        if group.rank == 0:
            request = group.irecv(1)
            try:
                group.recv_any([0, 1])
            except ValueError as error:
                return str(error), int(request.wait()), int(group.recv_any()[1])

    message, first, second = ranks(2).run(worker)[0]
    assert "rank 1 with tag 0 belongs to a request of irecv" in message
    assert (first, second) == (1, 0)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_whole_numbers_of_every_kind_are_taken(ranks):
    def worker(group):
        last = group.split(np.int8(-3), key=np.uint64(9 - group.rank)).rank
        group.send(np.matrix([[1, 2]]), to=np.uint8(group.rank), tag=np.array(2**62))
        low = group.split(-(2**63), key=2**63 - 1).rank
        return last, group.recv(group.rank, tag=2**62).tolist(), low

    assert ranks(2).run(worker) == [(1, [[1, 2]], 0), (0, [[1, 2]], 1)]


def test_a_number_that_equals_a_known_one_is_checked_all_the_same(ranks):
    """What a send remembers of ranks and tags must not let 0.0 pass for 0."""

    def worker(group):
        me, found = group.rank, []
        for to, tag in [(me, 0), (float(me), 0), (me, 0.0), ([me], 0), (me, np.array(0))]:
            try:
                group.send(np.ones(1), to, tag)
                group.recv(to, tag)
            except ValueError as error:
                found.append(str(error))
        return found

    for rank, found in enumerate(ranks(2).run(worker)):
        assert found == [
            f"to is a whole number, not {float(rank)}",
            "a tag is a whole number, not 0.0",
            f"to is a whole number, not [{rank}]",
        ]
