"""What a block of a CNN sends, by channels or by rows: the three terms that lesson 17 compares."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.observe.costs import measure_costs
from minidist.planning.costs.layers import block_bytes
from minidist.verify.strategies import STRATEGIES
from tests.strategies import arrays


@pytest.mark.parametrize("B, C, H, W", [(2, 6, 8, 6), (1, 12, 6, 4)])
def test_a_block_sends_what_its_terms_say(cluster, B, C, H, W):
    """By rows, a CNN of a stem and two blocks sends a block more than one of a stem and one."""
    case = STRATEGIES["channel"].cases(1)[0]

    def sent(name, blocks, size):
        model = nn.CNN(C, 2, (C,) * blocks, dtype="float64")
        images, labels = arrays(B, C, H, W), np.zeros(B, int)
        ranks = measure_costs(
            name, replace(case, model=model, inputs=images, targets=labels), cluster(size, "thread")
        )
        return sum(cost.sent for cost in ranks)

    for size in (2, 3):
        terms = block_bytes(B, C, H, W, 8, size)
        assert sent("channel", 1, size) == terms["channels"]
        norms = 2 * (size - 1) * 2 * (8 * (2 * C + 1) + 8 * 2 * C + 8 * 2 * C)  # sums, gradients
        more = sent("spatial", 2, size) - sent("spatial", 1, size)
        assert more == terms["halos"] + terms["weights"] + norms
