"""The help text, files and digits: characters, windows, entropy, what is held out, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets


@pytest.fixture(scope="module")
def help_text():
    return datasets.text()


def test_the_default_text_is_long_needs_no_file_and_two_characters_tell_more_than_one(help_text):
    assert len(help_text.tokens) > 400_000 and 50 < help_text.vocab < 300
    assert help_text.tokens.min() == 0 and help_text.tokens.max() == help_text.vocab - 1
    assert "yield" in help_text.decode(help_text.tokens)
    share = np.bincount(help_text.tokens) / len(help_text.tokens)
    assert 1 < help_text.bigram_entropy() < -(share * np.log(share)).sum() - 0.5


@pytest.fixture
def written(tmp_path):
    """written(content) -> the text of a file with this content."""

    def text(content, **options):
        (tmp_path / "text").write_bytes(content)
        return datasets.text(tmp_path / "text", **options)

    return text


def test_the_bigram_entropy_of_texts_that_can_be_counted_by_hand(written):
    assert written(b"abababab").bigram_entropy() == 0  # each follows from the one before it
    assert written(b"aabba").bigram_entropy() == pytest.approx(np.log(2))  # either follows either


def test_characters_are_sorted_tokens_are_their_places_and_windows_leave_the_rest(written):
    text = written(b"\xef\xbb\xbfban\r\nana")  # a byte order mark and a line's end of Windows
    assert text.characters == "\nabn" and text.vocab == 4
    np.testing.assert_array_equal(text.tokens, [2, 1, 3, 0, 1, 3, 1])
    assert text.tokens.dtype == text.encode("nab").dtype == np.int64
    assert text.encode("nab").tolist() == [3, 1, 2] and text.decode([3, 1, 2]) == "nab"
    inputs, targets = written(b"abcdefgh").windows(3)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(targets, [[1, 2, 3], [4, 5, 6]])


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


def test_a_file_that_is_no_text_or_too_short_and_an_unknown_character_are_clear_errors(
    written, tmp_path, help_text
):
    for content, context, message in [
        (b"caf\xe9 au lait", 1, "is not UTF-8 text: invalid continuation byte at byte 3"),
        (b"PK\x03\x04\x00", 1, "is not text: it holds a zero byte at character 4"),
        (b"a", 1, "has 1 characters; a context of 1 needs 2 or more"),
        (b"12345678", 8, "has 8 characters; a context of 8 needs 9 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            written(content, context=context)
    with pytest.raises(ValueError, match=r"cannot read the text '.*nowhere': No such file"):
        datasets.text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="the character '\u4e2d' does not occur in the help"):
        help_text.encode("a\u4e2d")


def test_the_digits_are_1797_grey_images_with_labels_and_those_of_one_digit_are_alike():
    images, labels = datasets.digits("float64")
    assert images.shape == (1797, 64) and images.dtype == np.float64
    assert (images.min(), images.max()) == (0, 1) and labels.dtype == np.int64
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as its description says
    np.testing.assert_array_equal(np.bincount(labels), counts)
    means = np.stack([images[labels == digit].mean(axis=0) for digit in range(10)])
    nearest = ((images[:, None] - means) ** 2).sum(axis=-1).argmin(axis=1)
    assert (nearest == labels).mean() > 0.85


def test_held_out_digits_are_always_the_same_and_not_trained_on():
    one, again = datasets.digit_images(), datasets.digit_images()
    np.testing.assert_array_equal(one.held_out[0], again.held_out[0])
    assert one.train[0].shape == (1500, 1, 8, 8) and one.held_out[0].shape == (297, 1, 8, 8)
    images, labels = (np.concatenate(parts) for parts in zip(one.train, one.held_out, strict=True))
    rows = np.column_stack([images.reshape(-1, 64), labels])
    want = np.column_stack(datasets.digits())
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(want, axis=0))
    assert len(set(one.held_out[1].tolist())) == 10
