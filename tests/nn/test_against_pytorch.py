"""Layers with many conventions compute what PyTorch's compute, where it is installed."""

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


def copy_linear(torch, ours, weight, bias):
    """Let PyTorch's weight[F, C] and bias[F] be those of our W[C, F]; they get random biases."""
    ours.bias.data[...] = arrays(*ours.bias.shape, seed=len(ours.bias.name))
    with torch.no_grad():
        weight.copy_(torch.tensor(ours.weight.data.T))
        bias.copy_(torch.tensor(ours.bias.data))


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 3, 1)])
@pytest.mark.parametrize("heads", [1, 3])
def test_padded_attention_to_another_sequence(torch, heads, lengths):
    C, S = 6, 5
    ours = nn.PaddedAttention(C, heads, dtype="float64")
    theirs = torch.nn.MultiheadAttention(C, heads, batch_first=True, dtype=torch.float64)
    rows, bias = theirs.in_proj_weight, theirs.in_proj_bias
    copy_linear(torch, ours.query, rows[:C], bias[:C])
    copy_linear(torch, ours.key_value, rows[C:], bias[C:])
    copy_linear(torch, ours.output, theirs.out_proj.weight, theirs.out_proj.bias)
    held = np.arange(S) < np.array(lengths)[:, None]
    x, memory, grad = arrays(3, 4, C), arrays(3, S, C, seed=1), arrays(3, 4, C, seed=2)
    mine = [Tensor(a, requires_grad=True) for a in (x, memory)]
    other = [torch.tensor(a, requires_grad=True) for a in (x, memory)]
    y = ours(*mine, held)
    want, _ = theirs(other[0], other[1], other[1], key_padding_mask=torch.tensor(~held))
    y.backward(grad)
    want.backward(torch.tensor(grad))
    close(y.data, want)
    for p, q in zip(mine, other, strict=True):
        close(p.grad, q.grad)
    close(np.concatenate([ours.query.weight.grad, ours.key_value.weight.grad], 1).T, rows.grad)
    close(np.concatenate([ours.query.bias.grad, ours.key_value.bias.grad]), bias.grad)
    close(ours.output.weight.grad.T, theirs.out_proj.weight.grad)
