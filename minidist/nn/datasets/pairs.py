"""Whole numbers below 10**8 in words, English and Chinese: pairs for a translator.

    321        three hundred twenty-one                    三百二十一
    100,005    one hundred thousand five                   十万零五

English as in the United States, without "and"; Chinese with 二 throughout, never 两. Each language
is one rule: the largest unit that fits, how many of it, then the rest. English counts thousands,
Chinese counts 万 = 10**4, so a number cannot be translated word by word. Reading is one loop for
both: a unit multiplies what has been read since the last larger unit. The loop accepts wrong texts,
too. So a text is refused unless writing its number gives the same text.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from minidist.autograd.losses import IGNORED
from minidist.errors import WrongInput, check_name
from minidist.nn.embedding import BEGIN, END, PAD
from minidist.rng import generator

LIMIT = 10**8

SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
HUNDREDS = {"million": 10**6, "thousand": 1000, "hundred": 100}

DIGITS = "零一二三四五六七八九"
UNITS = {"万": 10**4, "千": 1000, "百": 100, "十": 10}

ENGLISH = (*SMALL, *TENS, *HUNDREDS, "-")  # every word that a number can have
CHINESE = (*DIGITS, *UNITS)


def in_english(n: int) -> str:
    """Return a number in words: 21 -> "twenty-one"; ValueError unless 0 <= n < 10**8."""
    check(n)
    if n < 20:
        return SMALL[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")
    name, unit = next((name, unit) for name, unit in HUNDREDS.items() if unit <= n)
    count, rest = divmod(n, unit)
    return f"{in_english(count)} {name}" + (f" {in_english(rest)}" if rest else "")


def in_chinese(n: int) -> str:
    """Return a number in characters: 105 -> 一百零五; ValueError unless 0 <= n < 10**8.

    At the very front, and only there, 一十 is 十: 十二, but 一百一十二.
    """
    check(n)
    text = spelled(n)
    return text[1:] if text.startswith("一十") else text


def spelled(n: int) -> str:
    """Return a number in characters; 零 is written where it skips one or more units."""
    if n < 10:
        return DIGITS[n]
    name, unit = next((name, unit) for name, unit in UNITS.items() if unit <= n)
    count, rest = divmod(n, unit)
    skipped = "零" if rest < unit // 10 else ""
    return f"{spelled(count)}{name}" + (f"{skipped}{spelled(rest)}" if rest else "")


def check(n: int) -> None:
    if not 0 <= n < LIMIT:
        raise WrongInput(f"{n} has no words here; use a whole number from 0 to {LIMIT - 1}")


def english_words(text: str) -> list[str]:
    """Cut a text at its spaces, and around each hyphen, which is a word of its own."""
    return text.replace("-", " - ").split(" ")


def english_text(words: Iterable[str]) -> str:
    """Join what `english_words` has cut."""
    return " ".join(words).replace(" - ", "-")


def number_of_english(text: str) -> int:
    """Return n for what `in_english(n)` writes; ValueError that names the wrong word otherwise."""
    values = {word: n for n, word in enumerate(SMALL)} | {"-": 0}
    values |= {word: 10 * n for n, word in enumerate(TENS, 2)}
    return read(text, english_words, values, HUNDREDS, in_english)


def number_of_chinese(text: str) -> int:
    """Return n for what `in_chinese(n)` writes; ValueError that names the wrong word otherwise."""
    values = {digit: n for n, digit in enumerate(DIGITS)}
    return read(text, list, values, UNITS, in_chinese)


def read(
    text: str, cut: Callable, values: dict[str, int], units: dict[str, int], write: Callable
) -> int:
    n, words = 0, cut(text)
    for word in words:
        if word not in values and word not in units:
            raise WrongInput(f"{word!r} in {text!r} is no word of a number")
        unit = units.get(word, 1)
        below = n % unit  # what has been read since the last larger unit: 十 alone is 一十
        n += values[word] if word in values else (below or 1) * unit - below
        if n >= LIMIT:
            raise WrongInput(f"{word!r} in {text!r} makes {n}, more than {LIMIT - 1}")
    for place, (word, right) in enumerate(zip_longest(words, cut(write(n))), 1):
        if word != right:
            fault = "its end" if word is None else repr(word)
            raise WrongInput(f"{text!r} is wrong from {fault}, word {place}; {n} is {write(n)!r}")
    return n


def quoted(text: str) -> str:
    """Return a text in quotes, for a message; of more than 80 characters the first ones."""
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."


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

    def split(self, text: str) -> list[str]:
        return english_words(text) if self.spaced else list(text)

    def known(self, text: str) -> int:
        """Return the number of words of a text that have a token."""
        return sum(word in self.tokens for word in self.split(text))

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text; ValueError that names a word which has none."""
        words = self.split(text)
        if unknown := [word for word in words if word not in self.tokens]:
            what = "word" if self.spaced else "character"
            first = next(filter(None, unknown), "")  # '' is between two spaces
            raise WrongInput(
                f"the {what} {quoted(first)} of {quoted(text)} is none of the "
                f"{len(self.tokens)} that numbers are written with: "
                f"{(' ' * self.spaced).join(self.tokens)}"
            )
        return np.array([self.tokens[word] for word in words], np.int64)

    def decode(self, tokens) -> str:
        """Return the text of the tokens before the first END, without PAD and BEGIN."""
        tokens = np.asarray(tokens).tolist()
        tokens = tokens[: tokens.index(END)] if END in tokens else tokens
        if wrong := [t for t in tokens if not 0 <= t < len(self)]:
            raise WrongInput(f"{wrong[0]} is no token of {len(self)}; use 0 to {len(self) - 1}")
        words = [self.words[t] for t in tokens if t > END]
        return english_text(words) if self.spaced else "".join(words)


