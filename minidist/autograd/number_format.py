"""The number formats of products with a weight, and of the sum of its gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from minidist.backend import E4M3, E5M2, Array, Format
from minidist.errors import WrongInput


def own_scale(most: Array) -> Array:
    return most


@dataclass(frozen=True)
class EightBits:
    """Products with a weight in eight bits (eight_bits.py): the `product` of its NumberFormat.

    block     elements of a strip, and the side of a weight's block; None: one scale per array
    forward   the format of X and W
    gradient  the format of dY
    share     given the largest |x| of this rank's array, returns the largest of the whole array:
              ranks that hold parts of it, or other examples, have one scale for it
    ranks     the ranks that share one scale (parallel.share_scales)
    """

    block: int | None = 128
    forward: Format = E4M3
    gradient: Format = E5M2
    share: Callable[[Array], Array] = own_scale
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        block = 1 if self.block is None else self.block
        if not isinstance(block, Integral) or isinstance(block, bool) or block < 1:
            raise WrongInput(
                f"the block of EightBits is a whole number from 1, or None, not {block!r}"
            )

    def check_part(self, name: str, indices: np.ndarray, full: int) -> None:
        """Raise ValueError unless a rank's part of `full` rows, columns or positions has its scale.

        name  in words, of what: "positions"
        """
        block, part = self.block, indices.tolist()
        if block is None:
            if self.share is own_scale and len(part) < full:
                raise WrongInput(
                    f"a rank's {len(part)} of {full} {name} are a part of an array with one scale; "
                    "call parallel.share_scales(parameters, group) before the split, or use "
                    "EightBits(block)"
                )
            return
        for first in range(0, len(part), block):
            run = part[first : first + block]
            strip = [*range(run[0], run[0] + block)][: full - run[0]]
            if run[0] % block or run != strip:
                raise WrongInput(
                    f"a rank's {len(part)} of {full} {name} cut a block of {block}, of which each "
                    "rank would choose a scale of its own; use fewer ranks, or a multiple of the "
                    "block in each piece"
                )


@dataclass(frozen=True)
class NumberFormat:
    """The formats in which a leaf is multiplied and its gradient is summed.

    product      how products with this weight are computed, or None: in its own dtype
    grad_dtype   a wider dtype, in which its gradients are added up, or None: its own
    keeps_dtype  whether `Module.astype` leaves it as it is
    """

    product: EightBits | None = None
    grad_dtype: np.dtype | None = None
    keeps_dtype: bool = False
