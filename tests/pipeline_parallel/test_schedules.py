"""Programs as values: every schedule, enumerated; what is in them, and in which order."""

import pytest

from minidist.pipeline_parallel import SCHEDULES, add_communication, programs, validate
from minidist.pipeline_parallel.actions import (
    SENDS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    Transfer,
    other_end,
)
from minidist.pipeline_parallel.execution_order import Stuck, in_order
from minidist.pipeline_parallel.executor import tag
from minidist.planning import simulate
from minidist.verify.strategies import STRATEGIES
from tests.pipeline_parallel.oracles import is_valid
from tests.strategies import SYNCHRONOUS, every_program

SOME = (1, 2, 3, 4, 5), (1, 2, 3, 6)
ALL = (1, 2, 3, 4, 5, 6), tuple(range(1, 13))
ROOM = {  # messages that must be able to wait between two stages, where one is not enough
    "looped_bfs": lambda p, m: max(1, m // p),
    "interleaved_zb": lambda p, m: (p + 1) // 2,
}
grid = pytest.mark.parametrize("ps, ms", [SOME, pytest.param(*ALL, marks=pytest.mark.slow)])


@grid
def test_there_is_an_order_in_which_each_action_comes_after_what_it_needs(ps, ms):
    for what, made, p, m in every_program(ps, ms):
        last = max(k for own in made.placement for k in own)
        done, count = set(), 0
        for ready in in_order(made):
            for r, a in ready:  # those of one round need nothing of each other
                k, i = made.placement[r][a.chunk], a.micro_batch
                if isinstance(a, Forward):
                    assert k == 0 or ("F", k - 1, i) in done, (what, p, m)
                elif isinstance(a, Backward | BackwardInput):
                    assert ("F", k, i) in done, (what, p, m)
                    assert k == last or ("b", k + 1, i) in done, (what, p, m)
                elif isinstance(a, BackwardWeight):
                    assert ("b", k, i) in done, (what, p, m)
            for r, a in ready:
                back = isinstance(a, Backward | BackwardInput)
                done.add(("b" if back else a.sign, made.placement[r][a.chunk], a.micro_batch))
                count += 1
        assert count == sum(map(len, made)), (what, p, m)


@grid
@pytest.mark.parametrize("safe", [False, True])
def test_sends_and_receives_pair_up_with_one_tag_and_few_messages_of_room_are_enough(ps, ms, safe):
    """One is enough, unless many micro-batches pass a chunk before the next chunk begins."""
    for what, made, p, m in every_program(ps, ms):
        full = add_communication(made, rendezvous_safe=safe)
        assert [[a for a in program if not isinstance(a, Transfer)] for program in full] == made
        sends, receives, tags = [], [], set()
        for r, program in enumerate(full):
            for a in program:
                if isinstance(a, Transfer) and type(a) in SENDS:
                    sends.append((r, a))
                    partner = other_end(a, r)
                    assert tag(a) == tag(partner) and other_end(partner, a.peer) == a
                    assert (r, a.peer, tag(a)) not in tags, (what, p, m)
                    tags.add((r, a.peer, tag(a)))
                elif isinstance(a, Transfer):
                    receives.append((a.peer, other_end(a, r)))
        assert sorted(sends, key=str) == sorted(receives, key=str), (what, p, m)
        validate(full, p, m)
        room = ROOM.get(what.partition(",")[0], lambda p, m: 1)
        simulate(full, buffer=room(p, m))
        if safe:
            simulate(full, buffer=0)


@grid
def test_validate_and_the_oracle_accept_every_program(ps, ms):
    for what, made, p, m in every_program(ps, ms):
        validate(made, p, m)
        assert is_valid(made, m), (what, p, m)


def test_at_rendezvous_some_programs_deadlock_unless_they_are_made_safe():
    stuck = []
    for what, made, *_ in every_program((2, 3, 4), (2, 4)):
        try:
            simulate(add_communication(made), buffer=0)
        except Stuck as error:
            assert error.waiting and all(isinstance(a, Transfer) for a in error.waiting.values())
            stuck.append(what.split(",")[0])
    assert {"1f1b", "zb_h1", "zb_v", "interleaved"} <= set(stuck)
    assert "layer_split" not in stuck and "gpipe" not in stuck


def test_programs_read_like_the_pictures_in_the_papers():
    def text(schedule, *args, **options):
        return [" ".join(map(str, program)) for program in programs(schedule, *args, **options)]

    assert text("gpipe", 2, 3)[1] == "F0 F1 F2 B2 B1 B0"
    assert text("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert text("interleaved", 2, 2, chunks=2) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    assert text("looped_bfs", 2, 2, chunks=2)[0] == "F0 F1 F0.1 F1.1 B1.1 B0.1 B1 B0"
    assert text("interleaved_zb", 2, 2, chunks=2) == [
        "F0 F1 F0.1 F1.1 I0.1 W0.1 I1.1 W1.1 I0 W0 I1 W1",
        "F0 F1 F0.1 I0.1 F1.1 I1.1 W0.1 I0 W1.1 I1 W0 W1",
    ]
    assert text("dualpipe_v", 1, 2) == ["F0 F0.1 F1 B0.1 F1.1 B0 B1.1 I1 W1"]
    assert text("zb_h1", 2, 3) == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert text("zb_h2", 2, 3)[0] == "F0 F1 F2 I0 W0 I1 W1 I2 W2"
    assert text("zb_v", 1, 1) == ["F0 F0.1 I0.1 W0.1 I0 W0"]
    assert text("1f1b", 1, 2, weights_last=True) == ["F0 I0 F1 I1 W0 W1"]
    assert text("pipedream", 2, 2) == ["F0 F1 B0 U0 B1 U1", "F0 B0 U0 F1 B1 U1"]
    assert text("pipedream", 3, 3, replicas=[2, 1]) == [
        "F0 F2 B0 U1 B2 U2",
        "F1 B1 U1 U2",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2",
    ]
    assert text("pipedream_2bw", 2, 3, update_every=2)[1] == "F0 B0 F1 B1 U1 F2 B2 U2"
    made = add_communication(programs("1f1b", 2, 1))
    assert [" ".join(map(str, program)) for program in made] == [
        "F0 >F0 <B0 B0",
        "<F0 F0 B0 >B0",
    ]


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("magic", 2, 2), {}, "unknown schedule 'magic'; choose one of layer_split, gpipe, 1f1b"),
        (("gpipe", 0, 2), {}, "one or more ranks, not 0"),
        (("gpipe", 2, 0), {}, "one or more micro-batches, not 0"),
        (("interleaved", 2, 2, 0), {}, "one or more chunks, not 0"),
        (("1f1b", 2, 4.0), {}, "one or more micro-batches, not 4.0"),
        (("gpipe", 2, 9**99), {}, "[0-9]{95} forward passes, more than 1000000"),
        (("pipedream", 9**99, 1), {}, "forward passes, more than"),
        (("interleaved", 2, 2, 250_001), {}, "1000004 forward passes, more than"),
        (("gpipe", 2, 2), {"update_every": 2}, "no option 'update_every'; it has weights_last"),
        (("interleaved", 2, 2), {"replicas": [2]}, "interleaved has no option 'replicas'"),
        (("pipedream", 2, 2), {"update_every": 2}, "'update_every'; it has replicas, weights_last"),
        (
            ("pipedream_2bw", 2, 2),
            {"every": 2},
            "no option 'every'; it has update_every, weights_last",
        ),
        (("gpipe", "2", 4), {}, "one or more ranks, not '2'"),
        (("zb_v", 2, None), {}, "one or more micro-batches, not None"),
        (("interleaved", 4, 7, 2), {}, "7 of them .* use 8"),
        (("interleaved", 4, 1, 2), {}, "use 4"),
        (("interleaved", 4, 9, 2), {}, "use 8"),
        (("1f1b", 2, 2, 2), {}, "1f1b has at most 1 chunk per rank, not 2; interleaved takes"),
        (("pipedream", 2, 2, 2), {}, "pipedream has at most 1 chunk per rank, not 2"),
        (("zb_v", 2, 2, 3), {}, "zb_v has at most 2 chunks per rank, not 3"),
        (("interleaved_zb", 4, 9, 3), {}, "groups of 4, one per rank: 9 of them .* use 8"),
        (("dualpipe_v", 3, 5), {}, "dualpipe_v needs 2 .* 6 for 3 ranks, not 5; use 6, or zb_v"),
        (("dualpipe_v", 2, 4, 3), {}, "dualpipe_v has at most 2 chunks per rank, not 3"),
        (("pipedream_2bw", 4, 8), {"update_every": 2}, "3 or more .* not update_every=2"),
        (("pipedream_2bw", 1, 8), {"update_every": 0}, "not update_every=0"),
        (("pipedream", 4, 8), {"replicas": [2, 1]}, r"\[2, 1\] .* are 3 ranks, there are 4"),
        (("pipedream", 3, 8), {"replicas": [3, 0]}, "give every stage one or more, 3 in all"),
        (("pipedream", 3, 8), {"replicas": []}, "give every stage one or more, 3 in all"),
        (
            ("pipedream", 2, 8),
            {"weights_last": True},
            "updates the weights .* without weights_last",
        ),
        (
            ("pipedream_2bw", 2, 8),
            {"weights_last": True},
            "updates the weights .* without weights_last",
        ),
    ],
)
def test_what_no_program_can_be_is_refused_with_a_reason(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        programs(*arguments, **options)


def test_a_schedule_that_returns_nothing_is_named_by_its_rank():
    with pytest.raises(TypeError, match="program of rank 1 is None"):
        Programs([[], None])


def test_every_schedule_is_enumerated_or_asynchronous_and_a_strategy():
    costs = {name: record.costs for name, record in STRATEGIES.items()}
    layers = {name for name, own in costs.items() if own.cuts == "layers" and own.compared}
    assert layers == set(SCHEDULES) and {"pipedream", "pipedream_2bw"} == layers - {*SYNCHRONOUS}


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("interleaved", 2), ("zb_v", 2)])
def test_weights_that_are_put_last_are_one_run_per_chunk(schedule, chunks):
    for program in programs(schedule, 2, 4, chunks, weights_last=True):
        assert program[-4 * chunks :] == [
            BackwardWeight(i, chunk) for chunk in range(chunks) for i in range(4)
        ]
