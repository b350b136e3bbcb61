"""The workloads of `steps.py` and `gpu.py` in PyTorch eager (needs the extra `bench`).

They are where `with torch.device(...)` says; by default on the host, with one thread.
"""

import functools
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from minidist.events import Clock
from minidist.tools.bench.steps import LONG

torch.set_num_threads(1)


def mlp_step(widths=(784, 512, 512, 10), rows=128):
    images, labels = torch.randn(rows, widths[0]), torch.randint(0, widths[-1], (rows,))
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return _step(model, torch.optim.SGD(model.parameters(), lr=1e-3), images, labels)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.contract(gelu(self.expand(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocab, width, heads, depth, context):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def transformer_step(vocab=96, width=128, heads=4, depth=4, context=64, batch=16):
    tokens = torch.randint(0, vocab, (2, batch, context))
    model = Transformer(vocab, width, heads, depth, context)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens[0], tokens[1])


def _step(model, optimizer, inputs, targets):
    def step():
        logits = model(inputs)
        cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def chain_step():
    x = torch.ones(4, requires_grad=True)

    def step():
        y = x
        for _ in range(500):
            y = y * 1.0001
            y = y + x
        y.sum().backward()
        x.grad = None

    return step


def convolution_step(images=(32, 16, 28, 28), filters=32):
    x, layer = torch.randn(images), nn.Conv2d(images[1], filters, 3, padding=1)
    grad = torch.ones(images[0], filters, *images[2:])

    def step():
        layer(x.detach().requires_grad_()).backward(grad)
        layer.zero_grad()

    return step


STEPS = {
    "MLP step": mlp_step,
    "Transformer step": transformer_step,
    "Transformer, 512 positions": functools.partial(transformer_step, **LONG),
    "Convolution": convolution_step,
    "1,000 tiny ops": chain_step,
}


def product(size, dtype):
    a, b = torch.rand(2, size, size, dtype=getattr(torch, dtype))
    return lambda: torch.matmul(a, b)


class TorchClock(Clock):
    """The clock of PyTorch's current GPU; see backend.DeviceClock."""

    def __init__(self):
        self.first = self.now()

    def now(self):
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def seconds(self, moment):
        moment.synchronize()
        return self.first.elapsed_time(moment) / 1e3


def profiled(step: Callable) -> list[tuple[str, bool]]:
    """Return (name, whether it is work of the GPU) of all that a step does, and one last wait.

    The profiler reads CUDA's own tracing, which sees the work of other libraries, too.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return [(event.name, event.device_type == DeviceType.CUDA) for event in seen.events()]
