"""DeepSeek-V3's printed numbers, from its sizes, mesh and rates."""

from collections import Counter
from random import Random

import pytest

from minidist.planning.plans.published import BUBBLE, DEEPSEEK, TAKEN, WORK, deepseek_rows

SIZE, STEP = DEEPSEEK.size, DEEPSEEK


def test_what_its_reports_print_follows_from_its_sizes_and_its_batch():
    """Within 0.4 %; not the bubble: no report prints how large a micro-batch is."""
    compared = [row for row in deepseek_rows() if row[2] not in (None, BUBBLE)]
    assert len(compared) == 7
    for what, found, printed in compared:
        assert found == pytest.approx(printed, rel=4e-3), f"{what}: {found:.4g}, not {printed}"


def test_its_parameters_are_those_of_its_published_matrices():
    """config.json and the names in its weights: a matrix [in, out] each, and the norms."""
    attention = [(7168, 1536), (1536,), (1536, 128 * 192), (7168, 512 + 64), (512,)]
    attention += [(512, 128 * 256), (128 * 128, 7168), (7168,), (7168,)]
    part = {n: [(7168, n), (7168, n), (n, 7168)] for n in (18432, 2048)}
    sparse = [(7168, 256), (256,)] + 257 * part[2048]
    shapes = 61 * attention + 3 * part[18432] + 58 * sparse + [(129280, 7168), (7168,)]
    shapes += [(7168, 129280)]
    count = sum(number * shape[0] * (*shape, 1)[1] for shape, number in Counter(shapes).items())
    assert SIZE.parameters == count == 671_026_419_200


def test_products_at_the_peaks_and_rows_on_the_network_take_about_as_long():
    """Section 3.2.1: a computation-to-communication ratio of approximately 1:1."""
    assert 0.7 < STEP.at_peak() / STEP.network() < 1.4


def test_a_token_reaches_as_many_hosts_as_in_many_draws():
    """8 of 256 experts, 32 on a host; one eighth of the hosts that it reaches is its own."""
    random = Random(1)
    hosts = [len({e // 32 for e in random.sample(range(256), 8)}) for _ in range(20_000)]
    assert STEP.crossings(limited=False) == pytest.approx(sum(hosts) / 20_000 * 7 / 8, rel=0.005)
    assert STEP.crossings() == 4 * 7 / 8, "a row goes once to each of 4 hosts"
    assert STEP._replace(nodes=99).crossings() == 7, "8 hosts, and not more"
    assert STEP._replace(ep=8).network() == 0, "all experts are on one host"


def test_a_rank_holds_all_states_where_nothing_is_split():
    """Two stages, both on each rank as in DualPipe; two ranks share the optimizer's 8 P."""
    alone = STEP._replace(ranks=2, p=2, ep=1)
    wanted = (2 + 4 + 8 / 2) * SIZE.parameters
    assert alone.held() == pytest.approx(wanted), "both stages of a rank, and half the optimizer"
    assert STEP.held() < 80e9 / 3


def test_the_bubble_asks_for_micro_batches_of_two_or_three_examples():
    assert STEP.bubble(2, WORK) < BUBBLE < STEP.bubble(3, WORK)
    assert STEP._replace(p=2).bubble(1, WORK) == 0, "both directions keep two ranks busy"
    assert TAKEN - 0.1 < WORK + BUBBLE + 0.29 < TAKEN


def test_attention_without_latents_of_its_own_is_that_of_a_known_block():
    """As many numbers in a latent as the width, none turned: four C C and two more, C (q + k)."""
    plain = SIZE._replace(width=64, heads=4, head=16, query=64, latent=64, rotary=0)
    assert plain.attention == (2 + 4) * 64 * 64 + 2 * 64
