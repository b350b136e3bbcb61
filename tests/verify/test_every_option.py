"""Every strategy gives one device's gradient, and moves the bytes of its formula, on every model.

The models are those that its record says it splits, with any of the options that their constructors
offer. The commit draws which; `-m slow` tries more. Nothing here knows the name of a strategy: its
cases have the options of its own.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, product
from random import Random

import numpy as np
import pytest

from minidist import nn
from minidist.rng import generator
from minidist.verify import equivalence
from minidist.verify.strategies import STRATEGIES, Case, Strategy
from minidist.verify.strategies.cases import dual_case, padded, random_weights, translator_case
from tests.grids import commit, some

B, T, C, H, V = 3, 6, 12, 12, 11  # 2 ranks can split the positions, 4 the width and the heads
FLOATS = {"dtype": "float64", "seed": 1}
FROZEN = (
    *("nothing", "first layer", "last layer", "every second", "everything"),
    *("all but the last layer", "all but one parameter"),
)
SWITCH = False, True


@dataclass(frozen=True)
class Kind:
    """A kind of model, and its options.

    options  {option: the values that are tried}; several options that only go together are one
             key, "eps, momentum", whose values are tuples. Two are no argument of a constructor:
             "frozen", see FROZEN, and "training", the mode of batch norms
    build    (depth, **options) -> the model; depth: how many blocks or hidden layers it has
    batch    (model) -> inputs, targets
    made_of  the classes whose arguments the options are
    """

    options: dict[str, tuple]
    build: Callable[..., nn.Module]
    batch: Callable[[nn.Module], tuple[np.ndarray, np.ndarray]]
    made_of: tuple[type, ...]

    def combinations(self) -> list[dict]:
        """Return all combinations of the options, in an order that is drawn, the same always."""
        named = self.options | {"frozen": FROZEN}
        every = [dict(zip(named, one, strict=True)) for one in product(*named.values())]
        Random(str(named)).shuffle(every)
        return every

    def case(self, depth: int, options: dict) -> Case:
        """Return a case; its weights are random: a bias of 0 hides how often it is added."""
        given, words = single(options), ", ".join(f"{k}={v}" for k, v in options.items())
        frozen, training = given.pop("frozen"), given.pop("training", True)
        model = random_weights(self.build(depth, **given), seed=3)
        for p in model.parameters():
            p.data *= 0.5
        for norm in model.modules(nn.BatchNorm):
            norm.running_var.data[...] = 1 + norm.running_var.data**2
        model.train(training)
        if names := names_of(model, frozen, words):
            model.freeze(*names)
        loss = model.loss if isinstance(model, nn.Dual) else nn.cross_entropy
        return Case(words, model, *self.batch(model), loss)


def single(options: dict) -> dict:
    """Return {option: value}, with the options that only go together apart."""
    found = {}
    for key, value in options.items():
        names = key.split(", ")
        found |= zip(names, value if len(names) > 1 else [value], strict=True)
    return found


def names_of(model: nn.Module, frozen: str, drawn: str) -> list[str]:
    """Return the names of the parameters to freeze; `drawn` is a seed."""
    every = [name for name, p in model.named_parameters().items() if p.requires_grad]
    layers = [list(layer.named_parameters()) for layer in model.layers]
    kept = layers[-1], [Random(drawn).choice(every)]
    choices = [[], layers[0], layers[-1], every[::2], every]
    choices += [[name for name in every if name not in names] for names in kept]
    return dict(zip(FROZEN, choices, strict=True))[frozen]


def of_numbers(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    random = generator(0, "every option")
    return random.standard_normal((7, C)), random.integers(0, 12, 7)


def of_tokens(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    tokens, nexts = generator(0, "every option").integers(0, V, (2, B, T))
    return tokens, padded(nexts)


def of_images(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    random = generator(0, "every option")
    return 1 + random.standard_normal((B, 2, 8, 8)), random.integers(0, 3, B)


def of_pairs(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    random = generator(0, "every option")
    return random.standard_normal((7, 2, 6)), random.integers(0, 3, 7)


def of_sentences(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    case = translator_case(B)
    return case.inputs, case.targets


def of_both_ways(model: nn.Dual) -> tuple[np.ndarray, np.ndarray]:
    tokens = dual_case().inputs
    return tokens, model.targets(tokens)


def linear_layers(depth: int, **more) -> nn.Sequential:
    layers = [nn.Linear(C, C, name=f"layers.{i}", **more, **FLOATS) for i in range(depth + 1)]
    return nn.Sequential([*layers, nn.Linear(C, 12, name="last", **FLOATS)])


def norms(depth: int, **more) -> nn.Sequential:
    layers = []
    for i in range(depth):
        layers.append(nn.Linear(C, C, activation="gelu", name=f"layers.{i}", **FLOATS))
        layers.append(nn.BatchNorm(C, **more, name=f"norms.{i}", dtype="float64"))
    return nn.Sequential([*layers, nn.Linear(C, 12, name="last", **FLOATS)])


def convolutions(depth: int, k: int | None, **more) -> nn.Sequential:
    layers = [
        nn.Conv2d(2, 2, 3, **more, name=f"layers.{i}", **FLOATS) for i in range(min(depth, 2))
    ]
    pools = [nn.AveragePool(k), *([] if k is None else [nn.AveragePool()])]
    return nn.Sequential([*layers, *pools, nn.Linear(2, 3, name="last", **FLOATS)])


def cnn(depth: int, widths: tuple[int, int]) -> nn.CNN:
    return nn.CNN(2, 3, (*widths, *[widths[-1]] * (depth - 2)), **FLOATS)


def transformer(depth: int, **more) -> nn.Transformer:
    return nn.Transformer(V, C, H, depth, T, **more, **FLOATS)


def llama(depth: int, kv_heads: int, **more) -> nn.Llama:
    return nn.Llama(V, 2 * C, H, kv_heads, depth, T, **more, **FLOATS)


def seq2seq(depth: int, **more) -> nn.Seq2Seq:
    return nn.Seq2Seq(13, 11, C, H, max(1, depth // 2), 4, 5, **more, **FLOATS)


def dual(depth: int, dropout: float, **more) -> nn.Dual:
    both = {"width": 8, "heads": 2, "depth": 1, "dropout": dropout, **FLOATS}
    there = nn.Seq2Seq(9, 7, source_length=4, target_length=5, name="there", **both)
    back = nn.Seq2Seq(7, 9, source_length=4, target_length=5, name="back", **both)
    return nn.Dual(there, back, **more)


ACTIVATIONS = {"activation": ("relu", "gelu", "identity")}
RATES, MODES = {"dropout": (0.0, 0.3)}, {"training": (True, False)}
MIXTURE = "experts, top_k, capacity, balance, shared, expert_width, groups, most_groups"
MIXTURES = (
    (0, 2, 1.25, 0.01, 0, None, 1, 1),
    (4, 1, 0.5, 0.0, 0, None, 1, 1),
    (3, 2, 0.75, 0.3, 0, 24, 1, 1),
    (4, 2, None, 0.1, 1, 12, 2, 1),
    (1, 1, 1, 0, 2, None, 1, 1),
)
KINDS = {
    "MLP": Kind(
        ACTIVATIONS,
        lambda depth, **more: nn.MLP([C] * (depth + 2) + [12], **more, **FLOATS),
        of_numbers,
        (nn.MLP,),
    ),
    "linear layers": Kind(
        {"bias": SWITCH, "activation": ("identity", "gelu")},
        linear_layers,
        of_numbers,
        (nn.Linear,),
    ),
    "ResidualMLP": Kind(
        {},
        lambda depth: nn.ResidualMLP(C, C, depth, 12, **FLOATS),
        of_numbers,
        (nn.ResidualMLP,),
    ),
    "batch norms": Kind(
        MODES | {"eps, momentum": ((1e-5, 0.1), (0.1, 1.0))}, norms, of_numbers, (nn.BatchNorm,)
    ),
    "convolutions": Kind(
        {"bias": SWITCH, "activation": ("identity", "relu"), "stride, padding": ((1, 0), (2, 1))}
        | {"k": (None, 2)},
        convolutions,
        of_images,
        (nn.Conv2d, nn.AveragePool),
    ),
    "CNN": Kind(MODES | {"widths": ((12, 12), (12, 24))}, cnn, of_images, (nn.CNN,)),
    "Transformer": Kind(
        RATES | {"tied": SWITCH, MIXTURE: MIXTURES},
        transformer,
        of_tokens,
        (nn.Transformer, nn.MixtureOfExperts),
    ),
    "Llama": Kind(
        RATES | {"tied": SWITCH, "kv_heads": (12, 4, 1), "hidden": (12, 24), "experts": (0, 4)},
        llama,
        of_tokens,
        (),
    ),
    "Seq2Seq": Kind(RATES, seq2seq, of_sentences, (nn.Seq2Seq,)),
    "Dual": Kind(
        RATES | {"weight": (1.0, 0.0), "read": ("soft", "hard")}, dual, of_both_ways, (nn.Dual,)
    ),
    "Siamese": Kind(
        ACTIVATIONS | {"classes": (3, 4)},
        lambda depth, **more: nn.Siamese([6, *[8] * depth], **more, **FLOATS),
        of_pairs,
        (nn.Siamese,),
    ),
}


@cache
def variants(strategy: Strategy, ranks: int) -> list[dict]:
    """Return the different options that a strategy has in its own cases on these ranks.

    But not `whole`, which says that model and data are whole numbers: here none are; nor
    `stochastic`, which has no loss scale, so that deep models in float16 overflow.
    """
    found: list[dict] = []
    for case in strategy.cases(ranks):
        apart = case.options.get("whole") or case.options.get("stochastic")
        if case.options not in found and not apart:
            found.append(case.options)
    return found


def case_of(strategy: Strategy, kind: Kind, options: dict, ranks: int, turn: int) -> Case:
    """Return a case of a kind, with the options that a strategy has in this turn.

    A stream has two examples for each of its minibatches, and a given cut all layers.
    """
    own = variants(strategy, ranks)
    case, more = kind.case(2 * ranks - 2, options), own[turn % len(own)]
    if isinstance(more.get("cut"), list):
        *cut, last = more["cut"]
        more = more | {"cut": [*cut, range(last.start, len(case.model.layers))]}
    rows = np.arange(max(len(case.inputs), 2 * more.get("minibatches", 0))) % len(case.inputs)
    return replace(case, inputs=case.inputs[rows], targets=case.targets[rows], options=more)


NO_OPTIONS = {"name", "seed", "dtype", "style", "activation", "bias", "bias_rate"}
REFUSED = [  # what a strategy may refuse: in which cases alone, and in which words
    (
        lambda case: any(norm.training for norm in case.model.modules(nn.BatchNorm)),
        r"needs the statistics of the whole batch|no server has them|has 1 numbers per channel",
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


def certified(cluster, name, kind, options, turn, ranks):
    """Return whether a strategy runs a case; it gives one device's gradient, or says why not."""
    case = case_of(STRATEGIES[name], KINDS[kind], options, ranks, turn)
    try:
        row = equivalence.check(name, case, ranks, cluster=cluster(ranks, "thread"))
    except ValueError as error:
        reasons = [words for applies, words in REFUSED if applies(case)]
        if not any(re.search(words, str(error)) for words in reasons):
            raise
        return False
    assert row["ok"], f"{name}, {kind}, {case.name}, {case.options}: {row['detail']}"
    return True


