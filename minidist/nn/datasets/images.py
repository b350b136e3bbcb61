"""1797 grey images of digits, 8 x 8 pixels (nn/datasets/digits.txt: source, citation, licence)."""

from dataclasses import dataclass
from importlib import resources

import numpy as np

from minidist.rng import generator


def digits(dtype="float32") -> tuple[np.ndarray, np.ndarray]:
    """Return images[1797, 64] with values from 0 to 1, and labels[1797] from 0 to 9."""
    with resources.files("minidist").joinpath("nn/datasets/digits.npz").open("rb") as file:
        stored = np.load(file)
        images, labels = stored["images"], stored["labels"]
    return (images.reshape(-1, 64) / 16).astype(dtype), labels.astype(np.int64)


@dataclass(frozen=True)
class Digits:
    """The digits as images[n, 1, 8, 8] and labels[n]: 1500 to train on, 297 held out.

    The same ones are held out in every run.
    """

    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    source: str = "handwritten digits"


def digit_images() -> Digits:
    """Return the digits, cut into images to train on and images that are held out."""
    images, labels = digits()
    images, order = images.reshape(-1, 1, 8, 8), generator(0, "held out").permutation(len(images))
    train, held_out = order[:1500], order[1500:]
    return Digits((images[train], labels[train]), (images[held_out], labels[held_out]))
