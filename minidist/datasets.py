"""Real input, and how it is shuffled and dealt to ranks and micro-batches.

    the text    the help text inside every CPython, or a file: windows of T characters, each
                predicts the next one
    the digits  1797 grey images of 8 x 8 pixels (data/digits.txt: source, citation, licence)

A batch is a set of global example indices. Every rank shuffles and deals them in the same way, and
keeps its own share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.rng import generator


@dataclass(frozen=True)
class Text:
    """Characters as integers: tokens[n], each an index into `characters`, which are sorted."""

    tokens: np.ndarray
    characters: str
    source: str

    @property
    def vocab(self) -> int:
        return len(self.characters)

    def encode(self, string: str) -> np.ndarray:
        if unknown := sorted(set(string) - set(self.characters)):
            raise ValueError(f"the character {unknown[0]!r} does not occur in {self.source}")
        return np.array([self.characters.index(c) for c in string], np.int64)

    def including(self, characters: str) -> "Text":
        """Return the same text, whose vocabulary has these characters, too."""
        union = "".join(sorted({*self.characters, *characters}))
        places = np.array([union.index(c) for c in self.characters])
        return Text(places[self.tokens], union, self.source)

    def decode(self, tokens) -> str:
        return "".join(self.characters[t] for t in tokens)

    def windows(self, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut the text into inputs[n, T] and targets[n, T], one character later; drop the rest."""
        n = (len(self.tokens) - 1) // context
        cut = self.tokens[: n * context + 1]
        return cut[:-1].reshape(n, context), cut[1:].reshape(n, context)

    def bigram_entropy(self) -> float:
        """Return the entropy of a character given the one before, in nats, by this text's counts.

        No model that sees one character at a time can have a lower loss on this text.
        """
        pairs = np.zeros((self.vocab, self.vocab))
        np.add.at(pairs, (self.tokens[:-1], self.tokens[1:]), 1)
        firsts = pairs.sum(axis=1, keepdims=True)
        seen = pairs > 0
        return float(
            -(pairs[seen] * np.log((pairs / np.maximum(firsts, 1))[seen])).sum() / pairs.sum()
        )


def text(path: str | Path | None = None, context: int = 1) -> Text:
    """Return the text of a UTF-8 file, or by default the help topics inside CPython.

    context  characters of one window; ValueError if the text has fewer than context + 1 characters
    """
    if path is None:
        from pydoc_data.topics import topics

        string, source = (
            "\n".join(topics[name] for name in sorted(topics)),
            "the help topics of Python",
        )
    else:
        source = str(path)
        try:
            string = Path(path).read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"cannot read the text {source!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from error
        if "\0" in string:
            raise ValueError(
                f"{source} is not text: it holds a zero byte at character {string.index(chr(0))}"
            )
        string = string.removeprefix("\ufeff").replace("\r\n", "\n")
    if len(string) <= context:
        raise ValueError(
            f"{source} has {len(string)} characters; "
            f"a context of {context} needs {context + 1} or more"
        )
    codes, tokens = np.unique(np.array([string]).view(np.uint32), return_inverse=True)
    return Text(tokens.reshape(-1).astype(np.int64), "".join(map(chr, codes)), source)


def digits(dtype="float32") -> tuple[np.ndarray, np.ndarray]:
    """Return images[1797, 64] with values from 0 to 1, and labels[1797] from 0 to 9."""
    with resources.files("minidist").joinpath("data/digits.npz").open("rb") as file:
        stored = np.load(file)
        images, labels = stored["images"], stored["labels"]
    return (images.reshape(-1, 64) / 16).astype(dtype), labels.astype(np.int64)


@dataclass(frozen=True)
class Digits:
    """The digits as images[n, 1, 8, 8] and labels[n]: 1500 to train on, 297 held out.

    The same ones are held out in every run.
    """

    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    source: str = "handwritten digits"


def digit_images(dtype="float32") -> Digits:
    """Return the digits, cut into images to train on and images that are held out."""
    images, labels = digits(dtype)
    images, order = images.reshape(-1, 1, 8, 8), generator(0, "held out").permutation(len(images))
    parts = (order[:1500], order[1500:])
    return Digits(*((images[part], labels[part]) for part in parts))


def example_indices(inputs: Tensor | Array, targets: Array, examples=None) -> np.ndarray:
    """Return the examples' indices, by default 0, 1, ...; all three have a row per example."""
    for array, what in ((inputs, "inputs"), (targets, "targets")):
        if not getattr(array, "shape", ()):
            kind = type(array).__name__
            raise ValueError(f"{what} are an array with a row per example, not {kind}")
    if len(inputs) != len(targets):
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets: they must agree")
    examples = np.arange(len(inputs)) if examples is None else np.asarray(examples)
    if examples.shape != (len(inputs),):
        raise ValueError(
            f"{len(inputs)} inputs and indices of examples of shape {list(examples.shape)}: "
            "give one number per input"
        )
    return examples


def shard(examples: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return this rank's part, neighbours; sizes differ by at most one, larger first, maybe 0."""
    return np.array_split(examples, size)[rank]


@dataclass(frozen=True)
class Share:
    """One rank's part of one batch.

    micro_batches  global example indices, one array each, perhaps empty
    total          number of examples in the whole batch, over all ranks and micro-batches
    """

    micro_batches: list[np.ndarray]
    total: int

    @property
    def examples(self) -> np.ndarray:
        return np.concatenate(self.micro_batches)


@dataclass(frozen=True)
class Sampler:
    """Deal `examples` indices in batches of `batch`; an epoch's last batch has what is left.

    Each epoch is a permutation drawn from (seed, epoch), so over all ranks and micro-batches every
    example comes exactly once per epoch, whatever `size` and `micro_batches` are.

    shuffle  False: every epoch has the order 0, 1, ...
    """

    examples: int
    batch: int
    seed: int = 0
    rank: int = 0
    size: int = 1
    micro_batches: int = 1
    shuffle: bool = True

    def __post_init__(self):
        if min(self.examples, self.batch, self.size, self.micro_batches) < 1:
            raise ValueError(f"{self}: examples, batch, size and micro_batches must be 1 or more")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} is no rank of {self.size}; use 0 to {self.size - 1}"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.examples // self.batch)

    def epoch(self, number: int) -> Iterator[Share]:
        """Yield this rank's share of each batch of one epoch."""
        order = np.arange(self.examples)
        if self.shuffle:
            order = generator(self.seed, f"epoch {number}").permutation(order)
        for start in range(0, self.examples, self.batch):
            batch = order[start : start + self.batch]
            mine = shard(batch, self.rank, self.size)
            yield Share(
                [shard(mine, m, self.micro_batches) for m in range(self.micro_batches)], len(batch)
            )

    def __iter__(self) -> Iterator[Share]:
        """Yield shares without end, epoch after epoch."""
        return self.after(0)

    def after(self, batches: int) -> Iterator[Share]:
        """Yield what follows the first so many batches; epochs that are over are not drawn."""
        if batches < 0:
            raise ValueError(f"cannot go on after {batches} batches; use 0 or more")
        number, begun = divmod(batches, len(self))
        return islice(chain.from_iterable(map(self.epoch, count(number))), begun, None)