@pytest.mark.parametrize(
    "kinds, combinations, most",
    [
        pytest.param(list(KINDS), 1, 2, id="some"),
        *[pytest.param([kind], 3, 12, id=kind, marks=pytest.mark.slow) for kind in KINDS],
    ],
)
def test_any_options_of_a_model_meet_any_strategy_that_splits_it(
    cluster, kinds, combinations, most
):
    """Each combination goes to strategies on 2 and 4 ranks until so many have run it."""
    for kind in kinds:
        for options in some(KINDS[kind].combinations(), combinations, kind):
            model = KINDS[kind].case(2, options).model
            able = [
                (name, ranks)
                for name, strategy in STRATEGIES.items()
                for ranks in ((2, 4) if max(strategy.ranks) > 4 else (2,))  # 4: of several axes
                if ranks in strategy.ranks and strategy.models.include(model)
            ]
            Random(f"{commit()} {options}").shuffle(able)
            ran, turn = 0, count()
            while able and ran < most:
                name, ranks = able.pop()
                ran += certified(cluster, name, kind, options, next(turn), ranks)
            assert ran or not trained(KINDS[kind].case(2, options)), f"none runs {kind}, {options}"


def test_what_a_constructor_offers_is_an_option():
    for kind in KINDS.values():
        offered = {
            name
            for module in kind.made_of
            for name, argument in inspect.signature(module).parameters.items()
            if argument.default is not argument.empty
        }
        tried = set(single(kind.combinations()[0]))
        assert offered - NO_OPTIONS <= tried, "give the new option some values to try"
