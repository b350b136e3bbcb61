"""Real input, and how it is shuffled and dealt to ranks and micro-batches.

    the text    the help text inside every CPython, or a file: windows of T characters, each
                predicts the next one
    the digits  1797 grey images of 8 x 8 pixels (data/digits.txt: source, citation, licence)
    numbers     in words, English and Chinese (number_words.py): pairs for a translator

A batch is a set of global example indices. Every rank shuffles and deals them in the same way, and
keeps its own share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import IGNORED
from minidist.backend import Array
from minidist.number_words import (
    CHINESE,
    ENGLISH,
    LIMIT,
    english_text,
    english_words,
    in_chinese,
    in_english,
)
from minidist.rng import generator
from minidist.tokens import BEGIN, END, PAD


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


@dataclass(frozen=True)
class Vocabulary:
    """Words as integers: a token is an index into `words`, the first of which are PAD, BEGIN, END.

    spaced  a text is cut at spaces and around hyphens: "twenty-one" has three words; otherwise
            each character is a word
    """

    words: tuple[str, ...]
    spaced: bool = False

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The token of each word that a text can have."""
        return {word: token for token, word in enumerate(self.words) if token > END}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text; ValueError that names a word which has none."""
        words = english_words(text) if self.spaced else list(text)
        if unknown := [word for word in words if word not in self.tokens]:
            what = "word" if self.spaced else "character"
            raise ValueError(
                f"the {what} {unknown[0]!r} of {text!r} is none of the {len(self.tokens)} that "
                f"numbers are written with: {(' ' * self.spaced).join(self.tokens)}"
            )
        return np.array([self.tokens[word] for word in words], np.int64)

    def decode(self, tokens) -> str:
        """Return the text of the tokens before the first END, without PAD and BEGIN."""
        tokens = np.asarray(tokens).tolist()
        tokens = tokens[: tokens.index(END)] if END in tokens else tokens
        if wrong := [t for t in tokens if not 0 <= t < len(self)]:
            raise ValueError(f"{wrong[0]} is no token of {len(self)}; use 0 to {len(self) - 1}")
        words = [self.words[t] for t in tokens if t > END]
        return english_text(words) if self.spaced else "".join(words)


@dataclass(frozen=True)
class Numbers:
    """Numbers in words, in a source and a target language, to train on and held out.

    train, held_out  inputs[n, S + T] and targets[n, T], as in `teacher_forcing`
    """

    source: Vocabulary
    target: Vocabulary
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]

    @property
    def source_length(self) -> int:
        """S: the words of the longest number."""
        return self.train[0].shape[1] - self.target_length

    @property
    def target_length(self) -> int:
        """T: the words of the longest number, and BEGIN or END."""
        return self.train[1].shape[1]

    def encode(self, text: str) -> np.ndarray:
        """Return sources[1, S]; ValueError if a word is unknown, or there are more than S."""
        tokens = self.source.encode(text)
        if len(tokens) > self.source_length:
            raise ValueError(
                f"{text!r} has {len(tokens)} tokens, and the longest number {self.source_length}; "
                f"write a number below {LIMIT}"
            )
        return padded([tokens], self.source_length)

    def decode(self, tokens) -> str:
        """Return the text of tokens[T] in the target language, up to the first END."""
        return self.target.decode(tokens)

    def reversed(self) -> "Numbers":
        """Return the same numbers in the other direction: what was the target is the source."""
        s = self.source_length
        parts = ((inputs[:, s + 1 :], inputs[:, :s]) for inputs, _ in (self.train, self.held_out))
        return Numbers(self.target, self.source, *(teacher_forcing(*part) for part in parts))


def teacher_forcing(sources: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs[n, S + T] and targets[n, T] of sources[n, S] and words[n, T - 1], both padded.

        inputs   source, PAD | BEGIN, words, PAD
        targets                words, END, IGNORED

    So a column of the target's part is to predict the word in the next column.
    """
    ends = (words != PAD).sum(axis=1)
    targets = np.pad(words, ((0, 0), (0, 1)), constant_values=PAD)
    targets[targets == PAD] = IGNORED
    targets[np.arange(len(words)), ends] = END
    begin = np.full((len(words), 1), BEGIN)
    return np.concatenate([sources, begin, words], axis=1), targets


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Return tokens[n, length] of n rows that are no longer; PAD fills what they leave."""
    tokens = np.full((len(rows), length), PAD)
    for row, into in zip(rows, tokens, strict=True):
        into[: len(row)] = row
    return tokens


LANGUAGES = {"en": (in_english, ENGLISH), "zh": (in_chinese, CHINESE)}
DIRECTIONS = ("en-zh", "zh-en")
LONGEST = 77_777_777  # no number has more words or more characters, in either language


def vocabulary(language: str, by: str = "words") -> Vocabulary:
    """Return the words or the characters that numbers in "en" or "zh" can have.

    The rules of the language give them, not a sample. In Chinese a word is a character.
    """
    _, words = LANGUAGES[language]
    spaced = language == "en" and by == "words"
    words = words if spaced else dict.fromkeys("".join(words) + " " * (language == "en"))
    return Vocabulary(("<pad>", "<begin>", "<end>", *words), spaced)


def numbers(
    direction: str = "en-zh",
    by: str = "words",
    examples: int = 20_000,
    held_out: int = 2_000,
    seed: int = 0,
) -> Numbers:
    """Return numbers below 10**8 in words: `examples` to train on, and others that are held out.

    direction  "en-zh": English to Chinese; "zh-en": Chinese to English; the same numbers
    by         a token is one of the "words" or the "characters"; in Chinese there is no difference
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"the direction {direction!r} is not known; use one of {DIRECTIONS}")
    if by not in ("words", "characters"):
        raise ValueError(f"by={by!r} is not known; use 'words' or 'characters'")
    sides = []
    drawn = draw_numbers(examples, held_out, seed)
    for language in direction.split("-"):
        write, words = LANGUAGES[language][0], vocabulary(language, by)
        length = len(words.encode(write(LONGEST)))
        parts = [padded([words.encode(write(n)) for n in part], length) for part in drawn]
        sides.append((words, *parts))
    vocabularies, *parts = zip(*sides, strict=True)
    return Numbers(*vocabularies, *(teacher_forcing(*part) for part in parts))


