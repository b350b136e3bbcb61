"""The experts page: what it shows is what the package's ranks do."""

import json

import numpy as np
import pytest

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Cluster
from minidist.expert_parallel.dispatch import Dispatch
from minidist.observe.pages import answers, experts
from minidist.pieces import split_ends

ANSWERS = [experts.answer(**question) for question in experts.questions()]
some = pytest.mark.parametrize("answer", ANSWERS[::60], ids=lambda a: f"{a['ranks']} {a['skew']}")


def test_the_grid_is_small_and_each_question_is_answered_in_strict_json():
    table = answers.recorded("experts")
    assert len(table) == len(experts.questions()) <= 200
    assert answers.as_key(experts.FIRST) in table
    assert len(json.dumps(table, allow_nan=False)) < 500_000
    assert not any("error" in answer for answer in table.values())


def travel(group, answer):
    """Run forward of experts that are spread, with the choices of an answer; return its bytes."""
    C, E = experts.WIDTH, answer["experts"]
    kept = np.array(answer["kept"][group.rank])
    load = np.bincount(np.array(answer["tokens"][group.rank])[kept], minlength=E)
    ends = split_ends(E, group.size)
    own = nn.MixtureOfExperts(C, E, dtype="float64").experts[
        ends[group.rank] : ends[group.rank + 1]
    ]
    before = group.ledger.bytes["all_to_all"]
    Dispatch(group, ends, trained=False)(own, Tensor(np.ones((int(load.sum()), C))), load)
    return group.ledger.bytes["all_to_all"] - before


@some
def test_the_bytes_are_those_that_ranks_send_there_and_back(answer):
    with Cluster(answer["ranks"], "thread") as ranks:
        sent = sum(ranks.run(travel, answer))
    counts = 8 * (answer["ranks"] - 1) * answer["experts"]
    assert sent == 2 * answer["bytes"] + counts


@pytest.mark.parametrize("answer", ANSWERS[::40])
def test_choices_are_rows_or_are_dropped_and_no_expert_takes_more_than_its_capacity(answer):
    chosen, kept = np.array(answer["tokens"]), np.array(answer["kept"])
    assert sum(answer["load"]) == kept.sum() == np.sum(answer["matrix"])
    assert sum(answer["dropped"]) == (~kept).sum()
    assert answer["passed_by"] == (~kept).all(axis=-1).sum()
    assert answer["away"] == np.sum(answer["matrix"]) - np.trace(answer["matrix"])
    for example, stays in zip(chosen, kept, strict=True):
        rows = np.bincount(example[stays], minlength=answer["experts"])
        wanted = np.bincount(example.reshape(-1), minlength=answer["experts"])
        takes = answer["takes"] or wanted.max()
        assert rows.tolist() == np.minimum(wanted, takes).tolist()


def test_a_gate_that_collapses_costs_more_drops_more_and_is_even_at_0():
    def along(number):
        found = [experts.answer(**{**experts.FIRST, "skew": skew}) for skew in experts.GRID["skew"]]
        return [number(answer) for answer in found]

    losses = along(lambda answer: answer["balance"])
    assert losses == sorted(losses) and losses[0] < 1.1 and losses[-1] > 3
    drops = along(lambda answer: sum(answer["dropped"]))
    assert drops == sorted(drops) and drops[0] < drops[-1]


def test_a_choice_that_the_grid_has_not_is_refused_with_what_it_has():
    refused = answers.answer({"page": "experts", **experts.FIRST, "ranks": 3})
    assert refused["error"] == "ranks is one of 2, 4, not 3"
