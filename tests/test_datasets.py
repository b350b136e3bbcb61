"""The text, the digits, the numbers, and how batches are dealt to ranks and micro-batches."""

import itertools
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets
from minidist.autograd.losses import IGNORED
from minidist.datasets import Sampler
from minidist.number_words import (
    in_chinese,
    in_english,
    number_of_chinese,
    number_of_english,
)


@pytest.fixture(scope="module")
def help_text():
    return datasets.text()


def test_the_default_text_is_long_and_needs_no_file(help_text):
    assert len(help_text.tokens) > 400_000
    assert 50 < help_text.vocab < 300
    assert "the help topics of Python" == help_text.source
    assert help_text.tokens.min() == 0 and help_text.tokens.max() == help_text.vocab - 1
    assert "yield" in help_text.decode(help_text.tokens)


def test_two_characters_tell_more_than_one(help_text):
    share = np.bincount(help_text.tokens) / len(help_text.tokens)
    unigram_entropy = -(share * np.log(share)).sum()
    assert 1 < help_text.bigram_entropy() < unigram_entropy - 0.5


def test_the_bigram_entropy_of_texts_that_can_be_counted_by_hand(tmp_path):
    def entropy(string):
        (tmp_path / "text").write_text(string)
        return datasets.text(tmp_path / "text").bigram_entropy()

    assert entropy("abababab") == 0  # each character follows from the one before it
    assert entropy("aabba") == pytest.approx(np.log(2))  # either character follows either


def test_characters_are_sorted_and_tokens_are_their_places(tmp_path):
    path = tmp_path / "text"
    path.write_text("banana")
    text = datasets.text(path)
    assert text.characters == "abn" and text.vocab == 3
    np.testing.assert_array_equal(text.tokens, [1, 0, 2, 0, 2, 0])
    np.testing.assert_array_equal(text.encode("nab"), [2, 0, 1])
    assert text.tokens.dtype == text.encode("nab").dtype == np.int64
    assert text.decode([2, 0, 1]) == "nab"


@given(
    string=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=2
    )
)
def test_any_utf_8_file_comes_back_as_it_was(tmp_path_factory, string):
    path = tmp_path_factory.mktemp("utf8") / "text"
    path.write_bytes(string.encode("utf-8"))
    text = datasets.text(str(path))
    assert text.decode(text.tokens) == string
    np.testing.assert_array_equal(text.encode(string), text.tokens)


