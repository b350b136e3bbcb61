"""The layers of convolutional networks compute what PyTorch's compute, where it is installed."""

import numpy as np
import pytest

from minidist import Tensor, nn
from tests.strategies import arrays


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")


def close(got, want):
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-9, atol=1e-9)


def same_gradients(torch, ours, theirs, pairs, x, seed=9):
    """Compare Y and all gradients, for a random dY; `pairs`: parameters of ours and of theirs."""
    mine = Tensor(x, requires_grad=True)
    other = torch.tensor(x, requires_grad=True)
    y, want = ours(mine), theirs(other)
    grad = arrays(*y.shape, seed=seed)
    y.backward(grad)
    want.backward(torch.tensor(grad))
    close(y.data, want)
    close(mine.grad, other.grad)
    for p, q in pairs:
        close(p.grad, q.grad)
        p.grad = q.grad = None


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_convolutions(torch, kernel, padding, stride):
    ours = nn.Conv2d(3, 5, kernel, stride, padding, dtype="float64")
    theirs = torch.nn.Conv2d(3, 5, kernel, stride, padding, dtype=torch.float64)
    ours.bias.data[...] = arrays(5)
    theirs.load_state_dict(
        {"weight": torch.tensor(ours.weight.data), "bias": torch.tensor(ours.bias.data)}
    )
    pairs = [(ours.weight, theirs.weight), (ours.bias, theirs.bias)]
    same_gradients(torch, ours, theirs, pairs, arrays(4, 3, 7, 6))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 2)])
def test_batch_norm_in_training_and_in_evaluation(torch, shape):
    kind = torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d
    ours, theirs = nn.BatchNorm(3, dtype="float64"), kind(3, dtype=torch.float64)
    pairs = [(ours.gain, theirs.weight), (ours.bias, theirs.bias)]
    for p, q in pairs:
        p.data[...] = arrays(3, seed=len(p.name))
        q.data[...] = torch.tensor(p.data)
    for step in range(3):
        same_gradients(torch, ours, theirs, pairs, 3 * arrays(*shape, seed=step) + 1)
        close(ours.running_mean.data, theirs.running_mean)
        close(ours.running_var.data, theirs.running_var)
    theirs.eval()
    same_gradients(torch, ours.eval(), theirs, pairs, arrays(*shape))


def test_average_pooling(torch):
    x = arrays(2, 3, 6, 9)
    same_gradients(torch, nn.AveragePool(3), torch.nn.AvgPool2d(3), [], x)
    same_gradients(torch, nn.AveragePool(), lambda x: x.mean(dim=(2, 3)), [], x)
