"""Programs as values: every schedule, enumerated; what is in them, and in which order."""

import pytest

from minidist.pipeline_parallel import SCHEDULES, add_communication, programs, validate
from minidist.pipeline_parallel.actions import (
    SENDS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Transfer,
    last_stage,
    other_end,
)
from minidist.pipeline_parallel.execution_order import Stuck, in_order
from minidist.pipeline_parallel.executor import tag
from minidist.planning import simulate
from minidist.verify.strategies import STRATEGIES
from tests.pipeline_parallel.oracles import is_valid
from tests.strategies import SYNCHRONOUS, every_program

SOME = (1, 2, 3, 4), (1, 2, 6)
ALL = (1, 2, 3, 4, 5, 6), tuple(range(1, 13))
ROOM = {  # messages that must be able to wait between two stages, where one is not enough
    "looped_bfs": lambda p, m: max(1, m // p),
    "interleaved_zb": lambda p, m: (p + 1) // 2,
}
grid = pytest.mark.parametrize("ps, ms", [SOME, pytest.param(*ALL, marks=pytest.mark.slow)])


def assert_in_order(made, what):
    """Walk through the rounds of the programs: each action comes after what it needs."""
    last, done, count = last_stage(made.placement), set(), 0
    for ready in in_order(made):
        for r, a in ready:  # those of one round need nothing of each other
            k, i = made.placement[r][a.chunk], a.micro_batch
            if isinstance(a, Forward):
                assert k == 0 or ("F", k - 1, i) in done, what
            elif isinstance(a, Backward | BackwardInput):
                assert ("F", k, i) in done, what
                assert k == last or ("b", k + 1, i) in done, what
            elif isinstance(a, BackwardWeight):
                assert ("b", k, i) in done, what
        for r, a in ready:
            sign = "b" if isinstance(a, Backward | BackwardInput) else a.sign
            done.add((sign, made.placement[r][a.chunk], a.micro_batch))
            count += 1
    assert count == sum(map(len, made)), what


@grid
def test_every_program_is_valid_and_has_an_order_in_which_each_action_comes_after_its_needs(ps, ms):
    for what, made, p, m in every_program(ps, ms):
        validate(made, p, m)
        assert is_valid(made, m), (what, p, m)
        assert_in_order(made, (what, p, m))


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


def test_at_rendezvous_some_programs_deadlock_unless_they_are_made_safe():
    stuck = []
    for what, made, *_ in every_program((2, 3), (2, 4)):
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


def test_every_schedule_is_enumerated_or_asynchronous_and_a_strategy():
    costs = {name: record.costs for name, record in STRATEGIES.items()}
    layers = {name for name, own in costs.items() if own.cuts == "layers" and own.compared}
    assert layers == set(SCHEDULES) and {"pipedream", "pipedream_2bw"} == layers - {*SYNCHRONOUS}
