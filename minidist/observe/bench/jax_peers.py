"""The times of JAX: whole training steps under `jax.jit`, in float32, on one core.

    python -m minidist.observe.bench.jax_peers '{"MLP": ["mlp_step", {}]}'

Prints one JSON object: {workload: median seconds}. The models are ours, with our weights and our
names for them. Of `steps.py` it has what XLA can compile as one program that does the same
work: a chain of tiny operations becomes another one.
Letters: B batch, T positions, C width, H heads, D head width.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from minidist import nn
from minidist.observe.bench.steps import makers
from minidist.observe.bench.table import Step, Times, times_of
from minidist.observe.step_parts import ProcessClock

Weights = dict[str, Any]  # of JAX's arrays
Loss = Callable[[Weights, Any, Any], Any]


def steps(works: str) -> Times:
    """Time the workloads of `steps.py`, each as one compiled call."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # XLA's own flags leave two threads
    return times_of(makers(sys.modules[__name__], json.loads(works)), clock=ProcessClock)


def mlp_step(widths=(784, 512, 512, 10), rows=128) -> Step:
    random = np.random.default_rng(0)
    images = random.standard_normal((rows, widths[0]), np.float32)
    labels = random.integers(0, widths[-1], rows)

    def loss(w: Weights, x, y):
        for i in range(len(widths) - 2):
            x = jax.nn.relu(linear(w, f"layers.{i}", x))
        return cross_entropy(linear(w, f"layers.{len(widths) - 2}", x), y)

    return _step(nn.MLP(widths), loss, sgd, images, labels)


def transformer_step(vocab=96, width=128, heads=4, depth=4, context=64, batch=16) -> Step:
    tokens = np.random.default_rng(0).integers(0, vocab, (2, batch, context))
    loss = partial(transformer_loss, heads, depth)
    return _step(nn.Transformer(vocab, width, heads, depth, context), loss, adamw, *tokens)


def transformer_loss(heads: int, depth: int, w: Weights, tokens, targets):
    """Return the mean loss of nn.Transformer with these weights."""
    x = w["embedding.token.weight"][tokens] + w["embedding.position.weight"]
    for block in (f"blocks.{i}" for i in range(depth)):
        x = x + attention(w, f"{block}.attention", norm(w, f"{block}.norm_1", x), heads)
        hidden = jax.nn.gelu(linear(w, f"{block}.expand", norm(w, f"{block}.norm_2", x)))
        x = x + linear(w, f"{block}.contract", hidden)
    return cross_entropy(norm(w, "head.norm", x) @ w["head.linear.weight"], targets)


def attention(w: Weights, name: str, x, heads: int):
    """Causal self-attention: X[B, T, C] -> Y[B, T, C]."""
    B, T, C = x.shape
    qkv = linear(w, f"{name}.qkv", x).reshape(B, T, 3, heads, C // heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # [B, H, T, D]
    scores = q @ k.swapaxes(-1, -2) * (C // heads) ** -0.5
    p = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
    return linear(w, f"{name}.output", (p @ v).transpose(0, 2, 1, 3).reshape(B, T, C))


def linear(w: Weights, name: str, x):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def norm(w: Weights, name: str, x, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * scale * w[f"{name}.gain"] + w[f"{name}.bias"]


def cross_entropy(logits, targets):
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


def sgd(t, p, g, m, v):
    """Return the new parameter, and the two averages, which are not used."""
    return p - 1e-3 * g, m, v


def adamw(t, p, g, m, v):
    """Return the new parameter and the new averages; t counts the steps from 1."""
    lr, b1, b2, eps, decay = 1e-4, 0.9, 0.999, 1e-8, 0.01
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
    return (1 - lr * decay) * p - lr * m_hat / (jnp.sqrt(v_hat) + eps), m, v


def _step(model: nn.Module, loss: Loss, rule: Callable, inputs, targets) -> Step:
    """Return a call that trains once, in place, and returns the loss from before."""

    @partial(jax.jit, donate_argnums=0)
    def train(state, x, y):
        t, weights, *averages = state
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        new = {k: rule(t, w, gradients[k], *(a[k] for a in averages)) for k, w in weights.items()}
        return (t + 1, *({k: three[i] for k, three in new.items()} for i in range(3))), value

    weights = {name: jnp.array(w) for name, w in model.state().items()}
    zeros = ({name: jnp.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    state: tuple = (jnp.float32(1), weights, *zeros)
    inputs, targets = jnp.asarray(inputs), jnp.asarray(targets)

    def step():
        nonlocal state
        state, value = train(state, inputs, targets)
        return jax.block_until_ready((state, value))[1]

    return step


if __name__ == "__main__":
    print(json.dumps(steps(sys.argv[1])))