def draw_numbers(examples: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Return numbers to train on, and numbers that are held out; no number comes twice.

    Each number of digits, 1 to 8, comes as often as the others. Where there are too few numbers,
    all are taken, and the longer ones make up for them; at most a tenth of each is held out.
    """
    digits = range(1, len(str(LIMIT)))
    first = [10 ** (d - 1) if d > 1 else 0 for d in digits]
    there = [10**d - low for d, low in zip(digits, first, strict=True)]
    if not 1 <= held_out <= LIMIT // 10:
        raise ValueError(
            f"cannot hold out {held_out} of {LIMIT} numbers; use 1 to a tenth of them, "
            f"{LIMIT // 10}"
        )
    if not 1 <= examples <= LIMIT - held_out:
        raise ValueError(
            f"cannot train on {examples} of {LIMIT} numbers, of which {held_out} are held out; "
            f"use 1 to {LIMIT - held_out}"
        )
    kept = spread(held_out, [n // 10 for n in there])
    trained = spread(examples, [n - k for n, k in zip(there, kept, strict=True)])
    random = generator(seed, "numbers")
    parts = ([], [])
    for low, n, k, t in zip(first, there, kept, trained, strict=True):
        chosen = low + random.choice(n, k + t, replace=False)
        parts[0].append(chosen[k:])
        parts[1].append(chosen[:k])
    return tuple(random.permutation(np.concatenate(part)).tolist() for part in parts)


def spread(total: int, room: list[int]) -> list[int]:
    """Return how many of `total` go to each place: equally many; the rest of a full one goes on.

    The room grows from place to place.
    """
    given = []
    for most in room:
        given.append(min(most, (total - sum(given)) // (len(room) - len(given))))
    return given


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
