"""Every argument of a module that takes a number takes numbers alone: no text, no bool, no nan."""

import inspect

import numpy as np
import pytest

from minidist import Tensor, datasets, nn
from minidist.errors import is_wrong_input
from minidist.nn.flat_parameters import flat_slices
from minidist.nn.generate import sample, translate
from minidist.nn.module import constant
from minidist.pieces import Positions
from minidist.rng import Randomness
from tests.strategies import arrays, leaf

TRANSLATED = {"width": 4, "heads": 2, "depth": 1}
SEQ2SEQ = {"source_vocab": 5, "target_vocab": 5, "source_length": 3, "target_length": 4}
BLOCK = {"width": 4, "heads": 2, "dropout": 0.1, "seed": 0}
MIXTURE = {"experts": 3, "top_k": 2, "capacity": 1.5, "balance": 0.1}
MIXTURE |= {"expert_width": 5, "shared": 2, "bias_rate": 0.1, "groups": 3, "most_groups": 2}


def translators():
    there = nn.Seq2Seq(**TRANSLATED, **SEQ2SEQ, name="there")
    back = nn.Seq2Seq(**TRANSLATED, **SEQ2SEQ, name="back")
    return {"there": there, "back": back}


MODULES = {  # with numbers, or tuples of numbers, in every argument that takes them
    nn.AveragePool: {"k": 2},
    nn.BatchNorm: {"channels": 3, "eps": 1e-5, "momentum": 0.1},
    nn.BiasBalance: {"experts": 3, "rate": 0.1, "gate": None},
    nn.Block: BLOCK,
    nn.CNN: {"channels": 1, "classes": 3, "widths": (4, 6), "seed": 0},
    nn.CausalSelfAttention: {"width": 4, "heads": 2, "seed": 0},
    nn.Conv2d: {
        "channels_in": 1, "channels_out": 2, "kernel": 3, "stride": 1, "padding": 1, "seed": 0
    },
    nn.DecoderBlock: BLOCK | {"split": 3, "name": "block", "dtype": "float32"},
    nn.Dropout: {"rate": 0.1},
    nn.Dual: {"weight": 1.0},
    nn.Embedding: {"rows": 3, "width": 4, "seed": 0},
    nn.EncoderBlock: BLOCK | {"split": 3, "name": "block", "dtype": "float32"},
    nn.Expert: {"width": 4, "hidden": 6, "seed": 0},
    nn.ExpertBlock: BLOCK | MIXTURE,
    nn.GroupedQueryAttention: {
        "width": 8, "heads": 4, "kv_heads": 2, "theta": 1e4, "seed": 0
    },
    nn.Head: {"width": 4, "vocab": 5, "seed": 0},
    nn.LayerNorm: {"width": 4, "eps": 1e-5},
    nn.Linear: {"inputs": 3, "outputs": 4, "seed": 0},
    nn.Llama: {"vocab": 5, "width": 8, "heads": 4, "kv_heads": 2, "depth": 1, "context": 3}
    | {"seed": 0, "hidden": 12, "theta": 1e4, "eps": 1e-5},
    nn.MLP: {"sizes": (3, 4, 2), "seed": 0},
    nn.MixtureOfExperts: {"width": 4, "seed": 0} | MIXTURE,
    nn.PaddedAttention: {"width": 4, "heads": 2, "seed": 0},
    nn.RMSNorm: {"width": 4, "eps": 1e-5},
    nn.ResidualMLP: {"inputs": 3, "width": 4, "depth": 1, "classes": 2, "seed": 0},
    nn.Seq2Seq: {**TRANSLATED, **SEQ2SEQ, "dropout": 0.1, "seed": 0},
    nn.Siamese: {"sizes": (3, 4), "classes": 2, "seed": 0},
    nn.SourceAndTarget: {
        "vocabs": (5, 6), "width": 4, "lengths": (3, 4), "dropout": 0.1, "name": "x", "seed": 0
    },
    nn.TokenAndPosition: {"vocab": 5, "width": 4, "context": 3, "dropout": 0.1, "seed": 0},
    nn.Transformer: {"vocab": 5, "width": 4, "heads": 2, "depth": 1, "context": 3, "seed": 0}
    | {"dropout": 0.1}
    | MIXTURE,
}  # fmt: skip
OTHERS = {nn.Module, nn.Residual, nn.Sequential}  # they take no number
NO_NUMBERS = {"name", "dtype", "bias", "activation", "tied", "tied_to", "last", "read"} | {
    "there", "back", "layers", "mixture", "more", "options", "style", "learned"
}  # fmt: skip
NO_SIZES = [True, "1", float("nan"), 1.5, -1, 1j, [2]]
NO_RATES = [True, "1", float("nan"), float("inf"), -1.0, 1j, [2]]


