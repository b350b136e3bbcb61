"""Numbers in words: the rules of both languages by examples, and back again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.nn.datasets.pairs import (
    CHINESE,
    ENGLISH,
    english_text,
    english_words,
    in_chinese,
    in_english,
    number_of_chinese,
    number_of_english,
)

BY_HAND = """
0          零                              zero
2          二                              two
10         十                              ten
11         十一                            eleven
13         十三                            thirteen
19         十九                            nineteen
20         二十                            twenty
21         二十一                          twenty-one
40         四十                            forty
76         七十六                          seventy-six
100        一百                            one hundred
101        一百零一                        one hundred one
112        一百一十二                      one hundred twelve
321        三百二十一                      three hundred twenty-one
999        九百九十九                      nine hundred ninety-nine
1000       一千                            one thousand
1005       一千零五                        one thousand five
1010       一千零一十                      one thousand ten
2020       二千零二十                      two thousand twenty
10000      一万                            ten thousand
10005      一万零五                        ten thousand five
11000      一万一千                        eleven thousand
12005      一万二千零五                    twelve thousand five
30405      三万零四百零五                  thirty thousand four hundred five
100000     十万                            one hundred thousand
100005     十万零五                        one hundred thousand five
120000     十二万                          one hundred twenty thousand
500012     五十万零一十二                  five hundred thousand twelve
1100000    一百一十万                      one million one hundred thousand
2050000    二百零五万                      two million fifty thousand
10100000   一千零一十万                    ten million one hundred thousand
20000300   二千万零三百                    twenty million three hundred
90000001   九千万零一                      ninety million one
"""


def test_every_rule_by_hand():
    for line in BY_HAND.strip().splitlines():
        n, chinese, english = line.split(maxsplit=2)
        assert (in_chinese(int(n)), in_english(np.int64(n))) == (chinese, english)
        assert number_of_chinese(chinese) == number_of_english(english) == int(n)


def comes_back(n):
    """Return a number in English and in Chinese, after it was read from both."""
    english, chinese = in_english(n), in_chinese(n)
    assert number_of_english(english) == number_of_chinese(chinese) == n
    assert set(chinese) <= set(CHINESE) and "两" not in chinese
    assert set(english_words(english)) <= set(ENGLISH)
    assert english_text(english_words(english)) == english
    return english, chinese


def test_small_numbers_come_back_and_no_two_are_written_alike():
    for texts in zip(*map(comes_back, range(2_000)), strict=True):
        assert len(set(texts)) == 2_000


@given(st.integers(0, 7), st.integers(0, 10**8 - 1), st.integers(0, 9999))
def test_any_number_comes_back_also_with_zeros_within(zeros, front, back):
    comes_back(min(front * 10**zeros + back, 10**8 - 1))


def test_the_words_are_those_that_numbers_need():
    numbers = [*range(100), *(10**n for n in range(8))]
    used = {word for n in numbers for word in english_words(in_english(n))}
    assert used == set(ENGLISH) and len(set(ENGLISH)) == len(ENGLISH)
    assert {c for n in numbers for c in in_chinese(n)} == set(CHINESE)
    assert len(set(CHINESE)) == len(CHINESE) == 14


REFUSED = [
    (in_english, -1, "-1 has no words here; use .* 0 to 99999999"),
    (in_chinese, 10**8, "100000000 has no words here; use .* 0 to 99999999"),
    (number_of_chinese, "一百五", "wrong from '五', word 3; 105 is '一百零五'"),
    (number_of_chinese, "两百", "'两' in '两百' is no word"),
    (number_of_chinese, "一十", "wrong from '一', word 1; 10 is '十'"),
    (number_of_chinese, "一百零二十", "wrong from '零', word 3; 120 is '一百二十'"),
    (number_of_chinese, "一千零零五", "wrong from '零', word 4; 1005 is '一千零五'"),
    (number_of_chinese, "五百三千", "wrong from '百', word 2; 503000 is '五十万三千'"),
    (number_of_chinese, "", "wrong from its end, word 1; 0 is '零'"),
    (number_of_english, "one hundred and five", "'and' in 'one hundred and five' is no word"),
    (number_of_english, "twenty one", "wrong from 'one', word 2; 21 is 'twenty-one'"),
    (number_of_english, "twenty-ten", "wrong from 'twenty', word 1; 30 is 'thirty'"),
    (number_of_english, "zero hundred", "wrong from 'zero', word 1; 100 is 'one hundred'"),
    (number_of_english, "one hundred million", "'million' in .* makes 100000000, more than"),
    (number_of_english, "one  hundred", "'' in 'one  hundred' is no word"),
]


def test_what_has_no_words_and_what_no_rule_writes_is_refused():
    for function, value, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            function(value)


@given(english=st.booleans(), data=st.data())
def test_any_words_are_refused_or_are_the_text_of_a_number(english, data):
    words = data.draw(st.lists(st.sampled_from(ENGLISH if english else CHINESE), max_size=5))
    text = english_text(words) if english else "".join(words)
    try:
        n = (number_of_english if english else number_of_chinese)(text)
    except ValueError:
        return
    assert (in_english if english else in_chinese)(n) == text
