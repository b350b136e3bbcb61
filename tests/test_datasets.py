"""The text, the digits, and how batches are dealt to ranks and micro-batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets
from minidist.datasets import Sampler


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
