"""16-bit weights without float32 copies: what an update does not reach is reached now and then.

Zamirai et al., Revisiting BFloat16 Training (2021): rounding to nearest cancels small updates of
weights, rounding at random keeps them in the mean. An update of 1/100 of the distance of two
bfloat16 numbers moves the weight by the whole distance in one step of 100.

    optimizer = optim.AdamW(model.astype("bfloat16").parameters(), lr=3e-4)
    optimizer.rounding = StochasticRounding(seed=0)

The rule computes in float32; what it has updated, weights and state, is rounded at random. Bytes
per parameter, with Adam: 2 weight, 2 gradient, and 4 that the optimizer keeps, two moments.

A draw depends on the seed, the step, the global name and the element's place in the global array.
So all ranks that have an element draw the same for it, however the model is split: copies stay
equal, and a run goes on as it would have, on another mesh, too.
"""

from dataclasses import dataclass

import numpy as np

from minidist.backend import HALF, Array, array_module, rounded
from minidist.nn.flat_parameters import FlatSlice
from minidist.rng import draws_for


@dataclass(frozen=True)
class StochasticRounding:
    """Round what an optimizer has updated up or down at random, right in the mean."""

    seed: int = 0

    def __call__(self, new: Array, s: FlatSlice, step: int, number: int) -> Array:
        """Return new[n], elements of a flat slice, float32, in the numbers of its dtype.

        number  0: weights; from 1 on: an array of the optimizer's state
        """
        xp, draws = array_module(new), []
        for cut in s.slices:
            places = xp.asarray(cut.positions().astype(np.uint64))
            draws.append(draws_for(self.seed, step, f"{number}/{cut.name}", places))
        return rounded(new, HALF[s.data.dtype.name], xp.concatenate(draws))
