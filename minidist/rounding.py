"""Round numbers to formats of 16 and 8 bits: to the nearest one, or up or down at random.

    format     significant bits   smallest   largest
    bfloat16   8                  2^-133     3.4e38
    float16    11                 2^-24      65504
    e4m3       4                  2^-9       448        Micikevicius et al., FP8 Formats for Deep
    e5m2       3                  2^-16      57344      Learning (2022), table 1

From 2^(bits - 1) smallest on, a number has all its bits; below, the numbers of a format have equal
distances. What is rounded stays in a wider array: NumPy needs no dtype for the format. The results
are those of ml_dtypes, bit for bit, up to the largest number.
"""

from typing import NamedTuple

import numpy as np

from minidist.backend import Array, array_module
from minidist.rng import digest, hash_uniform


class Format(NamedTuple):
    """Significant bits, and the smallest and the largest positive number."""

    bits: int
    smallest: float
    largest: float


BFLOAT16 = Format(8, 2.0**-133, (2 - 2.0**-7) * 2.0**127)
FLOAT16 = Format(11, 2.0**-24, 65504.0)
E4M3 = Format(4, 2.0**-9, 448.0)
E5M2 = Format(3, 2.0**-16, 57344.0)
EXPONENTS = {"float32": (np.uint32, 0x7F800000), "float64": (np.uint64, 0x7FF << 52)}  # their bits
HALF = {"bfloat16": BFLOAT16, "float16": FLOAT16}  # those that have a dtype, by its name


def rounded(x: Array, form: Format, draws: Array | None = None) -> Array:
    """Return X, float32 or float64, in the numbers of a format.

    A finite number beyond the largest becomes the largest; what is not finite stays as it is.

    draws  None: to the nearest number, of two equally near ones to the even one. Or uniform in
           [0, 1), one for each element: up if the draw is below the fraction that rounding down
           would lose, so that the mean over the draws is X (Connolly, Higham and Mary 2021)
    """
    xp, (whole, exponent) = array_module(x), EXPONENTS[x.dtype.name]
    fits = xp.maximum(xp.minimum(x, form.largest), -form.largest)
    power = (fits.view(whole) & whole(exponent)).view(x.dtype)  # the largest 2^i up to |x|, or 0
    spacing = xp.maximum(power * 2.0 ** (1 - form.bits), form.smallest)
    steps = fits / spacing  # exact: the spacing is a power of two
    if draws is None:
        steps = xp.rint(steps)
    else:
        down = steps // 1
        steps = down + (steps > down + draws)
    return xp.where(xp.isfinite(x), steps * spacing, x)


def draws_for(seed: int, step: int, name: str, elements: Array) -> Array:
    """Return a draw in [0, 1) for elements of the global array `name`, float64.

    It depends on the seed, the step, the name and the element's place in the whole array, uint64:
    whoever rounds the element, draws the same.
    """
    return hash_uniform(digest(seed, "rounding", step, name), elements)
