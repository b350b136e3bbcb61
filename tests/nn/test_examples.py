"""The examples in docstrings: every layer has one, and it prints what it says."""

import doctest
import inspect

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.rng import Randomness

CLASSES = {name: kind for name, kind in vars(nn).items() if inspect.isclass(kind)}
LAYERS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, nn.Module)}
PARTS = {"Module", "Dual", "EncoderBlock", "DecoderBlock", "SourceAndTarget", "ExpertBlock"}


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - PARTS))
def test_the_example_of_a_layer(name):
    names = {"np": np, "nn": nn, "Tensor": Tensor, "Randomness": Randomness}
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(LAYERS[name], name, globs=names)
    assert example.examples, f"the docstring of nn.{name} has no example"
    found = []
    doctest.DocTestRunner().run(example, out=found.append)
    assert not found, "".join(found)
