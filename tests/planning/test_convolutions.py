"""The closed forms of split convolutions, against plans of halos and against what ranks did."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.observe.costs.measured import measure_costs
from minidist.pieces import split_ends
from minidist.planning.costs import convolutions as costs
from minidist.tensor_parallel.spatial_parallel import Halos
from minidist.verify.strategies import STRATEGIES
from tests.strategies import arrays


def moved(halos):
    """Return how many rows cross borders in one exchange."""
    ranks = range(len(halos.ends) - 1)
    return sum(len(halos.piece(r, q)) for r in ranks for q in ranks if q != r)


def test_the_rows_of_a_block_are_those_of_the_plans_for_all_heights_and_ranks():
    seen = 0
    for N in range(1, 9):
        for H in range(2 * N, 40, 2):
            ends, C, F, W = tuple(split_ends(H, N)), 3, 5, 8
            try:
                after = Halos(ends, 3, 2, 1).after
            except ValueError:
                continue
            whole = 2 * moved(Halos(ends, 3, 1, 1)) * C * W
            assert costs.halo_numbers(costs.Block(C, C, ends, ends, W, False)) == whole
            halved = (moved(Halos(ends, 3, 2, 1)) + moved(Halos(ends, 2, 2))) * C * W
            halved += moved(Halos(after, 3, 1, 1)) * F * W // 2
            assert costs.halo_numbers(costs.Block(C, F, ends, after, W // 2, True)) == halved
            seen += any(end % 2 for end in ends)
    assert seen > 20


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["channel", "spatial"])
def test_each_rank_costs_what_the_closed_forms_say_with_uneven_rows(cluster, name, size):
    strategy = STRATEGIES[name]
    for case in strategy.cases(size):
        found = measure_costs(name, case, cluster(size, "thread"))
        forms = strategy.predict(case, size)
        assert sum(cost.sent for cost in found) == sum(form.sent for form in forms)
        assert found == [replace(f, sent=c.sent) for f, c in zip(forms, found, strict=True)]


@pytest.mark.parametrize("B, C, H, W", [(2, 6, 8, 6), (1, 12, 6, 4)])
def test_a_block_sends_what_its_three_terms_say(cluster, B, C, H, W):
    """Besides the norms' sums, which are of neither cut alone."""
    for size in (2, 3):
        terms = costs.block_bytes(B, C, H, W, 8, size)
        model = nn.CNN(C, 2, (C,), dtype="float64")
        case = STRATEGIES["channel"].cases(1)[0]
        case = replace(case, model=model, inputs=arrays(B, C, H, W), targets=np.zeros(B, int))
        assert costs.channel_bytes(case, size) == terms["channels"]
        blocks = costs.blocks_of(case, size)
        assert 2 * B * 8 * costs.halo_numbers(blocks[1]) == terms["halos"]
        sent = measure_costs("channel", case, cluster(size, "thread"))
        assert sum(cost.sent for cost in sent) == terms["channels"]
