"""The searched schedule: never worse than those by hand, within its memory, exactly timed."""

import time
from decimal import Decimal
from fractions import Fraction
from itertools import product
from math import inf, nan
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import programs, validate
from minidist.pipeline_parallel.actions import (
    BackwardInput,
    BackwardWeight,
    Forward,
)
from minidist.pipeline_parallel.zb_auto import (
    by_hand,
    cost,
    line_of,
    timed_order,
    warm_ups,
)
from minidist.planning import simulate
from tests.pipeline_parallel.oracles import is_valid
from tests.pipeline_parallel.searched import TIMES, drawn, programs_of
from tests.pipeline_parallel.training import STEPS, assert_equals_one_device, mlp_case

KINDS = Forward, BackwardInput, BackwardWeight


def why(made, times, latency):
    """Return what the makespan is that some wrong times would give."""
    swapped = dict(zip(TIMES, (times[TIMES[k]] for k in (0, 2, 1)), strict=True))
    return {
        simulate(made, **swapped, latency=latency).makespan: "the times of I and W are swapped",
        simulate(made, **times).makespan: "the latency is forgotten",
    }


def test_its_clocks_say_what_the_simulator_says():
    random, choices = Random(2), 0
    for _ in range(40):
        p, m, times, latency, memory = drawn(random, memories=lambda p: [1, p, 2 * p])
        line = line_of(p, m, *times.values(), latency)
        for choice in dict.fromkeys([*by_hand(line, memory), *warm_ups(line, memory)]):
            ranks, choices = timed_order(line, choice), choices + 1
            made = programs_of(ranks)
            found = simulate(made, **times, latency=latency)
            ours, theirs = cost(ranks), (found.makespan, found.span, max(found.peak_stash))
            reason = why(made, times, latency).get(ours[0], "no known reason")
            assert ours == theirs, f"clocks say {ours}, the simulator {theirs}: {reason}"
            assert_within(memory, found)
    assert choices > 200


def assert_within(memory, simulation):
    for rank, peak in enumerate(simulation.peak_stash):
        limit = inf if memory is None else memory
        assert peak <= limit, f"{peak} in flight on rank {rank}, more than memory={memory} allows"


def makespan(schedule, p, m, times, latency, **options):
    return simulate(programs(schedule, p, m, **options), **times, latency=latency).makespan


def assert_keeps_its_promises(p, m, times, latency, memory):
    found = programs("zb_auto", p, m, **times, latency=latency, memory=memory)
    validate(found, p, m)
    assert is_valid(found, m)
    result = simulate(found, **times, latency=latency)
    assert_within(memory, result)
    for schedule, needed in (("1f1b", p), ("zb_h1", p), ("zb_h2", 2 * p - 1)):
        if memory is None or memory >= needed:
            by_hand = makespan(schedule, p, m, times, latency)
            assert result.makespan <= by_hand, f"longer than {schedule}: {times}, {latency=}"


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_it_is_never_worse_than_1f1b_zb_h1_and_zb_h2_where_they_fit_and_keeps_its_memory(count):
    random = Random(1)
    for _ in range(count):
        assert_keeps_its_promises(*drawn(random))


fractions = st.fractions(0, 5, max_denominator=7)


@settings(max_examples=40)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6), latency=fractions)
def test_it_keeps_its_promises_exactly_for_fractions_some_of_them_zero(data, p, m, latency):
    stages = st.lists(fractions, min_size=p, max_size=p)
    times = {name: data.draw(fractions | stages) for name in TIMES}
    assert_keeps_its_promises(p, m, times, latency, data.draw(st.none() | st.integers(1, 2 * p)))


def test_the_orders_by_hand_are_those_of_1f1b_zb_h1_and_zb_h2():
    for p, m in product(range(1, 6), range(1, 12)):
        line = line_of(p, m, 1, 1, 1, 0)
        found = [programs_of(timed_order(line, c)) for c in by_hand(line, 2 * p - 1)]
        halves = [
            [half for a in program for half in in_halves(a)] for program in programs("1f1b", p, m)
        ]
        assert found == [halves, programs("zb_h1", p, m), programs("zb_h2", p, m)], (p, m)


