"""Ranks that wait for each other: each step, and what never ends, with every seed."""

from minidist.observe.pages import waits


def test_a_ring_of_rendezvous_ends_in_one_circle_with_every_seed():
    for one in waits.answer("ring_of_rendezvous")["seeds"]:
        assert one["verdict"] == "Deadlock" and "rank 3: waits in recv(tag=1)" in one["words"]
        assert one["steps"][-1]["lit"] == [[0, 1], [1, 2], [2, 3], [3, 0]]
        assert not any(step["lit"] for step in one["steps"][:-1])


def test_a_skipped_collective_is_a_mismatch_and_a_race_depends_on_the_seed():
    skips = waits.answer("one_rank_skips")["seeds"]
    assert {one["verdict"] for one in skips} == {"CollectiveMismatch"}
    assert all("rank 2: barrier(label='end of the step')" in one["words"] for one in skips)
    states = [state for one in skips for step in one["steps"] for state in step["ranks"]]
    assert not any(state["words"] == "has finished" for state in states)
    race = waits.answer("whoever_is_first")["seeds"]
    assert {one["verdict"] for one in race} == {"Deadlock", "finishes"}
    for one in race:
        stuck = one["verdict"] == "Deadlock"
        assert one["steps"][-1]["lit"] == ([[0, 1]] if stuck else [])


def test_the_same_seed_gives_the_same_steps_and_another_seed_others():
    for name in waits.PROGRAMS:
        once, again = (waits.stepped(name, 3)["steps"] for _ in range(2))
        assert once == again, name
    orders = {str(waits.stepped("ring_of_rendezvous", seed)["steps"]) for seed in range(3)}
    assert len(orders) == 3


def test_waits_are_lit_on_a_circle_or_for_a_rank_that_is_done_alone():
    def at(*rows):
        return [{"words": words, "for": others} for words, others in rows]

    circle = at(("waits", [1]), ("waits", [0]), ("waits", [0]))
    assert waits.lit(circle) == [[0, 1], [1, 0]]  # rank 2 waits for the circle, outside of it
    assert waits.lit(at(("waits", [1]), ("can go on", []))) == []
    assert waits.lit(at(("waits", [1]), ("has finished", []))) == [[0, 1]]