def changes(settings):
    """Yield (the same settings with one wrong number, the wrong number)."""
    for name, value in settings.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for i, number in enumerate(numbers):
            wrong = {int: NO_SIZES, float: NO_RATES}.get(type(number), [])
            for other in wrong:
                changed = (*numbers[:i], other, *numbers[i + 1 :])
                yield settings | {name: changed if isinstance(value, tuple) else changed[0]}, other


def test_every_module_is_tried_with_every_argument_that_takes_a_number():
    public = {getattr(nn, name) for name in nn.__all__}
    assert {m for m in public if isinstance(m, type) and issubclass(m, nn.Module)} == (
        OTHERS | set(MODULES)
    )
    for module, settings in MODULES.items():
        takes = set(inspect.signature(module).parameters)
        assert takes - NO_NUMBERS <= set(settings), module
    assert not set(inspect.signature(nn.Sequential).parameters) - NO_NUMBERS


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_is_no_number_is_refused_by_name(module):
    more = translators() if module is nn.Dual else {}
    module(**more, **MODULES[module])
    for settings, wrong in changes(MODULES[module]):
        with pytest.raises(ValueError) as error:
            module(**more, **settings)
        assert is_wrong_input(error.value), settings
        assert str(error.value).endswith(f", not {wrong!r}"), settings


def linear(*sizes, **more):
    return nn.Linear(*sizes, **more, dtype="float64")


def seq2seq(tokens, **more):
    return nn.Seq2Seq(7, 6, 4, 2, 1, 4, 3)(tokens, **more)


def llama(**change):
    return nn.Llama(**{"vocab": 5, "width": 16, "heads": 4, "context": 3} | change)


def drawn(**options):
    text = datasets.text(None, 4)
    options = {"prompt": "a", "length": 3} | options
    return sample(nn.Transformer(text.vocab, 4, 2, 1, 4), text, **options)


def written(sources, beam=1):
    return translate(nn.Seq2Seq(5, 5, 4, 2, 1, 2, 3), sources, beam)


