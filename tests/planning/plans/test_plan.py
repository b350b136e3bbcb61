"""Plans and machines are checked where they are made."""

import math

import pytest

from minidist.planning import Machine, Plan

WRONG = [
    ({"dp": 0}, "dp is a whole number from 1, not 0"),
    ({"tp": True}, "tp is a whole number from 1, not True"),
    ({"micro_batches": 1.5}, "micro_batches is a whole number from 1, not 1.5"),
    ({"dp": 4, "ep": 3}, "ep=3 does not divide dp=4; use a divisor of it"),
    ({"cp": 2, "sequence": True}, "cp=2 cuts the sequence already"),
    ({"zero": 4}, "zero is one of 0, 1, 2, 3, not 4"),
    ({"zero": True}, "zero is one of 0, 1, 2, 3, not True"),
    ({"shards": 2}, "shards=2 is for ZeRO, and not for experts over ep=1; use zero=1, 2 or 3"),
    ({"dp": 4, "ep": 2, "zero": 1, "shards": 2}, "shards=2 is for ZeRO, and not for experts"),
    ({"dp": 4, "zero": 3, "shards": 3}, "groups of 3 shards do not make up dp=4 x cp=1; use a"),
    ({"dp": 3, "cp": 4, "zero": 3, "shards": 6}, "groups of 6 shards do not make up dp=3 x cp=4"),
    ({"dp": 4, "zero": 3, "shards": 0}, "shards is a whole number from 1, not 0"),
    ({"recompute": True}, "recompute is one of none, selective, full, not True"),
    ({"precision": "float64"}, "precision is one of mixed, float32, not 'float64'"),
    ({"schedule": "pipedream"}, "schedule is one of layer_split, gpipe, 1f1b"),
    ({"schedule": "1f1b", "chunks": 2}, "1f1b has at most 1 chunks, not 2"),
    ({"schedule": "zb_v"}, "zb_v has 2 chunks per rank, not 1"),
]


@pytest.mark.parametrize("given, said", WRONG)
def test_a_plan_that_cannot_be_is_refused(given, said):
    with pytest.raises(ValueError) as error:
        Plan(**given)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_ranks_of_one_copy_are_neighbours_on_cp_and_then_on_dp():
    for shards, (dp, pp, cp) in {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 4), 8: (2, 2, 4)}.items():
        found = Plan(4, 2, cp=4, zero=1, shards=shards).one_copy
        assert (found.dp, found.pp, found.cp, found.data) == (dp, pp, cp, shards)
    assert Plan(4, 2, cp=4, zero=1).one_copy.data == 16


def test_a_plan_counts_its_ranks_and_experts_are_within_data():
    plan = Plan(dp=6, pp=5, tp=4, cp=3, ep=2)
    assert (plan.ranks, plan.data, plan.itemsize) == (360, 18, 2)
    assert Plan(precision="float32").itemsize == 4
    assert Plan(schedule="zb_v", chunks=2).ranks == Plan().ranks == 1


@pytest.mark.parametrize(
    "given", [{"ranks": 0}, {"flops": 0}, {"link": -1}, {"memory": math.nan}, {"latency": math.inf}]
)
def test_a_machine_that_cannot_be_is_refused(given):
    whole = {"ranks": 8, "per_node": 8, "flops": 1e12, "memory": 8e10, "link": 1e9, "network": 1e8}
    assert Machine(**whole).latency == 0
    with pytest.raises(ValueError, match=f"{next(iter(given))} is a"):
        Machine(**(whole | given))
