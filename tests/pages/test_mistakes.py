"""What went wrong: mistakes on real ranks. (All of them: tests/site.)"""

import json

from minidist.course.mutants import FAMILIES
from minidist.observe.pages import answers
from minidist.observe.pages import mistakes as page
from minidist.verify.equivalence import find
from minidist.verify.mistakes.register import mistakes


def row(mistake, strategy, case=0, size=4):
    """Return a case's row, whose first word names the case."""
    entry = find(strategy)
    return page.row_of(mistake, entry, entry.cases(size)[case], size)


def test_every_mistake_whose_family_has_strategies_can_be_asked():
    wanted = {m.name for m in mistakes().values() if m.family in FAMILIES}
    asked = [question["mistake"] for question in page.questions() if "mistake" in question]
    assert set(asked) == wanted and len(asked) == len(wanted) > 100


def test_without_a_sum_the_losses_are_right_and_the_gradients_are_wrong():
    found = row("no_all_reduce", "naive")
    assert found["losses"] is True and not found["agree"]
    assert found["bytes"][0] == 0 < found["bytes"][1]
    assert found["seen"] == ["gradients", "ranks agree", "bytes"]
    assert found["cause"] == "equals the local gradient: the all_reduce is missing"
    assert len(found["worst"]) == found["wrong"] == 6
    assert all(one["error"] > 1e-3 for one in found["worst"])


def test_what_a_replay_shares_with_the_run_shows_in_the_losses_alone():
    found = row("older_version", "pipedream")
    assert found["seen"] == ["losses"] and found["wrong"] == 0


def test_a_mistake_of_speed_alone_passes_all_checks():
    found = row("staleness_off_by_one", "parameter_server")
    assert found["seen"] == []
    assert page.summary([found]) == "1 of 1 case: all checks pass."


def test_a_run_that_does_not_end_is_the_last_row_with_the_packages_table(monkeypatch):
    monkeypatch.setitem(FAMILIES, "pipeline", ["gpipe"])
    (found,) = page.rows_of("lost_tag")  # of several cases
    assert found["seen"] == ["it ends"]
    assert found["error"].startswith("Deadlock: every rank waits:\n  rank 0: waits in recv(")


def test_an_answer_has_a_row_per_case_and_the_process_that_asks_keeps_the_right_functions(
    monkeypatch,
):
    monkeypatch.setitem(FAMILIES, "tensor", (["column"], []))
    answer = page.answer("f_missing")
    assert len({(each["strategy"], each["case"]) for each in answer["rows"]}) > 1
    assert "cases: the losses are right and gradients are wrong." in answer["sees"]
    assert row("", "column")["seen"] == []
    for words in (answer["title"], answer["sees"], "column, MLP, 7 examples", "+        return g"):
        assert words in page.as_text(answer)
    json.dumps(answer, allow_nan=False)


def test_a_process_that_is_over_its_time_is_an_answer_and_the_others_follow(monkeypatch):
    monkeypatch.setattr(page, "LIMIT", 1e-3)
    answers = page.in_a_new_process(["f_missing", "bias_added_tp_times"])
    assert [each["mistake"] for each in answers] == ["f_missing", "bias_added_tp_times"]
    assert answers[0]["rows"][0]["error"] == page.LOST


def test_a_name_that_there_is_not_is_answered_with_the_nearest():
    asked = {"page": "mistakes", "mistake": "no_allreduce"}
    assert "did you mean no_all_reduce?" in answers.answer(asked)["error"]
    assert "unknown program" in answers.answer({"page": "mistakes", "program": "x"})["error"]
