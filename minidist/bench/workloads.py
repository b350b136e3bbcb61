"""What is measured: training steps and products, ours; `torch_peers.py` has PyTorch's.

A workload is (the function that prepares it, its arguments): both files have functions of these
names, which return a call.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.backend import matmul, to_device
from minidist.bench.rows import Step
from minidist.comm import Group
from minidist.data_parallel.bucketed import Bucketed

Work = tuple[str, dict[str, Any]]  # the arguments are as different as the workloads

STEPS: dict[str, Work] = {
    "MLP, batch 128": ("mlp_step", {}),
    "MLP, batch 256": ("mlp_step", {"rows": 256}),
    "MLP, batch 1,024": ("mlp_step", {"rows": 1024}),
    "Transformer, width 128, T = 64": ("transformer_step", {}),
    "Transformer, width 256, T = 256": (
        "transformer_step",
        {"width": 256, "context": 256, "batch": 4},
    ),
    "Transformer, width 256, T = 512": (
        "transformer_step",
        {"width": 256, "context": 512, "batch": 2},
    ),
    "Convolution": ("convolution_step", {}),
    "1,000 tiny ops": ("chain_step", {}),
}

# How large the work of `minidist bench gpu` is: usual, at most, and of what.
GPU_SIZES = {
    "width": (1024, 16_384, "of the MLP and the Transformer"),
    "depth": (12, 1_000, "their layers, or blocks"),
    "heads": (16, 16_384, "attention heads"),
    "context": (1024, 65_536, "tokens per example"),
    "batch": (8, 65_536, "examples"),
    "vocab": (16384, 1_000_000, "different tokens"),
    "product": (8192, 65_536, "rows of each matrix of a product"),
    "megabytes": (64, 100_000, "of an all_reduce"),
}


def gpu_works(sizes: dict[str, int]) -> dict[str, Work]:
    """Return the workloads of a GPU, of these sizes."""
    widths, rows = [sizes["width"]] * (sizes["depth"] + 1), sizes["batch"] * sizes["context"]
    shape = {name: sizes[name] for name in GPU_SIZES if name not in ("product", "megabytes")}
    works: dict[str, Work] = {
        "MLP step": ("mlp_step", {"widths": widths, "rows": rows}),
        "Transformer step": ("transformer_step", shape),
    }
    for dtype in ("float32", "float16"):
        works[f"product, {dtype}"] = "product", {"size": sizes["product"], "dtype": dtype}
    return works


def makers(
    library: ModuleType, works: dict[str, Work], **more: str
) -> dict[str, Callable[[], Step]]:
    """Return {workload: a function that prepares it} of a library: this file, or PyTorch's."""
    return {
        name: partial(getattr(library, function), **arguments, **more)
        for name, (function, arguments) in works.items()
    }


class Loss(Protocol):
    def backward(self) -> object: ...


class Optimizer(Protocol):
    def step(self) -> object: ...
    def zero_grad(self) -> object: ...


def training_step(
    loss: Callable[[], Loss],
    optimizer: Optimizer,
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> Step:
    """Return a step of any library; `around` is entered for forward and backward."""

    def step() -> None:
        with around():
            loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_parallel_step(
    group: Group, model: nn.Module, loss: Callable[[], Tensor], rule: Callable[..., Optimizer]
) -> Step:
    """Return a step whose gradients are summed over the ranks in one bucket."""
    reducer = Bucketed(model, group, cap=1 << 30)
    return training_step(loss, rule(model.parameters()), reducer.reduce)


def mlp_step(widths=(784, 512, 512, 10), rows=128, device="cpu") -> Step:
    """MLP, by default 784-512-512-10 and batch 128; SGD."""
    random = np.random.default_rng(0)
    images = to_device(random.standard_normal((rows, widths[0]), np.float32), device)
    labels = random.integers(0, widths[-1], rows)
    model = nn.MLP(widths).to(device)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    return training_step(lambda: nn.cross_entropy(model(images), labels), optimizer)


def transformer_step(
    vocab=96, width=128, heads=4, depth=4, context=64, batch=16, device="cpu"
) -> Step:
    """Transformer; AdamW."""
    tokens = np.random.default_rng(0).integers(0, vocab, (2, batch, context))
    model = nn.Transformer(vocab, width, heads, depth, context).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    return training_step(lambda: nn.cross_entropy(model(tokens[0]), tokens[1]), optimizer)


def chain_step(operations=1000) -> Step:
    """A chain of 1,000 tiny operations on 4 numbers, forward and backward."""
    return chain_of(Tensor(np.ones(4, np.float32), requires_grad=True), operations)


def chain_of(x: Any, operations: int) -> Step:
    """Return a chain of operations on a tensor of any library."""

    def step() -> None:
        y = x
        for _ in range(operations // 2):
            y = y * 1.0001
            y = y + x
        y.sum().backward()
        x.grad = None

    return step


def convolution_step(images=(32, 16, 28, 28), filters=32) -> Step:
    """Forward and backward of one convolution of 3 x 3, by default of 32 filters; no optimizer."""
    x = np.random.default_rng(0).standard_normal(images, np.float32)
    layer = nn.Conv2d(images[1], filters, 3, padding=1)
    grad = np.ones((images[0], filters, *images[2:]), np.float32)

    def step() -> None:
        layer(Tensor(x, requires_grad=True)).backward(grad)
        layer.zero_grad()

    return step


def product(size: int, dtype: str, device: str = "cpu") -> Step:
    """Return a call that multiplies two matrices of this size."""
    random = np.random.default_rng(0)
    a, b = (to_device(random.random((size, size), np.float32), device) for _ in range(2))
    return partial(matmul, a.astype(dtype), b.astype(dtype))
