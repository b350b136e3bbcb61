"""Every argument of a module that takes a number takes numbers alone: no text, no bool, no nan."""

import inspect

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.errors import is_wrong_input
from tests.strategies import arrays

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


@pytest.mark.parametrize("number", [np.float32(1.25), np.float64(1.25), np.int64(1), 1])
def test_numbers_of_numpy_are_numbers(number):
    nn.MixtureOfExperts(np.int64(4), np.int32(3), capacity=number, balance=number)
    nn.BatchNorm(np.uint8(3), eps=number)


@pytest.mark.parametrize("capacity", [1e300, 1e19, 4.0])
def test_a_capacity_beyond_all_choices_drops_none(capacity):
    x = Tensor(arrays(2, 5, 4))
    found = []
    for most in (capacity, None):
        layer = nn.MixtureOfExperts(4, 3, capacity=most, dtype="float64")
        found.append(layer(x).data)
        assert not layer.report.dropped.any()
    np.testing.assert_array_equal(*found)
