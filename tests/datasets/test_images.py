"""The digits."""

import numpy as np
import pytest

from minidist import datasets


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
