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
1          一                              one
2          二                              two
10         十                              ten
11         十一                            eleven
12         十二                            twelve
13         十三                            thirteen
15         十五                            fifteen
19         十九                            nineteen
20         二十                            twenty
21         二十一                          twenty-one
30         三十                            thirty
40         四十                            forty
58         五十八                          fifty-eight
60         六十                            sixty
76         七十六                          seventy-six
89         八十九                          eighty-nine
90         九十                            ninety
100        一百                            one hundred
101        一百零一                        one hundred one
112        一百一十二                      one hundred twelve
200        二百                            two hundred
321        三百二十一                      three hundred twenty-one
999        九百九十九                      nine hundred ninety-nine
1000       一千                            one thousand
1005       一千零五                        one thousand five
1010       一千零一十                      one thousand ten
1100       一千一百                        one thousand one hundred
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
1000000    一百万                          one million
1100000    一百一十万                      one million one hundred thousand
2050000    二百零五万                      two million fifty thousand
10000000   一千万                          ten million
10100000   一千零一十万                    ten million one hundred thousand
20000000   二千万                          twenty million
20000300   二千万零三百                    twenty million three hundred
90000001   九千万零一                      ninety million one
"""
WRITTEN = [line.split(maxsplit=2) for line in BY_HAND.strip().splitlines()]


@pytest.mark.parametrize(("n", "chinese", "english"), WRITTEN)
def test_every_rule_by_hand(n, chinese, english):
    assert (in_chinese(int(n)), in_english(int(n))) == (chinese, english)
    assert number_of_chinese(chinese) == number_of_english(english) == int(n)


def test_long_numbers_by_hand():
    assert in_chinese(12_345_678) == "一千二百三十四万五千六百七十八"
    assert (
        in_english(12_345_678)
        == "twelve million three hundred forty-five thousand six hundred seventy-eight"
    )
    assert in_chinese(99_999_999) == "九千九百九十九万九千九百九十九"
    assert (
        in_english(99_999_999)
        == "ninety-nine million nine hundred ninety-nine thousand nine hundred ninety-nine"
    )


def goes_and_comes_back(n):
    english, chinese = in_english(n), in_chinese(n)
    assert number_of_english(english) == number_of_chinese(chinese) == n
    assert set(chinese) <= set(CHINESE) and "两" not in chinese
    assert set(english_words(english)) <= set(ENGLISH)
    assert english_text(english_words(english)) == english
    return english, chinese


def test_all_small_numbers_come_back_and_no_two_are_written_alike():
    written = [goes_and_comes_back(n) for n in range(20_000)]
    for texts in zip(*written, strict=True):
        assert len(set(texts)) == 20_000


@given(st.integers(0, 10**8 - 1))
def test_any_number_comes_back(n):
    goes_and_comes_back(n)


@given(st.integers(0, 7), st.integers(1, 9999), st.integers(0, 9999))
def test_numbers_with_zeros_within_come_back(zeros, front, back):
    goes_and_comes_back(min(front * 10**zeros + back, 10**8 - 1))


def test_the_words_are_those_that_numbers_need():
    numbers = [*range(100), *(10**n for n in range(8))]
    used = {word for n in numbers for word in english_words(in_english(n))}
    assert used == set(ENGLISH) and len(set(ENGLISH)) == len(ENGLISH)
    assert {c for n in numbers for c in in_chinese(n)} == set(CHINESE)
    assert len(set(CHINESE)) == len(CHINESE) == 14


def test_numbers_of_numpy_are_numbers():
    assert in_english(np.int64(1005)) == "one thousand five"
    assert in_chinese(np.int64(1005)) == "一千零五"


@pytest.mark.parametrize("write", [in_english, in_chinese])
@pytest.mark.parametrize("n", [-1, 10**8, 10**12])
def test_numbers_out_of_range_have_no_words(write, n):
    with pytest.raises(ValueError, match=f"{n} has no words here; use .* 0 to 99999999"):
        write(n)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("一百五", "wrong from '五', word 3; 105 is '一百零五'"),
        ("两百", "'两' in '两百' is no word"),
        ("一十", "wrong from '一', word 1; 10 is '十'"),
        ("一百十二", "wrong from '十', word 3; 112 is '一百一十二'"),
        ("一千五", "wrong from '五', word 3; 1005 is '一千零五'"),
        ("一百零", "wrong from '零', word 3; 100 is '一百'"),
        ("一百零二十", "wrong from '零', word 3; 120 is '一百二十'"),
        ("一千零零五", "wrong from '零', word 4; 1005 is '一千零五'"),
        ("十万零一千", "wrong from '零', word 3; 101000 is '十万一千'"),
        ("一万零十", "wrong from '十', word 4; 10010 is '一万零一十'"),
        ("五百三千", "wrong from '百', word 2; 503000 is '五十万三千'"),
        ("一二", "wrong from '一', word 1; 3 is '三'"),
        ("万", "wrong from '万', word 1; 10000 is '一万'"),
        ("零五", "wrong from '零', word 1; 5 is '五'"),
        ("", "wrong from its end, word 1; 0 is '零'"),
        ("5", "'5' in '5' is no word"),
        ("一 百", "' ' in '一 百' is no word"),
        ("一万万", "wrong from '一', word 1; 20000 is '二万'"),
    ],
)
def test_what_chinese_rules_do_not_write_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        number_of_chinese(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one hundred and five", "'and' in 'one hundred and five' is no word"),
        ("twenty one", "wrong from 'one', word 2; 21 is 'twenty-one'"),
        ("twenty - one", "'' in 'twenty - one' is no word"),
        ("twenty-", "'' in 'twenty-' is no word"),
        ("twenty-ten", "wrong from 'twenty', word 1; 30 is 'thirty'"),
        ("one-hundred", "wrong from '-', word 2; 100 is 'one hundred'"),
        ("hundred", "wrong from 'hundred', word 1; 100 is 'one hundred'"),
        ("zero hundred", "wrong from 'zero', word 1; 100 is 'one hundred'"),
        ("twelve hundred", "wrong from 'twelve', word 1; 1200 is 'one thousand two hundred'"),
        ("one hundred zero", "wrong from 'zero', word 3; 100 is 'one hundred'"),
        ("one thousand one million", "'million' in 'one thousand one million' makes 1001000000"),
        ("one hundred million", "'million' in .* makes 100000000, more than 99999999"),
        ("five six", "wrong from 'five', word 1; 11 is 'eleven'"),
        ("Five", "'Five' in 'Five' is no word"),
        ("fourty", "'fourty' in 'fourty' is no word"),
        ("one  hundred", "'' in 'one  hundred' is no word"),
        (" one", "'' in ' one' is no word"),
        ("", "'' in '' is no word"),
    ],
)
def test_what_english_rules_do_not_write_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        number_of_english(text)


@pytest.mark.parametrize(
    ("words", "join", "read", "write"),
    [
        (ENGLISH, english_text, number_of_english, in_english),
        (CHINESE, "".join, number_of_chinese, in_chinese),
    ],
    ids=["english", "chinese"],
)
@given(data=st.data())
def test_any_words_are_refused_or_are_the_text_of_a_number(words, join, read, write, data):
    text = join(data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=5)))
    try:
        n = read(text)
    except ValueError:
        return
    assert write(n) == text
