"""The kinds of data that `minidist train` can learn: the model of each, and its words.

    text      windows of characters; each predicts the next one       nn.Transformer
    digits    images, and which digit they show                       nn.CNN
    numbers   pairs: a number in words of one language, and another   nn.Seq2Seq, or nn.Dual

A model may have no use for a setting. Then the setting must keep its default (`check`).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from minidist import nn
from minidist.datasets import Digits, Numbers, Text, Vocabulary
from minidist.settings import Settings

Data = Text | Digits | Numbers


@dataclass(frozen=True)
class Kind:
    """A kind of data.

    unit      what a batch counts, in words
    model     data, settings -> the untrained model
    examples  data, settings -> inputs[n, ...] and targets[n, ...] to train on
    told      data -> what a checkpoint records of it: JSON, with "source", a line of words
    defaults  of settings, where they differ from Settings
    refused   settings that the model has no use for
    """

    name: str
    unit: str
    model: Callable
    examples: Callable
    told: Callable
    defaults: dict = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def check(self, settings: Settings) -> None:
        """Raise ValueError if a setting was changed that the model has no use for."""
        for each in fields(settings):
            if each.name in self.refused and getattr(settings, each.name) != each.default:
                of = next(kind.name for kind in KINDS.values() if each.name not in kind.refused)
                raise ValueError(
                    f"{each.name} is a setting of {of}, not of {self.name}; leave it out"
                )


def language_model(data: Text, settings: Settings) -> nn.Transformer:
    return nn.Transformer(
        data.vocab,
        settings.width,
        settings.heads,
        settings.depth,
        settings.context,
        settings.seed,
        dropout=settings.dropout,
        tied=settings.tied,
        experts=settings.experts,
        top_k=max(1, min(2, settings.experts)),
    )


def classifier(data: Digits, settings: Settings) -> nn.CNN:
    return nn.CNN(1, 10, seed=settings.seed)


def translator(data: Numbers, settings: Settings) -> nn.Seq2Seq | nn.Dual:
    if not settings.reconstruction:
        return one_way(data, settings)
    there, back = one_way(data, settings, "there"), one_way(data.reversed(), settings, "back")
    return nn.Dual(there, back, settings.reconstruction)


def one_way(data: Numbers, settings: Settings, name: str = "") -> nn.Seq2Seq:
    return nn.Seq2Seq(
        len(data.source),
        len(data.target),
        settings.width,
        settings.heads,
        settings.depth,
        data.source_length,
        data.target_length,
        settings.seed,
        dropout=settings.dropout,
        name=name,
    )


def windows_of(data: Text, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    return data.windows(settings.context)


def all_of(data: Digits, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    return data.train


def pairs_of(data: Numbers, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and targets; of two translators, as `nn.Dual.targets` makes them."""
    inputs, targets = data.train
    if settings.reconstruction:
        targets = np.concatenate([targets, data.reversed().train[1]], axis=1)
    return inputs, targets


def told_of_text(text: Text) -> dict:
    return {
        "source": text.source,
        "characters": text.characters,
        "digest": zlib.crc32(text.tokens.astype("<i8")),
    }


def told_of_digits(digits: Digits) -> dict:
    return {"source": digits.source}


def told_of_numbers(data: Numbers) -> dict:
    """Return what `numbers_of` reads, and a digest of the examples."""
    return {
        "source": f"numbers, {data.direction} by {data.by}",
        "direction": data.direction,
        "by": data.by,
        "words": [list(vocabulary.words) for vocabulary in (data.source, data.target)],
        "lengths": [data.source_length, data.target_length],
        "digest": zlib.crc32(data.train[0].astype("<i8")),
    }


def numbers_of(told: dict) -> Numbers:
    """Return Numbers without examples, for a trained model: vocabularies and lengths."""
    S, T = told["lengths"]
    nothing = np.zeros((0, S + T), np.int64), np.zeros((0, T), np.int64)
    source, target = (
        Vocabulary(tuple(words), language == "en" and told["by"] == "words")
        for words, language in zip(told["words"], told["direction"].split("-"), strict=True)
    )
    return Numbers(source, target, nothing, nothing, told["direction"], told["by"])


TEXTS = Kind(
    "texts", "windows", language_model, windows_of, told_of_text, refused=("reconstruction",)
)
DIGITS = Kind(
    "digits",
    "images",
    classifier,
    all_of,
    told_of_digits,
    refused=(
        *"context width heads depth dropout tied reconstruction experts precision".split(),
        *"pp cp tp ep zero schedule micro_batches".split(),
    ),
)
NUMBERS = Kind(
    "numbers",
    "pairs",
    translator,
    pairs_of,
    told_of_numbers,
    defaults={"steps": 600, "batch": 64},
    refused=("context", "tied", "experts", "cp", "ep"),
)
KINDS = {"text": TEXTS, "digits": DIGITS, "numbers": NUMBERS}  # by the names of --data


def kind_of(data: Data) -> Kind:
    return {Text: TEXTS, Digits: DIGITS, Numbers: NUMBERS}[type(data)]


def model_of(data: Data, settings: Settings) -> nn.Sequential:
    """Return the untrained model; ValueError if it has no use for a setting that was changed."""
    kind = kind_of(data)
    kind.check(settings)
    return kind.model(data, settings)
