"""The kinds of data that `minidist train` can learn. A new one is a class, and its line in KINDS.

    text      windows of characters; each predicts the next one       nn.Transformer
    digits    images, and which digit they show                       nn.CNN
    numbers   pairs: a number in words of one language, and another   nn.Seq2Seq, or nn.Dual

A model may have no use for a setting. Then the setting must keep its default (`check_settings`).
"""

import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from minidist import nn
from minidist.autograd import no_grad
from minidist.checkpoint import Saved, manifest
from minidist.checkpoint.run_checkpoints import description_in, settings_in
from minidist.errors import WrongInput
from minidist.nn.datasets import Digits, Numbers, Text, Vocabulary, digit_images, numbers, text
from minidist.nn.datasets.pairs import DIRECTIONS
from minidist.nn.generate import sample
from minidist.training.settings import DEFAULTS, Settings
from minidist.training.translation import of_held_out, of_round_trip

Data = Text | Digits | Numbers
Examples = tuple[np.ndarray, np.ndarray]  # inputs[n, ...] and targets[n, ...]
MODELS: dict[str, Callable[..., nn.Transformer]] = {"gpt2": nn.Transformer, "llama": nn.Llama}
REMEDY = "make one with `minidist train --data numbers --checkpoint FOLDER`"


class Kind:
    """A kind of data: how to get it, its model, its words, and what a trained model does.

    name      of all such data
    data      its type
    unit      what a batch counts, in words
    options   {option: keywords of argparse}, for `read`; an option that is not given is None
    defaults  of settings, where they differ from Settings
    refused   settings that the model has no use for
    """

    name: str
    data: type
    unit: str
    options: ClassVar[dict[str, dict]] = {}
    defaults: ClassVar[dict[str, int]] = {}
    refused: tuple[str, ...] = ()

    def read(self, settings: Settings, before: dict, **options) -> Any:
        """Return the data. before: the description of the data of a run that goes on, or {}."""
        raise NotImplementedError

    def model(self, data: Any, settings: Settings) -> nn.Module:
        """Return the untrained model."""
        raise NotImplementedError

    def examples(self, data: Any, settings: Settings) -> Examples:
        """Return inputs and targets to train on."""
        return data.train

    def description(self, data: Any) -> dict:
        """Return the record of a checkpoint: JSON, with "source", a line of words."""
        return {"source": data.source}

    def target(self, data: Any) -> str:
        """Return in words what one target is."""
        raise NotImplementedError

    def size(self, data: Any) -> str:
        """Return in words how many examples there are to train on, and are kept for the end."""
        return f"{len(data.train[0]):,} to train on, {len(data.held_out[0]):,} held out"

    def remark(self, data: Any, loss: float) -> str:
        """Return a remark on a loss, in lines of words; "" without one."""
        return ""

    def outcome(self, model: Any, data: Any, length: int | None = None, seed: int = 0) -> str:
        """Show a trained model at work; return lines of words."""
        raise NotImplementedError


class Texts(Kind):
    """A character Transformer learns what comes next, and writes."""

    name, data, unit, refused = "texts", Text, "windows", ("reconstruction",)
    options: ClassVar = {
        "text": {
            "metavar": "FILE",
            "help": "a UTF-8 file to learn (default: the help topics of Python)",
        }
    }

    def read(self, settings: Settings, before: dict, **options) -> Text:
        """Return the text, with the characters of an earlier one that the model has learned."""
        return text(options.get("text"), settings.context).including(before.get("characters", ""))

    def model(self, data: Text, settings: Settings) -> nn.Transformer:
        grouped = {"kv_heads": settings.kv_heads} if settings.kv_heads else {}
        if grouped and settings.model != "llama":
            raise WrongInput(
                f"kv_heads={settings.kv_heads} is not for model={settings.model}; use model=llama"
            )
        return MODELS[settings.model](
            data.vocab,
            settings.width,
            settings.heads,
            depth=settings.depth,
            context=settings.context,
            seed=settings.seed,
            dropout=settings.dropout,
            tied=settings.tied,
            experts=settings.experts,
            top_k=max(1, min(2, settings.experts)),
            **grouped,
        )

    def examples(self, data: Text, settings: Settings) -> Examples:
        return data.windows(settings.context)

    def description(self, data: Text) -> dict:
        digest = zlib.crc32(data.tokens.astype("<i8").data)
        return {"source": data.source, "characters": data.characters, "digest": digest}

    def target(self, data: Text) -> str:
        return "character"

    def size(self, data: Text) -> str:
        return f"{len(data.tokens):,} characters, {data.vocab} different"

    def remark(self, data: Text, loss: float) -> str:
        bigram = data.bigram_entropy()
        return (
            f"bigram entropy of the text: {bigram:.3f} nats/character; "
            f"the model's loss is {'below' if loss < bigram else 'not below'} it\n"
        )

    def outcome(
        self, model: nn.Transformer, data: Text, length: int | None = None, seed: int = 0
    ) -> str:
        """Return text from the model, between empty lines; "" if its length is 0."""
        first, length = data.decode(data.tokens[:1]), 300 if length is None else length
        return f"\n{sample(model, data, first, length, seed)}\n\n" if length else ""


