"""Time training steps against their own products, PyTorch and JAX: one core, float32.

Times are a process's own, on its core, because only one of its threads works at a time: what else
runs on the machine has its effect on the caches alone. The ratio to a peer depends on the
processor, for which each has another BLAS. The share of a step's own products does not: they are
computed by the BLAS that the step has.

A workload (steps.toml) is (the function that prepares it, its arguments). Here and in
`torch_peers.py` and `jax_peers.py` are functions of these names, which return a call.
"""

import contextlib
import importlib.util
import json
import platform
import re
import sys
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.backend import keep_freed_memory, matmul, to_device
from minidist.nn.datasets import Batch
from minidist.observe.bench.table import (
    Rounds,
    Step,
    Works,
    peer,
    remark,
    rounds_of,
    times_of,
)
from minidist.observe.step_parts import ProcessClock, computed_again, products_of
from minidist.parallel.trainer import Trainer

Work = tuple[str, dict[str, Any]]  # the arguments are as different as the workloads

WORKLOADS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
GPU_SIZES = WORKLOADS["gpu_sizes"]  # {name: [usual, most, meaning]}
STEPS: dict[str, Work] = {
    name: (function, arguments)
    for function, described in WORKLOADS["steps"].items()
    for name, arguments in described["works"].items()
}
AIMS: dict[str, dict[str, float | None]] = {  # {function: {contestant: the largest ratio}}
    function: {
        contestant: described["aims"].get(contestant) for contestant in described["contestants"]
    }
    for function, described in WORKLOADS["steps"].items()
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


def training_step(loss: Callable[[], Any], optimizer: Any) -> Step:
    """Return a step of any library."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer_step(trainer: Trainer, rule: Callable, batch: Batch) -> Step:
    """Return a step on a batch that every rank has."""
    optimizer = rule(trainer.parameters())

    def step() -> None:
        trainer.backward(batch)
        trainer.step(optimizer)

    return step


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


TITLE = "one core, float32, time on it"
ALONE = "{}: products"  # what the products of a workload are called among the times


def rows(rounds: int = 5) -> Iterator[dict]:
    """Yield what the machine is; then for each workload a row per contestant."""
    yield remark("machine", machine())
    keep_freed_memory()
    works = makers(sys.modules[__name__], STEPS)
    ours = partial(times_of, with_products(works), clock=ProcessClock)
    eager, compiled, jax = (
        json.dumps(works_of("PyTorch")),
        json.dumps(works_of("torch.compile", compiled=True)),
        json.dumps(works_of("JAX")),
    )
    peers = {
        "PyTorch": peer("torch", "steps", "cpu", eager),
        "torch.compile": peer("torch", "steps", "cpu", compiled, compiles=True),
        "JAX": peer("jax", jax, compiles=True),
    }
    contest = rounds_of(rounds, ours=ours, **peers)
    for name, (function, _) in STEPS.items():
        for contestant, aim in AIMS[function].items():
            if contestant == "products":
                yield of_products(contest, name, aim, peak_bytes(works[name]))
            else:
                yield contest.row(name, name, contestant, aim)


def works_of(contestant: str, **more) -> dict[str, Work]:
    """Return the workloads that a contestant has, with more arguments."""
    return {
        name: (function, arguments | more)
        for name, (function, arguments) in STEPS.items()
        if contestant in AIMS[function]
    }


def with_products(works: Works) -> Works:
    """Return the workloads, each followed by its products alone."""
    have, followed = works_of("products"), {}
    for name, make in works.items():
        followed[name] = make
        if name in have:
            followed[ALONE.format(name)] = partial(products_alone, make)
    return followed


def products_alone(make: Callable[[], Step]) -> Step:
    """Return a call that computes only the products of a step: the second, as it is timed."""
    step = make()
    step()
    return computed_again(products_of(step))


def of_products(contest: Rounds, name: str, aim: float | None, peak: int) -> dict:
    """Return the row of a step beside its products, and what its arrays take at most."""
    row = contest.row(name, name, "ours", aim, theirs=ALONE.format(name))
    note = f"products {100 / row['ratio']:.0f} %, peak {peak / 1e6:.0f} MB"
    return row | {"peer": "products", "note": note}


def peak_bytes(make: Callable[[], Step]) -> int:
    """Return the most bytes that are held at once in a step, with weights and optimizer.

    tracemalloc, to which NumPy reports its arrays, is off while steps are timed.
    """
    tracemalloc.start()
    try:
        with threadpool_limits(1):
            step = make()
            step()  # makes what stays: gradients, the optimizer's state
            tracemalloc.reset_peak()
            step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def machine() -> str:
    """Return the names of the processor, of NumPy's BLAS, and the versions of peers."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = re.findall(r"^model name\s*: (.*)", text, re.MULTILINE) or [platform.machine()]
    kernels = [
        f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'one kernel')})"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    packages = [name for name in ("torch", "jax") if importlib.util.find_spec(name)]
    with contextlib.suppress(PackageNotFoundError):
        kernels += [f"{name} {version(name)}" for name in packages]
    return ", ".join([models[0], *kernels])
