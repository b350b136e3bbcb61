"""The kinds of data that `minidist train` can learn. A new one is one file, and its line here.

    text      windows of characters; each predicts the next one       nn.Transformer
    digits    images, and which digit they show                       nn.CNN
    numbers   pairs: a number in words of one language, and another   nn.Seq2Seq, or nn.Dual

A model may have no use for a setting. Then the setting must keep its default (`check_settings`).
"""

from dataclasses import fields

from minidist import nn
from minidist.datasets import Digits, Numbers, Text
from minidist.errors import WrongInput
from minidist.training.kinds.digits import DIGITS
from minidist.training.kinds.kind import Kind
from minidist.training.kinds.numbers import NUMBERS
from minidist.training.kinds.text import TEXTS
from minidist.training.settings import Settings

__all__ = ["DIGITS", "KINDS", "NUMBERS", "TEXTS", "Data", "Kind", "kind_of", "model_of"]

Data = Text | Digits | Numbers
KINDS: dict[str, Kind] = {"text": TEXTS, "digits": DIGITS, "numbers": NUMBERS}  # values of --data


def kind_of(data: Data) -> Kind:
    return next(kind for kind in KINDS.values() if isinstance(data, kind.data))


def model_of(data: Data, settings: Settings) -> nn.Module:
    """Return the untrained model; ValueError if it has no use for a setting that was changed."""
    kind = kind_of(data)
    check_settings(kind, settings)
    return kind.model(data, settings)


def check_settings(kind: Kind, settings: Settings) -> None:
    """Raise ValueError if a setting was changed that the kind's model has no use for."""
    for each in fields(settings):
        if each.name in kind.refused and getattr(settings, each.name) != each.default:
            of = next(other.name for other in KINDS.values() if each.name not in other.refused)
            raise WrongInput(f"{each.name} is a setting of {of}, not of {kind.name}; leave it out")
