"""What every strategy costs each rank: measured, equal to its closed form, and in one table."""

from dataclasses import replace

import pytest

from minidist import attention_scores, nn
from minidist.observe.costs.measured import measure_costs
from minidist.observe.costs.table import HEADINGS, example, limit, rows
from minidist.planning.costs.single_device import single_device_cost
from minidist.verify.equivalence import find
from minidist.verify.strategies import STRATEGIES

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_costs_what_the_closed_forms_say(cluster, size):
    """On four ranks: lesson 20."""
    for name, strategy in STRATEGIES.items():
        if size not in strategy.ranks:
            continue
        case = strategy.costs.example(size)
        found, forms = measure_costs(name, case, cluster(size)), strategy.predict(case, size)
        assert sum(cost.sent for cost in found) == sum(form.sent for form in forms), name
        for cost, form in zip(found, forms, strict=True):
            if strategy.costs.bound:
                assert cost.held["activations"] <= form.held["activations"]
                form = replace(form, held=cost.held)
            assert replace(form, sent=cost.sent) == cost, name


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_of_a_llama_each_rank_costs_what_the_closed_forms_say(cluster, kv_heads):
    for name in ("zero_3", "zb_h1", "attention", "sequence", "gathered_attention", "hybrid"):
        strategy = find(name)
        case = strategy.costs.example(4)
        model = nn.Llama(64, 32, 8, kv_heads, 6, 16, dtype="float64", hidden=48)
        case = replace(case, model=model)
        found, forms = measure_costs(name, case, cluster(4, "thread")), strategy.predict(case, 4)
        assert sum(cost.sent for cost in found) == sum(form.sent for form in forms), name
        for cost, form in zip(found, forms, strict=True):
            if strategy.costs.bound:
                assert cost.held["activations"] <= form.held["activations"]
                form = replace(form, held=cost.held)
            assert replace(form, sent=cost.sent) == cost, name


HALVES = {"pp": 2, "schedule": "zb_h1", "micro_batches": 4}


@pytest.mark.parametrize("name", ["naive", "zb_h1", "zb_h2", "zb_v", "sequence", "hybrid"])
def test_the_closed_forms_hold_where_attention_keeps_no_probabilities(cluster, monkeypatch, name):
    monkeypatch.setattr(attention_scores, "WHOLE", 8)
    strategy = find(name)
    size, options = (4, {"options": HALVES}) if name == "hybrid" else (2, {})
    case = replace(strategy.costs.example(size), **options)
    found, forms = measure_costs(name, case, cluster(size, "thread")), strategy.predict(case, size)
    for cost, form in zip(found, forms, strict=True):
        if strategy.costs.bound or options:
            assert cost.held["activations"] <= form.held["activations"]
            form = replace(form, held=cost.held)
        assert (cost.held, cost.work) == (form.held, form.work)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["naive", "zero_3", "parameter_server", "pipedream", "sequence"])
def test_on_a_gpu_each_rank_costs_what_the_closed_forms_say(cluster, name):
    strategy = find(name)
    case = strategy.costs.example(2)
    found, forms = measure_costs(name, case, cluster(2, "thread", "gpu")), strategy.predict(case, 2)
    for cost, form in zip(found, forms, strict=True):
        for what in ("parameters", "gradients", "optimizer state"):
            assert cost.held[what] == form.held[what]
        assert cost.work == form.work
    assert sum(cost.sent for cost in found) == sum(form.sent for form in forms)


@every_strategy
def test_without_other_ranks_all_the_time_is_of_use_but_for_what_a_pipeline_waits(name):
    strategy = find(name)
    if 1 in strategy.ranks:
        case = strategy.costs.example(1)
        assert strategy.useful_share(case, 1) == pytest.approx(1)
        assert sum(form.sent for form in strategy.predict(case, 1)) == 0


def test_ranks_beyond_the_limit_have_nothing_to_do():
    for name in ("naive", "zero_3"):
        number, what = limit(name, example(name))
        assert (number, what) == (8, "examples")
        assert find(name).predict(example(name), number + 1)[-1].examples == 0
    assert limit("zb_v", example("zb_v")) == (4, "layers, 2 on each")
    assert limit("siamese", example("siamese"))[0] == find("siamese").most_ranks == 2


def test_the_table_has_a_row_per_strategy():
    costs = {name: find(name).predict(example(name), 4) for name in ("naive", "gpipe")}
    cells = rows(costs)
    assert [row[0] for row in cells] == ["naive", "gpipe"]
    assert {len(row) for row in cells} == {len(HEADINGS)}
    assert cells[0][1:4] == ["2 x 16 x 8", "3883 (971)", "2589 + 1216"]
    assert single_device_cost(example("naive")).memory > 0
