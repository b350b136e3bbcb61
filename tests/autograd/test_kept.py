import numpy as np

from minidist import nn
from minidist.autograd.recomputation import kept, kept_bytes


def test_what_graphs_keep_is_listed_once_and_without_parameters(place, device):
    model, x = nn.MLP([3, 4, 2], activation="relu").to(device), place(np.ones((5, 3), np.float32))
    shapes = [(name, array.shape) for name, array in kept(model(x), model(x))]
    assert shapes == [("Linear.x", (5, 3)), ("Relu.y", (5, 4)), ("Relu.y", (5, 4))]


def test_a_view_counts_as_the_memory_that_it_holds(place, device):
    hidden = nn.MLP([4, 4], dtype="float32").to(device)(place(np.ones((6, 4), np.float32)))
    part = hidden[:2]
    assert kept_bytes(part * part) == 4 * (6 * 4 + 6 * 4), "the input, and all of hidden"
