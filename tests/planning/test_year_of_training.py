"""A year of training: where its seconds go, against closed forms."""

from dataclasses import replace
from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.planning.year_of_training import DAY, Run, Slowdown, closed_form, replay

CALM = Run(hosts=4, interval=90, save=10, restart=60, failures=1e30)
BUSY = replace(CALM, failures=4 * 3600, spares=10**6)
numbers = st.floats(1, 1e4)
runs = st.builds(
    Run,
    hosts=st.integers(2, 5),
    interval=numbers,
    save=numbers,
    restart=numbers,
    failures=numbers,
    spares=st.integers(0, 2),
    broken=st.floats(0, 1),
    repair=numbers,
    elastic=st.none() | st.integers(1, 2),
    slowdowns=st.just(()) | st.tuples(st.builds(Slowdown, numbers, numbers, st.floats(1, 9))),
    evict=st.just(inf) | st.floats(0, 100),
)


@given(runs, st.integers(0, 99))
def test_the_seconds_add_up_and_the_same_seed_gives_the_same(run, seed):
    spent = replay(run, 200, seed)
    assert spent.seconds == pytest.approx(200)
    assert min(vars(spent).values()) >= -1e-6
    assert spent == replay(run, 200, seed)


def test_without_failures_saves_take_their_share_of_each_interval():
    spent = replay(CALM, 1000)
    assert (spent.useful, spent.saves, spent.seconds) == (900, 100, 1000)
    assert replay(CALM, 1050).useful == 950  # an interval that is not saved yet


def test_without_spares_all_wait_for_a_repair_and_an_elastic_run_trains():
    run = replace(BUSY, spares=0, repair=1800)
    waits, goes_on = replay(run, 30 * DAY), replay(replace(run, elastic=1), 30 * DAY)
    assert waits.waiting > 0 and waits.slow == pytest.approx(0, abs=1e-3)
    assert goes_on.waiting < waits.waiting / 100 and goes_on.slow > 0
    assert goes_on.useful > waits.useful
    assert replay(replace(run, broken=0), DAY).waiting == 0  # nothing to repair


def test_a_step_takes_hosts_over_n_as_long_on_n_hosts():
    """One of two hosts breaks and is never repaired: half the speed from then on."""
    run = Run(2, 1000, 0, 0, failures=1e6, repair=1e12, elastic=1)
    spent = replay(run, 1e7, seed=3)
    assert spent.failures and spent.waiting  # when the second one has broken
    trained = spent.useful + spent.slow
    first = 2 * spent.useful - trained  # full speed: u = f + (t - f)/2
    assert 0 < first < trained and spent.slow == pytest.approx((trained - first) / 2)


def test_all_wait_for_the_slowest_of_each_kind_and_kinds_add_up():
    """Always slow: a device twice as long, a link of a tenth of the step four times as long."""
    slow = (Slowdown(1e-9, 1e30, 2), Slowdown(1e-9, 1e30, 4, part=0.1))
    spent = replay(replace(CALM, slowdowns=slow), 1e4)
    assert (spent.useful + spent.slow) / spent.useful == pytest.approx(2.3, rel=1e-6)


def test_the_share_of_slow_time_is_that_of_any_slow_host():
    """Each of 4 hosts is slow 1/11 of the time: none is for (10/11)^4 of it."""
    run = replace(CALM, slowdowns=(Slowdown(1000, 100, 3),))
    spent = replay(run, 3e5)
    trained = spent.useful + spent.slow
    some = 1 - (10 / 11) ** 4
    assert spent.slow / trained == pytest.approx(2 / 3 * some, rel=0.1)


def test_a_slow_host_is_evicted_at_the_next_save_and_no_work_is_lost():
    """All slow hosts stay slow: each costs half an interval at half speed, and a restart."""
    run = replace(CALM, interval=900, save=100, slowdowns=(Slowdown(4e5, 1e30, 2),), spares=10**5)
    stays, leaves = replay(run, 4e7), replay(replace(run, evict=0), 4e7)
    assert stays.evicted == leaves.failures == leaves.lost == 0
    assert leaves.evicted == pytest.approx(400, rel=0.15), "4 hosts, each slow once in 4e5 s"
    assert leaves.restarts == pytest.approx(60 * leaves.evicted, rel=0.02), "each has its restart"
    assert leaves.slow / leaves.evicted == pytest.approx(450, rel=0.15), "until the next save"
    assert leaves.goodput > 0.85 > 0.6 > stays.goodput


def test_nobody_is_evicted_without_a_spare_and_repairs_bring_the_host_back():
    rare, slow = (Slowdown(2e4, 1e30, 2),), (Slowdown(100, 1e30, 2),)
    alone = replay(replace(CALM, slowdowns=rare, evict=0), 1e4)
    assert alone.evicted == alone.waiting == 0, "no spare, so nobody is evicted"
    one = replay(replace(CALM, slowdowns=slow, evict=0, spares=1, repair=500), 1e5)
    assert 1e5 / 1000 < one.evicted < 1e5 / 500 + 50, "the spare is away for 500 s"
    assert one.waiting == 0


def test_patience_pays_where_short_and_long_slow_times_are_mixed():
    slow = (Slowdown(2000, 30, 2), Slowdown(1e5, 1e6, 2))
    run = replace(CALM, interval=20, save=0, slowdowns=slow, spares=10**5)
    at_once, later, never = (replay(replace(run, evict=s), 4e5).goodput for s in (0, 150, inf))
    assert later > at_once > never, "slow for so long: since it began"


def test_the_fastest_links_take_part_and_all_wait_for_the_slowest_of_them():
    """Of three hosts two take part; a fifth of a step is on links: 1 + (3 - 1) / 5."""
    run = replace(CALM, hosts=2, spares=1, links=(5, 3, 1), linked=0.2)
    spent = replay(run, 1e4)
    taken = (spent.useful + spent.slow) / spent.useful
    assert taken == pytest.approx(1.4), "all wait for the slowest link that takes part"
    alike = replay(replace(run, links=(3, 1, 1)), 1e4)
    assert alike.slow == pytest.approx(0, abs=1e-9)


def test_100_000_ranks_for_a_year():
    """The failures of Llama 3's report per rank, on 100,000: 17,000 in a year."""
    M = 54 * DAY / 419 * 16384 / 100_000
    run = Run(12500, sqrt(2 * 60 * M), 60, 300, failures=12500 * M, spares=12500)
    spent = replay(run)
    assert 16_500 < spent.failures < 18_000
    assert spent.goodput == pytest.approx(closed_form(run), rel=0.02)
