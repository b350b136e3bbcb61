"""Text: a character Transformer learns what comes next, and writes."""

import zlib
from collections.abc import Callable

from minidist import nn
from minidist.datasets import Text
from minidist.datasets import text as text_of
from minidist.nn.generate import sample
from minidist.training.kinds.kind import Kind
from minidist.training.settings import Settings

MODELS: dict[str, Callable[..., nn.Transformer]] = {"gpt2": nn.Transformer, "llama": nn.Llama}


def read(settings: Settings, before: dict, text: str | None = None) -> Text:
    """Return the text, with the characters of an earlier one that the model has learned from."""
    return text_of(text, settings.context).including(before.get("characters", ""))


def language_model(data: Text, settings: Settings) -> nn.Transformer:
    grouped = {"kv_heads": settings.kv_heads} if settings.kv_heads else {}
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


def description(data: Text) -> dict:
    return {
        "source": data.source,
        "characters": data.characters,
        "digest": zlib.crc32(data.tokens.astype("<i8").data),
    }


def outcome(model: nn.Transformer, data: Text, length: int | None = None, seed: int = 0) -> str:
    """Return text from the model, between empty lines; "" if its length is 0."""
    first, length = data.decode(data.tokens[:1]), 300 if length is None else length
    return f"\n{sample(model, data, first, length, seed)}\n\n" if length else ""


def remark(data: Text, loss: float) -> str:
    bigram = data.bigram_entropy()
    return (
        f"bigram entropy of the text: {bigram:.3f} nats/character; "
        f"the model's loss is {'below' if loss < bigram else 'not below'} it\n"
    )


TEXTS = Kind(
    name="texts",
    data=Text,
    unit="windows",
    target=lambda data: "character",
    read=read,
    model=language_model,
    examples=lambda data, settings: data.windows(settings.context),
    description=description,
    size=lambda data: f"{len(data.tokens):,} characters, {data.vocab} different",
    outcome=outcome,
    remark=remark,
    options={
        "text": {
            "metavar": "FILE",
            "help": "a UTF-8 file to learn (default: the help topics of Python)",
        }
    },
    refused=("reconstruction",),
)
