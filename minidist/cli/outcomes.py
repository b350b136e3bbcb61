"""What `minidist train` prints of its data and of the model that it trained, for each kind."""

import numpy as np

from minidist import nn
from minidist.datasets import Digits, Numbers, Text
from minidist.kinds import Data
from minidist.sampling import sample
from minidist.train import accuracy
from minidist.translating import of_held_out, of_round_trip


def sizes(data: Data) -> str:
    """Return how much there is to learn."""
    if isinstance(data, Text):
        return f"{len(data.tokens):,} characters, {data.vocab} different"
    words = f"{len(data.train[0]):,} to train on, {len(data.held_out[0]):,} held out"
    if isinstance(data, Numbers):
        words += f"; {len(data.source)} tokens to read, {len(data.target)} to write"
    return words


def target(data: Data) -> str:
    """Return what one target is: a word, a character, an image."""
    if isinstance(data, Numbers):
        return data.by.removesuffix("s")
    return "character" if isinstance(data, Text) else "image"


def outcome(model: nn.Sequential, data: Data, length: int | None = None, seed: int = 0) -> str:
    """Return what a trained model does: a text, an accuracy, translations.

    length  characters of a text, by default 300, or translations, by default 10
    """
    return OUTCOMES[type(data)](model, data, length, seed)


def drawn(model: nn.Transformer, data: Text, length: int | None, seed: int) -> str:
    """Return text from the model, between empty lines; "" if its length is 0."""
    first, length = data.decode(data.tokens[:1]), 300 if length is None else length
    return f"\n{sample(model, data, first, length, seed)}\n\n" if length else ""


def named(model: nn.CNN, data: Digits, length: int | None, seed: int) -> str:
    held_out = accuracy(model, *data.held_out)
    return f"accuracy on {len(data.held_out[0])} images that are held out: {held_out:.1%}\n"


def translated(model: nn.Seq2Seq | nn.Dual, data: Numbers, length: int | None, seed: int) -> str:
    """Return how many numbers that are held out are right, in both directions if the model is."""
    if isinstance(model, nn.Seq2Seq):
        return one_way(model, data, length)
    back, exact = data.reversed(), of_round_trip(model, data)
    trip = f"{data.direction}, then {back.direction}"
    return (
        one_way(model.there, data, length)
        + one_way(model.back, back, length)
        + f"come back as they were: {share(exact)}, {trip}\n"
    )


def one_way(model: nn.Seq2Seq, data: Numbers, length: int | None) -> str:
    """Return how many numbers that are held out are exactly right, and the first translations."""
    exact, translations = of_held_out(model, data)
    shown = translations[: 10 if length is None else length]
    return f"exactly right: {share(exact)}, {data.direction}\n" + "".join(
        f"  {translation}\n" for translation in shown
    )


def share(exact: np.ndarray) -> str:
    return f"{exact.sum():,} of {len(exact):,} held-out numbers ({exact.mean():.2%})"


OUTCOMES = {Text: drawn, Digits: named, Numbers: translated}
