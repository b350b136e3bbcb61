"""Every strategy gives one device's gradient, and moves the bytes of its formula, on every model.

The models are those that its record says it splits, with every combination of their options. The
everyday tests take some, in which every two values of two options meet; `-m slow` takes all.
"""

import inspect
import re
from itertools import product

import pytest

from minidist import nn
from minidist.verify import equivalence
from minidist.verify.strategies import STRATEGIES
from tests.verify.every_option import KINDS, case_of, pairs_of, single, splits

NO_OPTIONS = {"name", "seed", "dtype", "style", "activation", "bias", "bias_rate"}
every_kind = pytest.mark.parametrize("kind", KINDS)


REFUSED = [  # what a strategy may refuse: in which cases alone, and in which words
    (
        lambda case: any(norm.training for norm in case.model.modules(nn.BatchNorm)),
        r"needs the statistics of the whole batch|no server has them",
    ),
    (
        lambda case: not trained(case),
        "does not depend on anything that requires a gradient",
    ),
    (
        lambda case: getattr(case.model, "experts", 0),
        "sequence parallelism would show a mixture of experts a part of each sequence",
    ),
    (
        lambda case: case.options.get("ep", 1) > 1 and not getattr(case.model, "experts", 0),
        r"ep=\d needs experts",
    ),
    (
        lambda case: isinstance(case.model, nn.Seq2Seq),
        r"(sequence|context) parallelism cuts one sequence, and an nn.Seq2Seq has",
    ),
    (
        lambda case: not isinstance(case.model, nn.Sequential),
        r"stage \d needs an nn.Sequential",
    ),
    (
        lambda case: getattr(case.model.layers[-1], "tied", False),
        r"belongs to several layers, and (stage|zero=) ?[23]|a model whose weights are not tied",
    ),
]


def trained(case):
    return [p for p in case.model.parameters() if p.requires_grad]


def certified(cluster, name, kind, options, turn, ranks=2):
    """Return whether a strategy runs a case; it gives one device's gradient, or says why not."""
    strategy = STRATEGIES[name]
    case = case_of(strategy, KINDS[kind], options, ranks, turn)
    try:
        row = equivalence.check(name, case, ranks, cluster=cluster(ranks, "thread"))
    except ValueError as error:
        reasons = [words for applies, words in REFUSED if applies(case)]
        if not any(re.search(words, str(error)) for words in reasons):
            raise
        return False
    assert row["ok"], f"{name}, {kind}, {case.name}, {case.options}: {row['detail']}"
    return True


def strategies_of(kind, ranks=2):
    """Return {strategy: the combinations of a kind that it splits}."""
    found = {name: splits(s, kind) for name, s in STRATEGIES.items() if ranks in s.ranks}
    return {name: combinations for name, combinations in found.items() if combinations}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k == "Transformer" else [pytest.mark.slow]) for k in KINDS],
)
def test_every_two_options_meet_on_a_strategy(cluster, kind):
    """Each combination goes to the next strategy in turn, and on if that one refuses it."""
    able, first = strategies_of(kind), 7 * list(KINDS).index(kind)
    names = list(able)
    for turn, one in enumerate(KINDS[kind].covering()):
        start = (first + turn) % len(names)
        for name in names[start:] + names[:start]:
            if one in able[name] and certified(cluster, name, kind, one, turn):
                break
        else:
            assert not trained(KINDS[kind].case(2, one)), f"no strategy runs {kind}, {one}"


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_two_options_meet_on_a_mesh_of_four_ranks(cluster, each):
    """For strategies of several axes, each time with the next mesh and schedule of their cases.

    Every day a third of the combinations run.
    """
    meshes = [name for name, strategy in STRATEGIES.items() if max(strategy.ranks) > 4]
    assert meshes
    for kind, name in product(KINDS, meshes):
        if able := strategies_of(kind, 4).get(name):
            covering = [one for one in KINDS[kind].covering() if one in able][::each]
            ran = [
                certified(cluster, name, kind, one, turn, 4) for turn, one in enumerate(covering)
            ]
            assert any(ran), f"{name} refuses every {kind}"


@pytest.mark.slow
@pytest.mark.grid(110)
@pytest.mark.parametrize("name", STRATEGIES)
@every_kind
def test_every_strategy_on_every_combination_of_options(cluster, kind, name):
    if able := strategies_of(kind).get(name):
        ran = [certified(cluster, name, kind, one, turn) for turn, one in enumerate(able)]
        assert any(ran), f"{name} refuses every {kind}, and its record says that it splits it"


@every_kind
def test_what_a_constructor_offers_is_an_option(kind):
    kind = KINDS[kind]
    offered = {
        name
        for module in kind.made_of
        for name, argument in inspect.signature(module).parameters.items()
        if argument.default is not argument.empty
    }
    tried = set(single(kind.combinations()[0]))
    assert offered - NO_OPTIONS <= tried, "give the new option some values to try"
    missing = {pair for one in kind.combinations() for pair in pairs_of(one)}
    assert missing == {pair for one in kind.covering() for pair in pairs_of(one)}


def test_every_strategy_splits_a_kind():
    assert all(any(splits(s, kind) for kind in KINDS) for s in STRATEGIES.values())