def in_halves(action):
    i = action.micro_batch
    return [action] if isinstance(action, Forward) else [BackwardInput(i), BackwardWeight(i)]


def test_more_memory_is_used_only_where_it_makes_something_faster():
    for p, m in product(range(1, 7), (6, 12, 24)):
        free = simulate(programs("zb_auto", p, m))
        assert max(free.peak_stash) <= 2 * p - 1  # where F, I and W take the same time, as in zb_h2
        assert free.makespan == simulate(programs("zb_h2", p, m)).makespan or m < 2 * p - 1


def test_memory_for_a_single_micro_batch_is_enough():
    for p, m in product(range(1, 7), (1, 3, 8)):
        made = programs("zb_auto", p, m, memory=1)
        assert made == [[kind(i) for i in range(m) for kind in KINDS]] * p
        assert simulate(made).makespan == m * (2 * p + 1)


def scale(times, unit):
    return [t * unit for t in times] if isinstance(times, list) else times * unit


def test_the_same_times_give_the_same_order_in_every_unit():
    random = Random(6)
    for _ in range(8):
        p, m, times, latency, memory = drawn(random, max_p=5)
        made = []
        for unit in (1, Fraction(1, 7), 0.25, np.float32(2), np.int64(3), Decimal(1) / 4):
            scaled = {k: scale(t, unit) for k, t in times.items()}
            made.append(programs("zb_auto", p, m, **scaled, latency=latency * unit, memory=memory))
        assert all(each == made[0] for each in made[1:])


def test_sixteen_ranks_and_64_micro_batches_take_seconds():
    random, begin = Random(7), time.process_time()
    times = [[random.randint(50, 99) for _ in range(16)] for _ in TIMES]
    programs("zb_auto", 16, 64, **dict(zip(TIMES, times, strict=True)), latency=7, memory=20)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": 0}, "no order has 0 micro-batches in flight; give memory=1 or more"),
        ({"memory": Fraction(2, 3)}, "no order has .* give memory=1 or more"),
        ({"memory": nan}, "no order has nan micro-batches"),
        ({"memory": "2"}, "no order has '2' micro-batches"),
        ({"forward": [1, 2]}, "2 durations for 3 stages; give one number, or 3"),
        ({"backward_weight": -1}, "a duration is a number from 0, not -1"),
        ({"latency": inf}, "a duration is a number from 0, not inf"),
        ({"latency": [1, 2, 3]}, r"a duration is a number from 0, not \[1, 2, 3\]"),
        ({"backward_input": ["1", 1, 1]}, "a duration is a number from 0, not '1'"),
        ({"memroy": 3}, "zb_auto has no option 'memroy'; it has forward, .*, latency, memory"),
    ],
)
def test_what_no_order_can_be_searched_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        programs("zb_auto", 3, 4, **options)


SOME = [(2, 5, 1, True), (3, 7, None, False)]
ALL = [
    pytest.param(*each, marks=(pytest.mark.slow, pytest.mark.grid(18)))
    for each in product(range(1, 6), (1, 5, 12), (1, 3, None), (False, True))
]


@pytest.mark.parametrize("p, m, memory, recompute", [*SOME, *ALL])
def test_gradients_losses_and_steps_are_one_devices_whatever_the_times(
    cluster, p, m, memory, recompute
):
    random = Random(p * m)
    times = {name: [random.randint(1, 9) for _ in range(p)] for name in TIMES}
    case = mlp_case([3 + i % 3 for i in range(p + 2)], 7, m)
    options = {"schedule": "zb_auto", "micro_batches": m, "memory": memory, "latency": 2}
    assert_equals_one_device(cluster(p), case, STEPS, recompute=recompute, **times, **options)