class Images(Kind):
    """A residual convolutional network learns which digit an image shows."""

    name, data, unit = "digits", Digits, "images"
    refused = (
        *"model context width heads kv_heads depth dropout tied experts reconstruction".split(),
        *"precision pp cp tp ep zero schedule micro_batches".split(),
    )

    def read(self, settings: Settings, before: dict, **options) -> Digits:
        return digit_images()

    def model(self, data: Digits, settings: Settings) -> nn.CNN:
        return nn.CNN(1, 10, seed=settings.seed)

    def target(self, data: Digits) -> str:
        return "image"

    def outcome(self, model: nn.CNN, data: Digits, length: int | None = None, seed: int = 0) -> str:
        """Return the share of held-out images whose largest logit is at their label."""
        images, labels = data.held_out
        model.eval()
        with no_grad():
            right = (model(images).data.argmax(axis=-1) == labels).mean()
        model.train()
        return f"accuracy on {len(images)} images that are held out: {right:.1%}\n"


class NumbersInWords(Kind):
    """An encoder-decoder learns to translate numbers, or two that learn together."""

    name, data, unit = "numbers", Numbers, "pairs"
    options: ClassVar = {
        "direction": {
            "choices": DIRECTIONS,
            "help": "of numbers: English to Chinese, or back (default: en-zh)",
        },
        "by": {
            "choices": ["words", "characters"],
            "help": "of numbers: what a token is (default: words)",
        },
    }
    defaults: ClassVar = {"steps": 600, "batch": 64}
    refused = ("model", "kv_heads", "context", "tied", "experts", "cp", "ep")

    def read(self, settings: Settings, before: dict, **options) -> Numbers:
        return numbers(**{name: value for name, value in options.items() if value is not None})

    def model(self, data: Numbers, settings: Settings) -> nn.Seq2Seq | nn.Dual:
        if not settings.reconstruction:
            return one_way(data, settings)
        if settings.on_mesh or settings.half:
            raise WrongInput(
                "two translators with reconstruction are trained by ranks that split the batch "
                "alone, in float32; use no other axis than dp, no ZeRO, and precision float32, or "
                "reconstruction=0"
            )
        there, back = one_way(data, settings, "there"), one_way(data.reversed(), settings, "back")
        return nn.Dual(there, back, settings.reconstruction)

    def examples(self, data: Numbers, settings: Settings) -> Examples:
        """Return rows and targets; of two translators, as `nn.Dual.targets` makes them."""
        inputs, targets = data.train
        if settings.reconstruction:
            targets = np.concatenate([targets, data.reversed().train[1]], axis=1)
        return inputs, targets

    def description(self, data: Numbers) -> dict:
        """Return the vocabularies and lengths, for `numbers_of`, and a digest of the examples."""
        return {
            "source": f"numbers, {data.direction} by {data.by}",
            "direction": data.direction,
            "by": data.by,
            "words": [list(vocabulary.words) for vocabulary in (data.source, data.target)],
            "lengths": [data.source_length, data.target_length],
            "digest": zlib.crc32(data.train[0].astype("<i8").data),
        }

    def target(self, data: Numbers) -> str:
        return data.by.removesuffix("s")

    def size(self, data: Numbers) -> str:
        examples = super().size(data)
        return f"{examples}; {len(data.source)} tokens to read, {len(data.target)} to write"

    def outcome(
        self,
        model: nn.Seq2Seq | nn.Dual,
        data: Numbers,
        length: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return how many held-out numbers are right, in both directions if the model is."""
        if isinstance(model, nn.Seq2Seq):
            return translated(model, data, length)
        back, exact = data.reversed(), of_round_trip(model, data)
        trip = f"{data.direction}, then {back.direction}"
        return (
            translated(model.there, data, length)
            + translated(model.back, back, length)
            + f"come back as they were: {share(exact)}, {trip}\n"
        )


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
        source = run["data"].get("source", "another program")
        raise WrongInput(f"{saved.path} is of {source}, and cannot translate; {REMEDY}")
    data = numbers_of(run["data"])
    model = NUMBERS.model(data, Settings(**settings_in(saved, DEFAULTS)))
    model.load_state({name: saved.whole(name) for name in model.named_parameters()})
    return model, data


def translated(model: nn.Seq2Seq, data: Numbers, length: int | None) -> str:
    """Return how many numbers that are held out are exactly right, and the first translations."""
    exact, translations = of_held_out(model, data)
    shown = translations[: 10 if length is None else length]
    lines = [f"exactly right: {share(exact)}, {data.direction}", *(f"  {t}" for t in shown)]
    return "\n".join([*lines, ""])


def share(exact: np.ndarray) -> str:
    return f"{exact.sum():,} of {len(exact):,} held-out numbers ({exact.mean():.2%})"


TEXTS, DIGITS, NUMBERS = Texts(), Images(), NumbersInWords()
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
