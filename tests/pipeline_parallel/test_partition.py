"""The cuts against all cuts there are; costs against their closed forms."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.backend import to_device
from minidist.pipeline_parallel import partition as module
from minidist.pipeline_parallel.partition import (
    counted_costs,
    measured_costs,
    partition,
)
from tests.clocks import QueueClock, clock_of_a_gpu
from tests.strategies import arrays, assert_same_bits


def all_cuts(n, p):
    """Return every way to cut n layers into p stages, none empty."""
    for inner in combinations(range(1, n), p - 1):
        yield [range(start, stop) for start, stop in pairwise([0, *inner, n])]


def stage_costs(costs, stages):
    return [sum(costs[i] for i in stage) for stage in stages]


def rank_of_cut(costs, stages):
    """Return what the documentation says a cut is compared by."""
    slowest_first = sorted(stage_costs(costs, stages), reverse=True)
    return slowest_first, [len(stage) for stage in stages]


numbers = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),  # many ties and zeros
    st.lists(st.integers(0, 10**20), min_size=1, max_size=9),
    st.lists(st.fractions(0, 9, max_denominator=7), min_size=1, max_size=9),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9),
)


@given(costs=numbers, data=st.data())
def test_it_is_the_best_of_all_cuts_and_ties_fall_as_documented(costs, data):
    p = data.draw(st.integers(1, len(costs)))
    stages = partition(costs, p)
    best = min(all_cuts(len(costs), p), key=lambda cut: rank_of_cut(costs, cut))
    assert stages == best
    slowest = min(max(stage_costs(costs, cut)) for cut in all_cuts(len(costs), p))
    assert max(stage_costs(costs, stages)) == slowest


def transformer(vocab=7, width=8, depth=2, context=5, **more):
    return nn.Transformer(vocab, width, 2, depth, context, dtype="float64", **more)


def tokens(model, B=3):
    return np.random.default_rng(0).integers(0, model.vocab, (B, model.context))


@pytest.mark.parametrize("tied", [False, True])
def test_counted_costs_of_a_transformer_are_its_closed_form(tied):
    B, T, C, V = 3, 5, 8, 11
    model = transformer(V, C, depth=2, context=T, tied=tied)
    block = B * (12 * T * C**2 + 2 * T**2 * C)
    assert counted_costs(model, tokens(model)) == [0, block, block, B * T * C * V]


def test_blocks_of_queries_leave_out_the_scores_of_all_keys_after_them():
    T, C, V = 200, 8, 5
    scores = 64 * 64 + 64 * 128 + 64 * 192 + 8 * 200
    block = 12 * T * C**2 + 2 * scores * C
    assert counted_costs(transformer(V, C, 1, T), np.zeros((1, T), int))[1] == block


def test_products_of_tensors_count_and_layers_without_products_cost_nothing():
    class Square(nn.Module):
        def forward(self, x, randomness=None):
            return x @ x.transpose(0, 2, 1)  # [B, n, k] [B, k, n]

    model = nn.Sequential([nn.LayerNorm(4, dtype="float64"), nn.Dropout(0.0), Square()])
    assert counted_costs(model, arrays(2, 3, 4)) == [0, 0, 2 * 3 * 3 * 4]


def test_measuring_and_counting_leave_the_model_as_it_is():
    model, x = nn.MLP([3, 4, 2], dtype="float64"), Tensor(arrays(2, 3), requires_grad=True)
    before = model.state()
    measured_costs(model, x, repeats=1)
    counted_costs(model, x)
    assert all(p.grad is None for p in [x, *model.parameters()])
    assert_same_bits(model.state(), before)


def test_layers_are_timed_by_the_clock_of_their_device_which_is_read_at_the_end(monkeypatch):
    monkeypatch.setattr(module, "clock", lambda device: QueueClock(apart=0.25))
    assert measured_costs(nn.MLP([2, 3, 2]), arrays(1, 2, dtype="float32"), repeats=2) == [0.25] * 2


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_measured_there(monkeypatch):
    model, x = nn.MLP([2, 3, 2], dtype="float64").to("gpu"), to_device(arrays(1, 2), "gpu")
    assert min(measured_costs(model, x, repeats=2)) > 0
    monkeypatch.setattr(module, "clock", clock_of_a_gpu)
    assert measured_costs(model, x, repeats=2) == [0.25] * 2