def test_windows_line_ends_and_a_byte_order_mark_are_no_characters(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert datasets.text(path).characters == "\nab"


def test_windows_predict_the_next_character_and_leave_the_rest(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdefgh")
    inputs, targets = datasets.text(path).windows(3)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(targets, [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait", "is not UTF-8 text: invalid continuation byte at byte 3"),
        (b"PK\x03\x04\x00", "is not text: it holds a zero byte at character 4"),
        (b"", "has 0 characters; a context of 1 needs 2 or more"),
        (b"a", "has 1 characters; a context of 1 needs 2 or more"),
    ],
)
def test_a_file_that_is_no_text_is_a_clear_error(tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        datasets.text(path)


def test_a_text_shorter_than_a_context_is_a_clear_error(tmp_path):
    path = tmp_path / "text"
    path.write_text("12345678")
    assert datasets.text(path, context=7).windows(7)[0].shape == (1, 7)
    with pytest.raises(ValueError, match="has 8 characters; a context of 8 needs 9 or more"):
        datasets.text(path, context=8)


def test_a_missing_file_and_a_directory_are_clear_errors(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the text '.*nowhere': No such file"):
        datasets.text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"cannot read the text '.*': Is a directory"):
        datasets.text(tmp_path)


def test_a_character_that_does_not_occur_has_no_token(help_text):
    message = "the character '\u4e2d' does not occur in the help topics of Python"
    with pytest.raises(ValueError, match=message):
        help_text.encode("a\u4e2d")


def test_held_out_digits_are_always_the_same_and_not_trained_on():
    one, again = datasets.digit_images(), datasets.digit_images()
    np.testing.assert_array_equal(one.held_out[0], again.held_out[0])
    assert one.train[0].shape == (1500, 1, 8, 8) and one.held_out[0].shape == (297, 1, 8, 8)
    images, labels = (np.concatenate(parts) for parts in zip(one.train, one.held_out, strict=True))
    rows = np.column_stack([images.reshape(-1, 64), labels])
    want = np.column_stack(datasets.digits())
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(want, axis=0))
    assert len(set(one.held_out[1].tolist())) == 10


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_digits_are_1797_grey_images_with_labels(dtype):
    images, labels = datasets.digits(dtype)
    assert images.shape == (1797, 64) and images.dtype == dtype
    assert (images.min(), images.max()) == (0, 1)
    assert labels.shape == (1797,) and labels.dtype == np.int64
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as its description says
    np.testing.assert_array_equal(np.bincount(labels), counts)


def test_images_of_one_digit_are_alike():
    images, labels = datasets.digits()
    means = np.stack([images[labels == digit].mean(axis=0) for digit in range(10)])
    nearest = ((images[:, None] - means) ** 2).sum(axis=-1).argmin(axis=1)
    assert (nearest == labels).mean() > 0.85


ROOT = Path(__file__).parent.parent
WRITE = {"en": in_english, "zh": in_chinese}
READ = {"en": number_of_english, "zh": number_of_chinese}
KINDS = list(itertools.product(["en-zh", "zh-en"], ["words", "characters"]))


@pytest.fixture(scope="module")
def made():
    """Return the data of each direction and kind of token; 2000 numbers to train on."""
    return {kind: datasets.numbers(*kind, examples=2000, held_out=200, seed=3) for kind in KINDS}


@pytest.fixture(scope="module")
def drawn():
    return datasets.draw_numbers(20_000, 2_000, 0)


@given(n=st.integers(0, 10**8 - 1), language=st.sampled_from(["en", "zh"]), by_words=st.booleans())
def test_what_a_vocabulary_encodes_it_decodes(n, language, by_words):
    words = datasets.vocabulary(language, "words" if by_words else "characters")
    text = WRITE[language](n)
    tokens = words.encode(text)
    assert words.decode(tokens) == text
    assert tokens.dtype == np.int64 and tokens.min() > END and tokens.max() < len(words)


@given(text=st.text(" -aenotwy", max_size=8) | st.lists(st.sampled_from(["one", "ten", "-"])))
def test_a_text_is_refused_or_comes_back_with_its_spaces(text):
    words, text = datasets.vocabulary("en"), text if isinstance(text, str) else " ".join(text)
    try:
        tokens = words.encode(text)
    except ValueError:
        return
    assert words.decode(tokens) == text


def test_a_vocabulary_is_the_closed_list_of_its_language():
    english, chinese = datasets.vocabulary("en"), datasets.vocabulary("zh")
    assert english.words[:3] == chinese.words[:3] == ("<pad>", "<begin>", "<end>")
    assert (
        len(english) == 3 + 20 + 8 + 3 + 1
        and "".join(chinese.words[3:]) == "零一二三四五六七八九万千百十"
    )
    assert chinese == datasets.vocabulary("zh", "characters")
    letters = datasets.vocabulary("en", "characters").words[3:]
    assert "".join(sorted(letters)) == " -adefghilmnorstuvwxyz"


def test_a_hyphen_is_a_word_and_spaces_are_not():
    words = datasets.vocabulary("en")
    read = [words.words[t] for t in words.encode("one thousand twenty-one")]
    assert read == ["one", "thousand", "twenty", "-", "one"]
    letters = datasets.vocabulary("en", "characters")
    assert [letters.words[t] for t in letters.encode("ten-a n")] == list("ten-a n")


def test_decoding_ends_at_the_first_end_and_leaves_out_what_is_no_word():
    words = datasets.vocabulary("en")
    one, hundred = words.encode("one hundred")
    assert words.decode([BEGIN, one, PAD, hundred, END, one, IGNORED]) == "one hundred"
    assert words.decode([one, hundred]) == "one hundred"
    assert words.decode([END, one]) == words.decode([]) == ""


@pytest.mark.parametrize("token", [-1, 35])
def test_a_token_that_is_none_is_a_clear_error(token):
    with pytest.raises(ValueError, match=f"{token} is no token of 35; use 0 to 34"):
        datasets.vocabulary("en").decode([5, token])


@pytest.mark.parametrize(
    ("language", "by", "text", "message"),
    [
        (
            "en",
            "words",
            "one dozen",
            "the word 'dozen' of 'one dozen' is none of the 32 .*: zero one",
        ),
        ("en", "words", "<end>", "the word '<end>'"),
        ("en", "words", "one  ten", "the word ''"),
        ("en", "words", "", "the word ''"),
        ("en", "characters", "One", "the character 'O' of 'One' is none of the 22"),
        ("zh", "words", "两百", "the character '两' of '两百' is none of the 14 .*: 零一二三"),
    ],
)
def test_a_word_without_a_token_is_named(language, by, text, message):
    with pytest.raises(ValueError, match=message):
        datasets.vocabulary(language, by).encode(text)


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
        assert len(datasets.vocabulary(language, by).encode(write(n))) <= LENGTHS[by][language]


def test_no_group_of_digits_is_longer_than_those_of_the_longest():
    """The words of an English number are those of its groups; so the longest is known for sure."""
    for by in ("words", "characters"):
        cut = datasets.vocabulary("en", by).encode
        assert max(len(cut(in_english(n))) for n in range(1000)) == len(cut(in_english(777)))
        assert max(len(cut(in_english(n))) for n in range(100)) == len(cut(in_english(77)))
    assert max(len(in_chinese(n)) for n in range(10**4)) == len(in_chinese(7777)) == 7


def test_no_number_is_drawn_twice_and_none_that_is_held_out_is_trained_on(drawn):
    train, held_out = drawn
    assert (len(train), len(held_out)) == (20_000, 2_000)
    assert len({*train, *held_out}) == 22_000
    assert min(train) >= 0 and max(train) < 10**8


def counted(numbers):
    return np.bincount([len(str(n)) for n in numbers], minlength=9)[1:].tolist()


def test_every_number_of_digits_is_drawn_as_often_until_there_are_no_more(drawn):
    """A tenth of the short numbers is held out, and all others are trained on."""
    train, held_out = map(counted, drawn)
    assert held_out == [1, 9, 90, 380, 380, 380, 380, 380]
    assert train == [9, 81, 810, 3820, 3820, 3820, 3820, 3820]


@pytest.mark.parametrize(("examples", "held_out"), [(1, 1), (7, 8), (100, 9), (95_000, 12_345)])
def test_as_many_numbers_are_drawn_as_are_asked_for(examples, held_out):
    train, other = datasets.draw_numbers(examples, held_out, 1)
    assert (len(train), len(other)) == (examples, held_out)
    assert len({*train, *other}) == examples + held_out
    assert held_out < 8 or min(counted(other)) > 0  # of every number of digits


def test_numbers_come_in_no_order(drawn):
    for part in drawn:
        digits = [len(str(n)) for n in part]
        neighbours = np.mean(np.diff(digits) != 0)
        assert neighbours > 0.7  # sorted by digits it would be nearly 0


def digest(data):
    return [zlib.crc32(array.tobytes()) for array in (*data.train, *data.held_out)]


def test_numbers_are_the_same_for_the_same_seed_in_every_process(made):
    code = (
        "from minidist import datasets; from tests.test_datasets import digest;"
        "print(digest(datasets.numbers(examples=2000, held_out=200, seed=3)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == str(digest(made["en-zh", "words"])), done.stderr
    other = datasets.numbers(examples=2000, held_out=200, seed=4)
    assert (other.train[0] != made["en-zh", "words"].train[0]).any()


def test_a_text_becomes_one_padded_row(made):
    data = made["en-zh", "words"]
    row = data.encode("twenty-one")
    assert row.shape == (1, 15) and row.dtype == np.int64
    np.testing.assert_array_equal(row[0, :3], data.source.encode("twenty-one"))
    assert (row[0, 3:] == PAD).all()
    with pytest.raises(
        ValueError, match="has 16 tokens, and the longest number 15; write a number"
    ):
        data.encode(" ".join(["one"] * 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "en-fr"}, "direction 'en-fr' is not known; use one of .'en-zh', 'zh-en'"),
        ({"by": "letters"}, "by='letters' is not known; use 'words' or 'characters'"),
        ({"examples": 0}, "cannot train on 0 .* 2000 are held out; use 1 to 99998000"),
        ({"examples": 10**8}, "cannot train on 100000000 of 100000000 numbers"),
        ({"held_out": 0}, "cannot hold out 0 of 100000000 numbers; use 1 to .* 10000000"),
        ({"held_out": 10**7 + 1}, "cannot hold out 10000001 of"),
    ],
)
def test_numbers_that_cannot_be_made_are_a_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        datasets.numbers(**options)


def test_shards_are_neighbours_of_nearly_equal_size_larger_first():
    parts = [datasets.shard(np.arange(7), rank, 3).tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(datasets.shard(np.arange(2), rank, 4)) for rank in range(4)] == [1, 1, 0, 0]


def deal(examples, batch, size=1, micro_batches=1, seed=0, epoch=0):
    """Return one epoch as [batch][rank] -> Share."""
    ranks = [
        Sampler(examples, batch, seed, rank, size, micro_batches).epoch(epoch)
        for rank in range(size)
    ]
    return list(zip(*ranks, strict=True))


GRID = list(itertools.product([1, 5, 8], [1, 3, 8, 20], [1, 2, 3, 9], [1, 2, 5]))


@pytest.mark.parametrize(("examples", "batch", "size", "micro_batches"), GRID)
def test_every_example_comes_exactly_once_per_epoch(examples, batch, size, micro_batches):
    batches = deal(examples, batch, size, micro_batches)
    whole = deal(examples, batch)
    assert len(batches) == len(whole) == len(Sampler(examples, batch))
    dealt = []
    for shares, (alone,) in zip(batches, whole, strict=True):
        assert {share.total for share in shares} == {len(alone.examples)}
        assert {len(share.micro_batches) for share in shares} == {micro_batches}
        together = np.concatenate([share.examples for share in shares])
        np.testing.assert_array_equal(together, alone.examples)  # the same union for any size
        dealt.extend(together)
    assert sorted(dealt) == list(range(examples))


def order(**options):
    return [share.examples.tolist() for (share,) in deal(50, 8, **options)]


def test_an_epoch_is_a_shuffle_of_its_own_and_the_same_for_the_same_seed():
    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)
    assert order()[0] != list(range(8))


