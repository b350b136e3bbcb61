"""Numbers in words: vocabularies, layout, how they are drawn."""

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets
from minidist.autograd.losses import IGNORED
from minidist.nn.datasets import pairs
from minidist.nn.datasets.pairs import (
    in_chinese,
    in_english,
    number_of_chinese,
    number_of_english,
)
from minidist.nn.embedding import BEGIN, END, PAD

WRITE = {"en": in_english, "zh": in_chinese}
READ = {"en": number_of_english, "zh": number_of_chinese}
KINDS = list(itertools.product(["en-zh", "zh-en"], ["words", "characters"]))


@pytest.fixture(scope="module")
def made():
    """Return the data of each direction and kind of token; 2000 numbers to train on."""
    return {kind: datasets.numbers(*kind, examples=2000, held_out=200, seed=3) for kind in KINDS}


@pytest.fixture(scope="module")
def drawn():
    return pairs.draw_numbers(20_000, 2_000, 0)


@given(n=st.integers(0, 10**8 - 1), language=st.sampled_from(["en", "zh"]), by_words=st.booleans())
def test_what_a_vocabulary_encodes_it_decodes(n, language, by_words):
    words = pairs.vocabulary(language, "words" if by_words else "characters")
    text = WRITE[language](n)
    tokens = words.encode(text)
    assert words.decode(tokens) == text
    assert tokens.dtype == np.int64 and tokens.min() > END and tokens.max() < len(words)


def test_a_vocabulary_is_the_closed_list_of_its_language():
    english, chinese = pairs.vocabulary("en"), pairs.vocabulary("zh")
    assert english.words[:3] == chinese.words[:3] == ("<pad>", "<begin>", "<end>")
    assert (
        len(english) == 3 + 20 + 8 + 3 + 1
        and "".join(chinese.words[3:]) == "零一二三四五六七八九万千百十"
    )
    assert chinese == pairs.vocabulary("zh", "characters")
    letters = pairs.vocabulary("en", "characters").words[3:]
    assert "".join(sorted(letters)) == " -adefghilmnorstuvwxyz"


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_inputs_and_targets_have_the_layout_of_a_translator(made, kind):
    data, (source, target) = made[kind], kind[0].split("-")
    s, t = data.source_length, data.target_length
    for (inputs, targets), n in ((data.train, 2000), (data.held_out, 200)):
        assert inputs.shape == (n, s + t) and targets.shape == (n, t)
        assert inputs.dtype == targets.dtype == np.int64
        for row, goal in zip(inputs, targets, strict=True):
            number = READ[source](data.source.decode(row[:s]))
            read, written = (
                words.encode(WRITE[language](number)).tolist()
                for words, language in ((data.source, source), (data.target, target))
            )
            assert row[:s].tolist() == read + [PAD] * (s - len(read))
            assert row[s:].tolist() == [BEGIN, *written] + [PAD] * (t - 1 - len(written))
            assert goal.tolist() == [*written, END] + [IGNORED] * (t - 1 - len(written))
            assert data.decode(goal) == data.decode(row[s:]) == WRITE[target](number)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_other_direction_has_the_same_numbers(made, kind):
    there, back = kind[0].split("-")
    same(made[kind].reversed(), made[f"{back}-{there}", kind[1]])
    same(made[kind].reversed().reversed(), made[kind])


def same(data, other):
    assert (data.source, data.target) == (other.source, other.target)
    assert data.source_length == other.source_length
    pairs = zip((*data.train, *data.held_out), (*other.train, *other.held_out), strict=True)
    for array, expected in pairs:
        np.testing.assert_array_equal(array, expected)


LENGTHS = {"words": {"en": 15, "zh": 15}, "characters": {"en": 86, "zh": 15}}


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_lengths_are_those_of_the_longest_number(made, kind):
    source, target = kind[0].split("-")
    lengths = made[kind].source_length, made[kind].target_length
    assert lengths == (LENGTHS[kind[1]][source], LENGTHS[kind[1]][target] + 1)


@given(n=st.integers(0, 10**8 - 1), by=st.sampled_from(["words", "characters"]))
def test_no_number_is_longer_than_the_longest(n, by):
    for language, write in WRITE.items():
        assert len(pairs.vocabulary(language, by).encode(write(n))) <= LENGTHS[by][language]


def test_no_number_is_drawn_twice_and_none_that_is_held_out_is_trained_on(drawn):
    for (train, held_out), n, m in [(drawn, 20_000, 2_000), (pairs.draw_numbers(7, 8, 1), 7, 8)]:
        assert (len(train), len(held_out)) == (n, m) and len({*train, *held_out}) == n + m
        assert min(train) >= 0 and max(train) < 10**8
    digits = [len(str(n)) for n in drawn[0]]
    assert np.mean(np.diff(digits) != 0) > 0.7  # in no order: sorted, it would be nearly 0


def counted(numbers):
    return np.bincount([len(str(n)) for n in numbers], minlength=9)[1:].tolist()


def test_every_number_of_digits_is_drawn_as_often_until_there_are_no_more(drawn):
    """A tenth of the short numbers is held out, and all others are trained on."""
    train, held_out = map(counted, drawn)
    assert held_out == [1, 9, 90, 380, 380, 380, 380, 380]
    assert train == [9, 81, 810, 3820, 3820, 3820, 3820, 3820]


def digest(data):
    return [zlib.crc32(array.tobytes()) for array in (*data.train, *data.held_out)]


def test_numbers_are_the_same_for_the_same_seed_in_every_process(made):
    """The checksums are of another process: nothing depends on the order of a set or on a clock."""
    data = made["en-zh", "words"]
    assert digest(data) == [3159632313, 2716729917, 874858482, 2797861691]
    other = datasets.numbers(examples=2000, held_out=200, seed=4)
    assert (other.train[0] != made["en-zh", "words"].train[0]).any()


REFUSED = [
    (lambda: pairs.vocabulary("en").decode([5, 35]), "35 is no token of 35; use 0 to 34"),
    (lambda: pairs.vocabulary("en").encode("one dozen"), "the word 'dozen' of 'one dozen' is none"),
    (lambda: datasets.numbers("en-fr"), "unknown direction 'en-fr'; did you mean"),
    (
        lambda: datasets.numbers(by="letters"),
        "unknown kind of token 'letters'; choose one of words",
    ),
    (lambda: datasets.numbers(examples=0), "cannot train on 0 .*; use 1 to 99998000"),
    (lambda: datasets.numbers(held_out=0), "cannot hold out 0 of .*; use 1 to .* 10000000"),
    (
        lambda: datasets.numbers(examples=8, held_out=1).encode(" ".join(["one"] * 16)),
        "has 16 tokens, and the longest number 15; write a number",
    ),
]


def test_what_has_no_token_and_numbers_that_cannot_be_made_are_clear_errors():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()
