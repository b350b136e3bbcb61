"""The workload that closed forms of bytes take."""

from typing import Any, Protocol

import numpy as np

from minidist import nn

ITEMSIZE = 8  # of float64, in which costs are measured


class Workload(Protocol):
    """A model, its batch, the options of the strategy; a `Case` of verify/strategies/ is one.

    model  of the class that the strategy splits, which its record checks before
    seed   of dropout's masks
    """

    @property
    def model(self) -> Any: ...  # each formula takes a model of its own class

    @property
    def inputs(self) -> np.ndarray: ...

    @property
    def options(self) -> dict: ...

    @property
    def seed(self) -> int: ...


def positions_of(case: Workload) -> int:
    """Return the positions of each example: T of a Transformer, else 1."""
    return case.inputs.shape[1] if isinstance(case.model, nn.Transformer) else 1


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters that are not frozen."""
    return sum(p.data.nbytes for p in model.parameters() if p.requires_grad)


def loads_bytes(model: nn.Module, N: int) -> int:
    """Return the bytes of an all_reduce over N ranks, per router with a bias, of E loads."""
    return 2 * (N - 1) * sum(b.load.nbytes for b in model.modules(nn.BiasBalance))
