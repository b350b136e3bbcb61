"""Whole numbers below 10**8 in words, English and Chinese, and back.

    321        three hundred twenty-one                    三百二十一
    100,005    one hundred thousand five                   十万零五

English as in the United States, without "and"; Chinese with 二 throughout, never 两. Each language
is one rule: the largest unit that fits, how many of it, then the rest. English counts thousands,
Chinese counts 万 = 10**4, so a number cannot be translated word by word.

Reading is one loop for both: a unit multiplies what has been read since the last larger unit. The
loop accepts wrong texts, too. So a text is refused unless writing its number gives the same text.
"""

from collections.abc import Callable, Iterable
from itertools import zip_longest

from minidist.errors import WrongInput

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
            found = "its end" if word is None else repr(word)
            raise WrongInput(f"{text!r} is wrong from {found}, word {place}; {n} is {write(n)!r}")
    return n
