"""What a training step asks of a GPU: copies, bytes, waits and kernel launches, to the number.

The stand-in of tests/strict_device counts them; a real GPU does not. A launch is one call of CuPy,
some of which start several kernels: these numbers are lower bounds. The table, by model:

    python -m tests.gpu.test_device_budget
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from minidist import nn, optim
from minidist.backend import to_device
from minidist.rng import Randomness

pytestmark = pytest.mark.gpu
B, T, V = 8, 16, 65  # the small Transformer: C = 64, 2 blocks, 4 heads


def transformer(dtype="float32", depth=2, batch=B, positions=T, **more):
    model = nn.Transformer(V, 64, 4, depth, positions, dtype=dtype, **more).to("gpu")
    tokens, targets = np.random.default_rng(0).integers(0, V, (2, batch, positions))

    def loss(step):
        return nn.cross_entropy(model(tokens, Randomness(0, step, np.arange(batch))), targets)

    return model, loss


def translator(depth=2):
    model = nn.Seq2Seq(V, V, 64, 4, depth, T, T, dropout=0.1).to("gpu")
    source, read, targets = np.random.default_rng(0).integers(0, V, (3, B, T))
    tokens = np.concatenate([source, read], axis=1)

    def loss(step):
        return nn.cross_entropy(model(tokens, Randomness(0, step, np.arange(B))), targets)

    return model, loss


def perceptron(activation):
    model = nn.MLP([64, 32, 10], activation).to("gpu")
    x = np.random.default_rng(0).standard_normal((16, 64)).astype("float32")
    targets = np.arange(16) % 10

    def loss(step):
        return nn.cross_entropy(model(to_device(x, "gpu")), targets)

    return model, loss


TOKENS, EXAMPLES = B * T * 8, B * 8  # bytes; tokens and targets go up, and the examples of masks
BUDGET = {  # model: how to make it, its optimizer, copies to the GPU, their bytes, launches
    "perceptron, relu, SGD": (lambda: perceptron("relu"), optim.SGD, 2, 4224, 23),
    "perceptron, gelu, AdamW": (lambda: perceptron("gelu"), optim.AdamW, 2, 4224, 23),
    "Transformer": (lambda: transformer(dropout=0.1), optim.AdamW, 3, 2 * TOKENS + EXAMPLES, 153),
    "without dropout": (transformer, optim.AdamW, 2, 2 * TOKENS, 143),
    "float16": (
        lambda: transformer("float16", dropout=0.1),
        optim.AdamW,
        3,
        2 * TOKENS + EXAMPLES,
        274,
    ),
    # The source and where it is padded (a byte each), the target that is read and the one to write.
    "translator": (translator, optim.AdamW, 5, 3 * TOKENS + TOKENS // 8 + EXAMPLES, 492),
}


def count(make, rule):
    """Return the counts of one training step, the second: in the first one, state is made."""
    from cupy import _counters

    model, loss_of = make()
    optimizer = rule(model.parameters(), lr=1e-3)
    for step in range(2):
        with _counters.counting() as counts:
            loss_of(step).backward()
            optimizer.clip_global_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.fixture
def stand_in(gpu):
    if not hasattr(pytest.importorskip("cupy"), "_counters"):
        pytest.skip("a real GPU does not count")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("model", BUDGET)
def test_a_training_step_sends_indices_up_and_nothing_down_and_waits_for_nothing(model):
    make, rule, copies, nbytes, launches = BUDGET[model]
    counts = count(make, rule)
    assert (counts.to_device, counts.to_device_bytes) == (copies, nbytes)
    assert (counts.to_host, counts.waits) == (0, 0)
    assert counts.launches == launches


@pytest.mark.usefixtures("stand_in")
def test_a_loss_that_is_printed_is_one_wait_and_a_clip_over_ranks_another():
    from cupy import _counters

    model, loss_of = transformer()
    loss = loss_of(0)
    loss.backward()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with _counters.counting() as counts:
        loss.item()
    assert (counts.to_host, counts.waits) == (1, 1)
    with _counters.counting() as counts:
        optimizer.clip_global_norm(1.0, lambda own: own)
    assert (counts.to_host, counts.waits) == (1, 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "strict_device"))
    for name, (make, rule, *_) in BUDGET.items():
        print(f"{name:24}", count(make, rule))
