"""Rotary positions: queries and keys are turned by an angle that grows with their position.

Su et al., RoFormer (2021), section 3.2.2, equations 14 and 15. The score of a query at t and a key
at s then depends on t - s alone. Letters: D head width, t a position.

    [x_i, x_(i + D/2)]  ->  [x_i cos - x_(i + D/2) sin, x_i sin + x_(i + D/2) cos]
    angle of pair i at t: t theta^(-2 i / D),  i = 0 .. D/2 - 1

The pair is made of the two halves of a head, as in the published files of Llama. RoFormer pairs
neighbours, which is the same up to the order of the columns of W_q and W_k.

Llama 3.1 reads longer texts than Llama 3 was trained on: its fast pairs, which tell near positions
apart, stay; its slow ones, which would meet angles never seen, are slower by a factor
(apply_scaling in models/llama3/reference_impl/model.py of meta-llama/llama-models).
"""

import math
from dataclasses import dataclass

import numpy as np

from minidist.autograd import Function, Tensor
from minidist.backend import Array, array_module, on_device_of, widen
from minidist.errors import check_number
from minidist.pieces import Positions
from minidist.rng import Randomness


@dataclass(frozen=True)
class Stretched:
    """A theta for a longer context.

    factor   by which a pair is slower that turns less than `low` times in the old context
    high     a pair that turns more often stays as it is; between `low` and `high` it is mixed
    context  positions of the old context
    """

    theta: float
    factor: float
    low: float
    high: float
    context: float

    def slower(self, plain: np.ndarray) -> np.ndarray:
        """Return the radians per position of pairs that had `plain` ones."""
        turns = self.context * plain / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


def check_theta(theta: float | Stretched) -> None:
    """Raise ValueError unless the base of the angles is a positive number."""
    base = theta.theta if isinstance(theta, Stretched) else theta
    check_number("theta is a positive number", base, lambda x: 0 < x < math.inf)


def frequencies(width: int, theta: float | Stretched) -> np.ndarray:
    """Return the radians per position of each pair of a head, [D/2], in float64."""
    if isinstance(theta, Stretched):
        return theta.slower(frequencies(width, theta.theta))
    return theta ** (-2 * np.arange(width // 2) / width)


class Rotate(Function):
    """QKV[G + 2, B, K, T, D]: turn queries and keys, leave values; backward turns back.

    positions  where the T positions are in the sequence
    """

    def __init__(self, positions: Positions, theta: float | Stretched):
        self.positions, self.theta = positions, theta

    def forward(self, qkv: Array) -> Array:
        return turned(qkv, angles_at(self.positions.indices, qkv.shape[-1], self.theta))

    def backward(self, grad: Array) -> Array:
        return turned(grad, -angles_at(self.positions.indices, grad.shape[-1], self.theta))


def turned(qkv: Array, angles: np.ndarray) -> Array:
    y, half, wide = array_module(qkv).array(qkv), qkv.shape[-1] // 2, widen(qkv[:-1])
    cos, sin = (on_device_of(f(angles).astype(wide.dtype), qkv) for f in (np.cos, np.sin))
    a, b = wide[..., :half], wide[..., half:]
    y[:-1, ..., :half] = a * cos - b * sin
    y[:-1, ..., half:] = a * sin + b * cos
    return y


def angles_at(positions: np.ndarray, width: int, theta: float | Stretched) -> np.ndarray:
    """Return angles[T, D/2] in float64, of these positions of a sequence."""
    return positions[:, None] * frequencies(width, theta)


def rotate(qkv: Tensor, theta: float | Stretched, randomness: Randomness | None = None) -> Tensor:
    """Turn the queries and keys of QKV[G + 2, B, K, T, D] by their positions in the sequence.

    A rank or a step that holds a part of the sequence says which, in `randomness.positions`.
    """
    T, positions = qkv.shape[-2], None if randomness is None else randomness.positions
    return Rotate(Positions(((0, T),), T) if positions is None else positions, theta)(qkv)
