"""Time training steps against PyTorch eager: one BLAS thread, float32, interleaved."""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.backend import keep_freed_memory, to_device
from minidist.tools.bench.run_peer import Peer, torch_peer

CHAIN = 1000


def mlp_step(widths=(784, 512, 512, 10), rows=128, device="cpu"):
    """MLP, by default 784-512-512-10 and batch 128; SGD."""
    random = np.random.default_rng(0)
    images = to_device(random.standard_normal((rows, widths[0]), np.float32), device)
    labels = random.integers(0, widths[-1], rows)
    model = nn.MLP(widths).to(device)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)

    def step():
        nn.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer_step(vocab=96, width=128, heads=4, depth=4, context=64, batch=16, device="cpu"):
    """Transformer; AdamW."""
    tokens = np.random.default_rng(0).integers(0, vocab, (2, batch, context))
    model = nn.Transformer(vocab, width, heads, depth, context).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        nn.cross_entropy(model(tokens[0]), tokens[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def chain_step():
    """A chain of 1,000 tiny operations on 4 numbers, forward and backward."""
    x = Tensor(np.ones(4, np.float32), requires_grad=True)

    def step():
        y = x
        for _ in range(CHAIN // 2):
            y = y * 1.0001
            y = y + x
        y.sum().backward()
        x.grad = None

    return step


def convolution_step(images=(32, 16, 28, 28), filters=32):
    """Forward and backward of one convolution of 3 x 3, by default of 32 filters; no optimizer."""
    x = np.random.default_rng(0).standard_normal(images, np.float32)
    layer = nn.Conv2d(images[1], filters, 3, padding=1)
    grad = np.ones((images[0], filters, *images[2:]), np.float32)

    def step():
        layer(Tensor(x, requires_grad=True)).backward(grad)
        layer.zero_grad()

    return step


LONG = {"width": 256, "context": 512, "batch": 2}
STEPS = {
    "MLP step": mlp_step,
    "Transformer step": transformer_step,
    "Transformer, 512 positions": functools.partial(transformer_step, **LONG),
    "Convolution": convolution_step,
    "1,000 tiny ops": chain_step,
}
LIMITS = dict(zip(STEPS, (1.5, 2.0, 2.0, 3.0, 1.0), strict=True))


def measure(rounds: int = 15) -> Iterator[dict]:
    """Yield a row per workload; its times are medians of `rounds` interleaved rounds.

    It holds name, minidist_ms, torch_ms and ratio (both None without PyTorch), limit, note.
    """
    keep_freed_memory()
    torch = torch_peer(STEPS, "eager")
    with threadpool_limits(1):
        for name, make in STEPS.items():
            theirs = _torch_step(name, torch)
            missing = isinstance(theirs, str)
            mine, *other = _interleave([make()] if missing else [make(), theirs], rounds)
            row = {"name": name, "minidist_ms": 1e3 * statistics.median(mine)}
            row |= {"torch_ms": None, "ratio": None, "limit": LIMITS[name]}
            row["note"] = theirs if missing else ""
            for times in other:
                row["torch_ms"] = 1e3 * statistics.median(times)
                row["ratio"] = statistics.median(a / b for a, b in zip(mine, times, strict=True))
            yield row


def _torch_step(name: str, torch: Peer) -> Callable | str:
    """Return PyTorch's step, to be called in this process, or why there is none.

    It is tried in a separate process first: a step that aborts or hangs would do so here, too.
    """
    if isinstance(answer := torch(), str):
        return answer
    try:
        from minidist.tools.bench import torch_eager

        step = torch_eager.STEPS[name]()
        step()
    except Exception as error:  # whatever it is, it is not ours
        return f"failed: {type(error).__name__}: {error}"
    return step


def _interleave(steps, rounds, repeats=10) -> list[list[float]]:
    """Time steps in turns, `repeats` calls each: a slow moment of the machine affects all.

    Steps that take longer than 0.2 s are called once each time.
    """
    begin = time.perf_counter()
    for step in steps:
        step()
    repeats = repeats if time.perf_counter() - begin < 0.2 * len(steps) else 1
    times = [[] for _ in steps]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for step, found in zip(steps, times, strict=True):
                begin = time.perf_counter()
                for _ in range(repeats):
                    step()
                found.append((time.perf_counter() - begin) / repeats)
            gc.collect()
    finally:
        gc.enable()
    return times


FORM = "{:<26}{:>11}{:>11}{:>8}{:>8}  {}"
HEAD = FORM.format("one BLAS thread, float32", "minidist", "PyTorch", "ratio", "limit", "").rstrip()


def line(row: dict) -> str:
    """Return a row of `measure` for people."""
    torch = [f"{row['torch_ms']:.2f} ms", f"{row['ratio']:.2f}"] if row["ratio"] else ["-", "-"]
    cells = [row["name"], f"{row['minidist_ms']:.2f} ms", *torch, row["limit"], row["note"]]
    return FORM.format(*cells).rstrip()