RANDOM = Randomness(0, 0, np.arange(2))
MIXED = [constant("a", (1,), 0, "float32"), constant("b", (1,), 0, "float64")]
HALF = Randomness(0, 0, [0, 1], positions=Positions(((0, 1), (4, 5)), 5))
REFUSED = [
    (lambda: nn.Sequential([linear(2, 2), 3]), r"a layer is an nn.Module, not 3"),
    (lambda: nn.Residual("x"), r"a layer is an nn.Module, not 'x'"),
    (lambda: nn.Sequential([linear(2, 2), linear(2, 2)]), r"parameters are named 'linear\.weight'"),
    (
        lambda: nn.MLP([2, 2]).freeze("bias"),
        r"unknown parameter 'bias'; choose one of layers\.0\.w",
    ),
    (lambda: nn.MLP([2, 2]).astype("int32"), "are floats, such as float32, not int32"),
    (lambda: nn.Linear(2, 3, dtype="U3"), "are floats, such as float32, not U3"),
    (lambda: nn.MLP([2, 2]).to("tpu"), "unknown device 'tpu'; choose one of cpu, gpu"),
    (lambda: nn.MLP([3]), r"needs an input and an output size, got \[3\]"),
    (lambda: nn.Siamese([6]), r"needs an input and an output size, got \[6\]"),
    (
        lambda: nn.Siamese([6, 4])(arrays(3, 3, 6)),
        r"pairs have the shape \[B, 2, \.\.\.\], not \[3,",
    ),
    (lambda: linear(2, 2, activation="tanh"), "unknown activation 'tanh'; choose one of identity"),
    (lambda: nn.Conv2d(2, 3, 3, activation="tanh"), "unknown activation 'tanh'; choose one of"),
    (lambda: nn.AveragePool(4)(leaf(1, 2, 4, 6)), "cut images of 4 x 6 into squares of 4 x 4"),
    (lambda: nn.CNN(1, 10, ()), "a CNN has one block or more"),
    (lambda: nn.BatchNorm(3, dtype="float64")(leaf(1, 3)), "has 1 numbers per channel to train"),
    (lambda: nn.BatchNorm(3)(leaf(2, 4, dtype="float32")), r"takes \[B, 3, ...\], not \[2, 4\]"),
    (lambda: nn.Residual([linear(1, 4)])(arrays(3, 1)), r"adds f\(X\), \[3, 4\], to X, \[3, 1\]"),
    (lambda: nn.CausalSelfAttention(10, 4), "width 10 does not split into 4 heads; use a multiple"),
    (lambda: nn.Transformer(5, 4, 2, 1, 3)(np.zeros((1, 4), int)), "do not fit a context of 3"),
    (lambda: nn.Transformer(5, 4, 2, 1, 3, bias_rat=0.1), "no option 'bias_rat'; .*mean bias_rate"),
    (
        lambda: nn.Dropout(0.2, name="a")(leaf(2, 3)),
        r"a drops out at 0\.2: call model\(x, Randomness",
    ),
    (lambda: nn.Dropout(0.5)(leaf(3, 4), RANDOM), "2 example indices for a batch of 3; give one"),
    (lambda: nn.MixtureOfExperts(4, 4, top_k=5), "cannot choose 5 of 4 experts; use top_k=4"),
    (
        lambda: nn.MixtureOfExperts(4, 4, groups=3),
        "3 groups do not divide 4 experts; use a divisor",
    ),
    (lambda: nn.MixtureOfExperts(4, 4, groups=4), "from 1 of 4 groups, which have 1; use top_k=1"),
    (
        lambda: nn.MixtureOfExperts(3, 4)(leaf(2, 2, 3, dtype="float32"), HALF),
        "of 2 of 5 positions",
    ),
    (lambda: llama(kv_heads=3), "a number of key and value heads that divides them, not 3"),
    (lambda: llama(width=12), "width 12 needs 4 heads of an even width"),
    (lambda: seq2seq(np.zeros((1, 4), int)), r"then at least one .* not \[1, 4\]"),
    (lambda: seq2seq(np.zeros((1, 8), int)), "4 tokens do not fit a context of 3"),
    (lambda: seq2seq(np.array([[7, 0, 0, 0, 1]])), "token 7 is outside a vocabulary of 7"),
    (lambda: seq2seq(np.array([[6, 0, 0, 0, 6]])), "token 6 is outside a vocabulary of 6"),
    (lambda: written([[3, 4, 0]]), r"sources are \[B, 2\], padded with 0; not \[1, 3\]"),
    (lambda: written([[3, 4]], beam=0), "a beam keeps 1 beginning or more, not 0"),
    (lambda: drawn(temperature=-1.0), "temperature is a finite number above 0"),
    (lambda: drawn(temperature=np.nan), "temperature is a finite number above 0"),
    (lambda: drawn(length=2.5), "length is a whole number from 0"),
    (lambda: drawn(prompt=""), "the prompt is empty"),
    (
        lambda: nn.Shard(0, np.array([0, 1]), 4).of(arrays(3, 2)),
        r"a part of 4 along axis 0, .* \[3, ",
    ),
    (lambda: nn.FlatParameters(MIXED), "one flat vector holds one dtype, not float32 and float64"),
    (lambda: flat_slices(linear(2, 2).parameters()), "is in no flat vector; call flatten"),
]


def test_what_no_model_can_be_or_do_is_refused_in_words_that_name_it():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert is_wrong_input(error.value)


@pytest.mark.parametrize("capacity", [1e300, 1e19, 4.0])
def test_a_capacity_beyond_all_choices_drops_none(capacity):
    x = Tensor(arrays(2, 5, 4))
    found = []
    for most in (capacity, None):
        layer = nn.MixtureOfExperts(4, 3, capacity=most, dtype="float64")
        found.append(layer(x).data)
        assert not layer.report.dropped.any()
    np.testing.assert_array_equal(*found)
