"""The help text and files: characters, windows, entropy, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets


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
