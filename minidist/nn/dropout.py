"""Dropout (Srivastava et al. 2014); it drops the same elements for every split of the work."""

from minidist.autograd import Tensor, functions
from minidist.autograd.checks import check_rate
from minidist.autograd.recording import is_recording
from minidist.errors import WrongInput
from minidist.nn.module import Module
from minidist.rng import Randomness


class Dropout(Module):
    """Y = X keep / (1 - rate); under `no_grad` without randomness, or without its seed, Y = X.

    Training without randomness is an error: dropout is never skipped silently.

    >>> y = nn.Dropout(0.5)(np.ones((1, 1000)), Randomness(seed=0, step=0, examples=np.array([0])))
    >>> np.unique(y.data).tolist()
    [0.0, 2.0]
    """

    def __init__(self, rate: float, *, name="dropout"):
        check_rate(rate)
        self.rate, self.name = rate, name

    def forward(
        self, x: Tensor, randomness: Randomness | None = None, window=None, full_shape=None
    ) -> Tensor:
        """Apply dropout; if x is a part of each example, pass its window and the full shape."""
        seed = None if randomness is None else randomness.seed
        if self.rate == 0 or (seed is None and not is_recording()):
            return x
        if randomness is None or seed is None:
            raise WrongInput(
                f"{self.name} drops out at {self.rate}: "
                "call model(x, Randomness(seed, step, examples)) to train, "
                "or wrap the call in no_grad() to evaluate"
            )
        return functions.dropout(x, self.rate, self.name, randomness, window, full_shape)
