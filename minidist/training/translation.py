"""Translate numbers with a trained model, and compare with the rules of both languages."""

from dataclasses import dataclass

import numpy as np

from minidist import nn
from minidist.autograd.losses import IGNORED
from minidist.errors import WrongInput
from minidist.nn import generate as decoding
from minidist.nn.datasets import Numbers
from minidist.nn.datasets.pairs import LANGUAGES, LIMIT, number_of_chinese, number_of_english
from minidist.nn.embedding import END, PAD

READ = {"en": number_of_english, "zh": number_of_chinese}
MOST_DIGITS = len(str(LIMIT)) - 1
AT_ONCE = 500  # sources that are translated together


@dataclass(frozen=True)
class Translation:
    """A source, what the model wrote, and the right target; None where no rule gives one."""

    source: str
    written: str
    right: str | None

    def __str__(self) -> str:
        wrong = f"  (wrong: it is {self.right})" if self.right not in (None, self.written) else ""
        return f"{self.source} -> {self.written or '(nothing)'}{wrong}"


def of_held_out(model: nn.Seq2Seq, data: Numbers) -> tuple[np.ndarray, list[Translation]]:
    """Translate the held-out numbers greedily; return exact[n] and the n translations.

    exact  whether every word is right, and END comes after the last
    """
    inputs, targets = data.held_out
    sources = inputs[:, : data.source_length]
    written = in_parts(model, sources)
    exact = same(written, targets)
    texts = zip(
        map(data.source.decode, sources),
        map(data.decode, written),
        map(data.decode, targets),
        strict=True,
    )
    return exact, [Translation(*text) for text in texts]


def of_round_trip(model: nn.Dual, data: Numbers) -> np.ndarray:
    """Return which held-out sources come back, [n], if `back` reads what `there` wrote; greedily.

    Without an END among its T words, what `there` wrote is cut to the T - 1 that `back` can read.
    """
    sources = data.held_out[0][:, : data.source_length]
    written = in_parts(model.there, sources)[:, :-1]
    again = in_parts(model.back, np.where(written == END, PAD, written))
    return same(again, data.reversed().held_out[1])


def in_parts(model: nn.Seq2Seq, sources: np.ndarray) -> np.ndarray:
    """Translate sources[n, S] greedily; return tokens [n, T]."""
    parts = np.array_split(sources, -(-len(sources) // AT_ONCE))
    return np.concatenate([decoding.translate(model, part) for part in parts])


def same(written: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return which of written[n, T] have every word of their target and its END, [n]."""
    return (written == np.where(targets == IGNORED, PAD, targets)).all(axis=1)


def half_for(model: nn.Dual, data: Numbers, text: str) -> tuple[nn.Seq2Seq, Numbers]:
    """Return the translator that knows more words of a text, and its Numbers; `there` in a tie."""
    halves = [(model.there, data), (model.back, data.reversed())]
    return max(halves, key=lambda half: half[1].source.known(text))


def translate(model: nn.Seq2Seq | nn.Dual, data: Numbers, text: str, beam: int = 1) -> Translation:
    """Translate one text; digits are first written in words, those that `data` has as sources.

    Of two translators, the one that knows more of its words.

    ValueError if it is empty, has an unknown word, or is longer than any number.
    """
    text = " ".join(text.split())
    if isinstance(model, nn.Dual):
        model, data = half_for(model, data, text)
    reads, writes = data.direction.split("-")
    if not text:
        raise WrongInput("there is nothing to translate in an empty text; write a number")
    if text.isascii() and text.isdigit():
        digits = text.lstrip("0") or "0"
        if len(digits) > MOST_DIGITS:  # int() reads 4300 digits at most
            raise WrongInput(
                f"a number of {len(digits)} digits has no words here; use {MOST_DIGITS} or fewer"
            )
        text = LANGUAGES[reads][0](int(digits))
    sources = data.encode(text)
    (written,) = decoding.translate(model, sources, beam)
    try:
        right = LANGUAGES[writes][0](READ[reads](text))
    except ValueError:  # the words are known, but they make no number
        right = None
    return Translation(text, data.decode(written), right)
