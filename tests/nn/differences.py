"""Hold the gradient of every parameter of a model against central differences."""

import pytest

from tests.strategies import arrays


def assert_gradients_are_differences(model, loss, step=1e-6):
    """Compare in a random direction per parameter; `loss()` gives a tensor of one element."""
    for p in model.parameters():
        p.grad = None
    loss().backward()
    for name, p in model.named_parameters().items():
        if not p.requires_grad:
            continue
        start, direction, values = p.data.copy(), arrays(*p.shape, seed=1), []
        for distance in (step, -step):
            p.data[...] = start + distance * direction
            values.append(loss().item())
        p.data[...] = start
        want = (values[0] - values[1]) / (2 * step)
        assert (p.grad * direction).sum() == pytest.approx(want, rel=1e-6, abs=1e-8), name
