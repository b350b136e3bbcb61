"""What every strategy costs each rank is measured; where a paper prints a formula, it is that."""

import pytest

from minidist.observe.costs import (
    HEADINGS,
    alone,
    example,
    limit,
    measure_costs,
    rows,
    useful_share,
)
from minidist.verify.equivalence import find
from minidist.verify.strategies import STRATEGIES


def test_a_paper_s_formula_is_what_ledgers_count(cluster):
    for name, strategy in STRATEGIES.items():
        if strategy.costs.bytes:
            N = min(strategy.most_ranks, 4)
            ranks = measure_costs(name, strategy.costs.example(N), cluster(N, "thread"))
            sent = strategy.costs.bytes(strategy.costs.example(N), N)
            assert sum(cost.sent for cost in ranks) == sent, name


def test_one_device_sends_nothing_and_holds_16_bytes_of_a_float32_parameter():
    """Here in float64: weights, gradients and AdamW's two moments of 8 bytes each."""
    case = example("naive")
    P, one = sum(p.size for p in case.model.parameters()), alone(case)
    states = [one.held[kind] for kind in ("parameters", "gradients", "optimizer state")]
    assert (one.sent, states) == (0, [8 * P, 8 * P, 16 * P])
    assert (one.examples, one.positions, one.layers) == (8, 16, 8)
    assert useful_share("naive", case, [one], one) == 1


def test_the_table_has_a_row_per_strategy(cluster):
    chosen = {
        name: measure_costs(name, example(name), cluster(find(name).most_ranks, "thread"))
        for name in ("naive", "gpipe", "zb_h1", "zb_v", "ring_attention")
    }
    cells = [dict(zip(HEADINGS, row, strict=True)) for row in rows(chosen)]
    assert [row["strategy"] for row in cells] == list(chosen)
    naive, *_, ring = cells
    assert (naive["input per device"], naive["bytes moved, kB"]) == ("2 x 16 x 8", "3883 (971)")
    assert naive["memory, kB"] == "2589 + 1216" and naive["of one"] == "51%"
    useful = [float(row["useful"].rstrip("%")) for row in cells]
    assert useful[0] == useful[-1] == 100 > useful[3] > useful[2] > useful[1]
    assert ring["input per device"] == "8 x 4 x 8"


def test_ranks_beyond_the_limit_have_nothing_to_do():
    assert limit("naive", example("naive")) == limit("zero_3", example("zero_3")) == (8, "examples")
    assert limit("zb_v", example("zb_v")) == (4, "layers, 2 on each")
    assert limit("siamese", example("siamese"))[0] == find("siamese").most_ranks == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["naive", "zero_3", "parameter_server", "pipedream", "sequence"])
def test_on_a_gpu_each_rank_costs_what_it_does_on_the_host(cluster, name):
    case = find(name).costs.example(2)
    here, there = (measure_costs(name, case, cluster(2, "thread", d)) for d in ("cpu", "gpu"))
    for cost, other in zip(here, there, strict=True):
        for kind in ("parameters", "gradients", "optimizer state"):
            assert cost.held[kind] == other.held[kind]
        assert (cost.work, cost.sent) == (other.work, other.sent)
