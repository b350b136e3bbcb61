"""Average pooling."""

from minidist.autograd import Tensor
from minidist.errors import WrongInput, check_sizes
from minidist.nn.module import Module
from minidist.rng import Randomness


class AveragePool(Module):
    """Y[B, C, H/k, W/k] = the mean of each square of k x k pixels of X[B, C, H, W].

    k    divides H and W, or ValueError; None: the mean of each whole image, Y[B, C]

    >>> nn.AveragePool(2)(Tensor([[[[1.0, 3.0], [5.0, 7.0]]]])).data.tolist()
    [[[[4.0]]]]
    """

    def __init__(self, k: int | None = None):
        if k is not None:
            check_sizes(k=k)
        self.k = k

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, C, H, W = x.shape
        k = self.k
        if k is None:
            return x.reshape(B, C, H * W).mean(axis=-1)
        if H % k or W % k:
            raise WrongInput(
                f"cannot cut images of {H} x {W} into squares of {k} x {k}; use a k that divides "
                "both"
            )
        return x.reshape(B, C, H // k, k, W // k, k).mean(axis=(3, 5))
