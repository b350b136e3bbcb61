"""Real input, and how it is shuffled and dealt to ranks and micro-batches.

texts.py     the help text inside every CPython, or a file: windows of T characters, each
             predicts the next one
images.py    1797 grey images of digits
pairs.py     numbers in words, English and Chinese, to be translated
batch.py     which examples each batch has; a batch: inputs, targets and what decides its dropout
             masks; its parts for ranks and micro-batches
"""

from minidist.nn.datasets.batch import Batch, Sampler, Share, example_indices, shard
from minidist.nn.datasets.images import Digits, digit_images, digits
from minidist.nn.datasets.pairs import Numbers, Vocabulary, numbers
from minidist.nn.datasets.texts import Text, text

__all__ = [
    "Batch",
    "Digits",
    "Numbers",
    "Sampler",
    "Share",
    "Text",
    "Vocabulary",
    "digit_images",
    "digits",
    "example_indices",
    "numbers",
    "shard",
    "text",
]
