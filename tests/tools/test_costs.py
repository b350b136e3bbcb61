"""What every strategy costs each rank: measured, equal to its closed form, and in one table."""

from dataclasses import replace

import pytest

from minidist.tools.costs.closed_forms import one_device, predict, useful_share
from minidist.tools.costs.measured import STEPS, measure
from minidist.tools.costs.table import (
    FAMILIES,
    HEADINGS,
    example,
    limit,
    markdown,
    ranks,
    rows,
    text,
)
from minidist.tools.equivalence import find, strategies

UPPER_BOUND = ("zb_h1", "zb_h2")


def test_every_strategy_has_a_step_that_is_measured():
    assert list(STEPS) == strategies()
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(strategies())


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_costs_what_the_closed_forms_say(cluster, size):
    """On four ranks: lesson 20."""
    for name in strategies():
        if size not in find(name).ranks:
            continue
        case = example(name)
        if name == "hybrid":
            case = replace(case, options={"dp": 1, "pp": size, "micro_batches": 4})
        if name in ("downpour", "ssp"):
            case = replace(case, options={"minibatches": 1})
        found, forms = measure(name, case, cluster(size)), predict(name, case, size)
        assert sum(cost.sent for cost in found) == sum(form.sent for form in forms), name
        for cost, form in zip(found, forms, strict=True):
            if name in UPPER_BOUND:
                assert cost.held["activations"] <= form.held["activations"]
                form = replace(form, held=cost.held)
            assert replace(form, sent=cost.sent) == cost, name


def test_without_other_ranks_all_the_time_is_of_use_but_for_what_a_pipeline_waits():
    for name in strategies():
        if 1 in find(name).ranks:
            case = example(name)
            case = replace(case, options=case.options | {"pp": 1}) if name == "hybrid" else case
            assert useful_share(name, case, 1) == pytest.approx(1)
            assert sum(form.sent for form in predict(name, case, 1)) == 0


def test_ranks_beyond_the_limit_have_nothing_to_do():
    for name in ("naive", "zero_3"):
        number, what = limit(name, example(name))
        assert (number, what) == (8, "examples")
        assert predict(name, example(name), number + 1)[-1].examples == 0
    assert limit("zb_v", example("zb_v")) == (4, "layers, 2 on each")
    assert limit("siamese", example("siamese"))[0] == ranks("siamese") == 2


def test_the_table_has_a_row_per_strategy_also_as_markdown():
    costs = {name: predict(name, example(name), ranks(name)) for name in ("naive", "gpipe")}
    cells = rows(costs)
    assert [row[0] for row in cells] == ["naive", "gpipe"]
    assert {len(row) for row in cells} == {len(HEADINGS)}
    assert cells[0][1:4] == ["2 x 16 x 8", "3883 (971)", "2589 + 1216"]
    assert len(text(cells).splitlines()) == 3
    assert markdown(cells).splitlines()[2].startswith("| `naive` | 2 x 16 x 8 |")
    assert one_device(example("naive")).memory > 0