def test_iteration_goes_on_from_epoch_to_epoch():
    sampler = Sampler(50, 8)
    shares = itertools.islice(sampler, 2 * len(sampler))
    assert [share.examples.tolist() for share in shares] == order() + order(epoch=1)


@pytest.mark.parametrize("name", ["examples", "batch", "size", "micro_batches"])
def test_a_sampler_deals_one_or_more_of_everything(name):
    options = {"examples": 3, "batch": 2} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name}=0.*must be 1 or more"):
        Sampler(**options)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_sampler_needs_a_rank_of_its_size(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is no rank of 2; use 0 to 1"):
        Sampler(3, 2, rank=rank, size=2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (3, 2)])
def test_a_sampler_goes_on_after_every_batch(size, micro_batches, shuffle):
    for rank in range(size):
        sampler = Sampler(11, 4, 5, rank, size, micro_batches, shuffle)
        whole = list(itertools.islice(sampler, 10))  # three epochs and a batch
        for first in range(len(whole)):
            rest = itertools.islice(sampler.after(first), len(whole) - first)
            for share, expected in zip(rest, whole[first:], strict=True):
                assert share.total == expected.total
                cards = map(np.ndarray.tolist, share.micro_batches)
                assert list(cards) == [part.tolist() for part in expected.micro_batches]


def test_going_on_draws_no_epoch_that_is_over(monkeypatch):
    drawn, draw = [], datasets.generator
    monkeypatch.setattr(datasets, "generator", lambda *key: drawn.append(key) or draw(*key))
    next(Sampler(11, 4, 5).after(3 * 10**9 + 2))
    assert drawn == [(5, f"epoch {10**9}")]


def test_a_sampler_cannot_go_on_before_the_first_batch():
    with pytest.raises(ValueError, match="cannot go on after -1 batches; use 0 or more"):
        Sampler(3, 2).after(-1)


def test_without_shuffling_every_epoch_has_the_order_given():
    shares = itertools.islice(Sampler(5, 2, shuffle=False), 6)
    assert [share.examples.tolist() for share in shares] == 2 * [[0, 1], [2, 3], [4]]
