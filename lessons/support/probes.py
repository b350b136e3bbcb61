"""What a network holds while it computes: linear layers that note the bytes.

notes = []
layers = [Probed(notes, 256, 256, activation="relu", name=f"layers.{i}") for i in range(32)]
model = nn.Sequential(layers)
work, held = watch(notes, lambda: model(x).sum().backward())
"""

import tracemalloc
from collections.abc import Callable

import numpy as np

from minidist import nn
from minidist.autograd import Function

Notes = list[tuple[int, int]]  # (work, bytes held); forward of a layer is work 1, backward 2


class Probe(Function):
    """Y = X  =>  dX = dY; notes what is held before a layer's forward and after its backward."""

    def __init__(self, notes: Notes):
        self.notes = notes

    def forward(self, x):
        self.notes.append((1, tracemalloc.get_traced_memory()[0]))
        return x

    def backward(self, grad):
        self.notes.append((2, tracemalloc.get_traced_memory()[0]))
        return grad


class Probed(nn.Linear):
    """A linear layer with a probe before it."""

    def __init__(self, notes: Notes, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.probe = lambda: Probe(notes)

    def forward(self, x, randomness=None):
        return super().forward(self.probe()(x))


def watch(notes: Notes, step: Callable, *arguments) -> tuple[np.ndarray, np.ndarray]:
    """Call step(*arguments); return (work done, MiB held) at each note.

    What is held before the step does not count.
    """
    notes.clear()
    tracemalloc.start()  # NumPy reports its arrays to it
    try:
        step(*arguments)
    finally:
        tracemalloc.stop()
    work, held = np.array(notes).T
    return np.cumsum(work) - (work == 1), held / 2**20
