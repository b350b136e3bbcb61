"""How fast each pair of a rotary head turns: as it was trained, or stretched to a longer context.

RoFormer's pair i turns by theta^(-2 i / D) per position (Su et al. 2021, section 3.2.2). Llama 3.1
reads longer texts than Llama 3 was trained on: its fast pairs, which tell near positions apart,
stay; its slow ones, which would meet angles never seen, are slower by a factor (apply_scaling in
models/llama3/reference_impl/model.py of meta-llama/llama-models). Letters: D head width.
"""

import math
from dataclasses import dataclass

import numpy as np

from minidist.errors import check_number


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
