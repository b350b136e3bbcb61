"""Digits: a residual convolutional network learns which digit an image shows."""

import numpy as np

from minidist import nn
from minidist.autograd import no_grad
from minidist.datasets import Digits, digit_images
from minidist.training.kinds.kind import Kind, pairs_in_words


def outcome(model: nn.CNN, data: Digits, length: int | None = None, seed: int = 0) -> str:
    held_out = accuracy(model, *data.held_out)
    return f"accuracy on {len(data.held_out[0])} images that are held out: {held_out:.1%}\n"


def accuracy(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images[n, ...] whose largest logit is at their label."""
    model.eval()
    with no_grad():
        right = (model(images).data.argmax(axis=-1) == labels).mean()
    model.train()
    return float(right)


DIGITS = Kind(
    name="digits",
    data=Digits,
    unit="images",
    target=lambda data: "image",
    read=lambda settings, before: digit_images(),
    model=lambda data, settings: nn.CNN(1, 10, seed=settings.seed),
    examples=lambda data, settings: data.train,
    description=lambda data: {"source": data.source},
    size=lambda data: pairs_in_words(data.train, data.held_out),
    outcome=outcome,
    refused=(
        *"model context width heads kv_heads depth dropout tied experts reconstruction".split(),
        *"precision pp cp tp ep zero schedule micro_batches".split(),
    ),
    needs_all_ranks="batch norm needs the whole batch",
)