@dataclass(frozen=True)
class Numbers:
    """Numbers in words, in a source and a target language, to train on and held out.

    train, held_out  inputs[n, S + T] and targets[n, T], as in `teacher_forcing`
    direction, by    as in `numbers`
    """

    source: Vocabulary
    target: Vocabulary
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    direction: str
    by: str

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
            raise WrongInput(
                f"{quoted(text)} has {len(tokens)} tokens, and the longest number "
                f"{self.source_length}; write a number below {LIMIT}"
            )
        return padded([tokens], self.source_length)

    def decode(self, tokens) -> str:
        """Return the text of tokens[T] in the target language, up to the first END."""
        return self.target.decode(tokens)

    def reversed(self) -> "Numbers":
        """Return the same numbers in the other direction: what was the target is the source."""
        s = self.source_length
        train, held_out = (
            teacher_forcing(inputs[:, s + 1 :], inputs[:, :s])
            for inputs, _ in (self.train, self.held_out)
        )
        back = "-".join(reversed(self.direction.split("-")))
        return Numbers(self.target, self.source, train, held_out, back, self.by)


def teacher_forcing(sources: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs[n, S + T] and targets[n, T] of sources[n, S] and words[n, T - 1], both padded.

        inputs   source, PAD | BEGIN, words, PAD
        targets                words, END, IGNORED

    At each column the decoder predicts the word in the next one.
    """
    ends = (words != PAD).sum(axis=1)
    targets = np.pad(words, ((0, 0), (0, 1)), constant_values=PAD)
    targets[targets == PAD] = IGNORED
    targets[np.arange(len(words)), ends] = END
    begin = np.full((len(words), 1), BEGIN)
    return np.concatenate([sources, begin, words], axis=1), targets


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Return tokens[n, length] of n rows that are no longer, with PAD after each."""
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
    if not spaced:
        text = "".join(words) + (" " if language == "en" else "")
        words = tuple(dict.fromkeys(text))
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
    check_name("direction", direction, DIRECTIONS)
    check_name("kind of token", by, ("words", "characters"))
    from_language, to_language = direction.split("-")
    drawn = draw_numbers(examples, held_out, seed)
    source, sources = encoded(drawn, from_language, by)
    target, targets = encoded(drawn, to_language, by)
    train, kept = map(teacher_forcing, sources, targets)
    return Numbers(source, target, train, kept, direction, by)


def encoded(
    drawn: tuple[list[int], list[int]], language: str, by: str
) -> tuple[Vocabulary, list[np.ndarray]]:
    """Return a language's vocabulary, and each part of the numbers in its tokens, padded."""
    write, words = LANGUAGES[language][0], vocabulary(language, by)
    length = len(words.encode(write(LONGEST)))
    return words, [padded([words.encode(write(n)) for n in part], length) for part in drawn]


def draw_numbers(examples: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Return numbers to train on, and numbers that are held out; no number comes twice.

    Numbers of 1, 2, ... 8 digits are equally many. Where there are too few of a length, all are
    taken, and longer ones in place of the rest; at most a tenth of each length is held out.
    """
    digits = range(1, len(str(LIMIT)))
    first = [10 ** (d - 1) if d > 1 else 0 for d in digits]
    there = [10**d - low for d, low in zip(digits, first, strict=True)]
    if not 1 <= held_out <= LIMIT // 10:
        raise WrongInput(
            f"cannot hold out {held_out} of {LIMIT} numbers; use 1 to a tenth of them, "
            f"{LIMIT // 10}"
        )
    if not 1 <= examples <= LIMIT - held_out:
        raise WrongInput(
            f"cannot train on {examples} of {LIMIT} numbers, of which {held_out} are held out; "
            f"use 1 to {LIMIT - held_out}"
        )
    kept = spread(held_out, [n // 10 for n in there])
    trained = spread(examples, [n - k for n, k in zip(there, kept, strict=True)])
    random = generator(seed, "numbers")
    chosen = [
        low + random.choice(n, k + t, replace=False)
        for low, n, k, t in zip(first, there, kept, trained, strict=True)
    ]
    train = np.concatenate([some[k:] for some, k in zip(chosen, kept, strict=True)])
    others = np.concatenate([some[:k] for some, k in zip(chosen, kept, strict=True)])
    return random.permutation(train).tolist(), random.permutation(others).tolist()


def spread(total: int, room: list[int]) -> list[int]:
    """Divide `total` equally over places; what does not fit in one goes to those after it.

    room  how much fits in each place, ascending
    """
    shares: list[int] = []
    for most in room:
        shares.append(min(most, (total - sum(shares)) // (len(room) - len(shares))))
    return shares
