"""Numbers in words: an encoder-decoder learns to translate them, or two that learn together."""

import zlib

import numpy as np

from minidist import nn
from minidist.checkpoint import Saved, manifest
from minidist.checkpoint.run_checkpoints import description_in, settings_in
from minidist.datasets import Numbers, Vocabulary, numbers
from minidist.datasets.pairs import DIRECTIONS
from minidist.errors import WrongInput
from minidist.training.kinds.kind import Kind, pairs_in_words
from minidist.training.settings import DEFAULTS, Settings
from minidist.training.translation import of_held_out, of_round_trip

DIRECTION, BY = "en-zh", "words"  # defaults
REMEDY = "make one with `minidist train --data numbers --checkpoint FOLDER`"


def read(
    settings: Settings, before: dict, direction: str | None = None, by: str | None = None
) -> Numbers:
    return numbers(direction=direction or DIRECTION, by=by or BY)


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


def pairs(data: Numbers, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and targets; of two translators, as `nn.Dual.targets` makes them."""
    inputs, targets = data.train
    if settings.reconstruction:
        targets = np.concatenate([targets, data.reversed().train[1]], axis=1)
    return inputs, targets


def description(data: Numbers) -> dict:
    """Return what `numbers_of` reads, and a digest of the examples."""
    return {
        "source": f"numbers, {data.direction} by {data.by}",
        "direction": data.direction,
        "by": data.by,
        "words": [list(vocabulary.words) for vocabulary in (data.source, data.target)],
        "lengths": [data.source_length, data.target_length],
        "digest": zlib.crc32(data.train[0].astype("<i8").data),
    }


def numbers_of(description: dict) -> Numbers:
    """Return Numbers without examples, for a trained model: vocabularies and lengths."""
    S, T = description["lengths"]
    nothing = np.zeros((0, S + T), np.int64), np.zeros((0, T), np.int64)
    languages = description["direction"].split("-")
    source, target = (
        Vocabulary(tuple(words), language == "en" and description["by"] == "words")
        for words, language in zip(description["words"], languages, strict=True)
    )
    return Numbers(source, target, nothing, nothing, description["direction"], description["by"])


def load(folder: str) -> tuple[nn.Seq2Seq | nn.Dual, Numbers]:
    """Return the model of a folder's newest checkpoint, from any mesh, and its Numbers.

    These have no examples. ValueError if there is no checkpoint, or one of something else.
    """
    if not manifest.whole_ones(manifest.place(folder)):
        raise WrongInput(f"{folder} has no checkpoint; {REMEDY}")
    saved = Saved.newest(folder)
    run = description_in(saved) or {"data": {}}
    if "direction" not in run["data"]:
        of = run["data"].get("source", "another program")
        raise WrongInput(f"{saved.path} is of {of}, and cannot translate; {REMEDY}")
    data = numbers_of(run["data"])
    model = translator(data, Settings(**settings_in(saved, DEFAULTS)))
    model.load_state({name: saved.whole(name) for name in model.named_parameters()})
    return model, data


def size(data: Numbers) -> str:
    examples = pairs_in_words(data.train, data.held_out)
    return f"{examples}; {len(data.source)} tokens to read, {len(data.target)} to write"


def outcome(
    model: nn.Seq2Seq | nn.Dual, data: Numbers, length: int | None = None, seed: int = 0
) -> str:
    """Return how many numbers that are held out are right, in both directions if the model is."""
    if isinstance(model, nn.Seq2Seq):
        return translated(model, data, length)
    back, exact = data.reversed(), of_round_trip(model, data)
    trip = f"{data.direction}, then {back.direction}"
    return (
        translated(model.there, data, length)
        + translated(model.back, back, length)
        + f"come back as they were: {share(exact)}, {trip}\n"
    )


def translated(model: nn.Seq2Seq, data: Numbers, length: int | None) -> str:
    """Return how many numbers that are held out are exactly right, and the first translations."""
    exact, translations = of_held_out(model, data)
    shown = translations[: 10 if length is None else length]
    return f"exactly right: {share(exact)}, {data.direction}\n" + "".join(
        f"  {translation}\n" for translation in shown
    )


def share(exact: np.ndarray) -> str:
    return f"{exact.sum():,} of {len(exact):,} held-out numbers ({exact.mean():.2%})"


NUMBERS = Kind(
    name="numbers",
    data=Numbers,
    unit="pairs",
    target=lambda data: data.by.removesuffix("s"),
    read=read,
    model=translator,
    examples=pairs,
    description=description,
    size=size,
    outcome=outcome,
    options={
        "direction": {
            "choices": DIRECTIONS,
            "help": f"of numbers: English to Chinese, or back (default: {DIRECTION})",
        },
        "by": {
            "choices": ["words", "characters"],
            "help": f"of numbers: what a token is (default: {BY})",
        },
    },
    defaults={"steps": 600, "batch": 64},
    refused=("model", "kv_heads", "context", "tied", "experts", "cp", "ep"),
)
