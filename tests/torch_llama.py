"""A Llama as PyTorch programs write it, right or with one mistake; it needs PyTorch."""

from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu


class Llama(nn.Module):
    """Keys, values, gate and up are arrays of their own; an RMSNorm's gain is its weight."""

    def __init__(self, V, C, H, K, L, F, mistake=""):
        super().__init__()
        self.H, self.K, self.mistake, linear = H, K, mistake, partial(nn.Linear, bias=False)
        eps = {"eps": 1e-6, "eps of PyTorch": None}.get(mistake, 1e-5)
        norm = partial(nn.RMSNorm, C, eps=eps)
        if mistake == "layer norm":
            norm = partial(nn.LayerNorm, C, bias=False)
        self.embed, D = nn.Embedding(V, C), C // H
        shapes = {"q": (C, C), "k": (C, K * D), "v": (C, K * D), "o": (C, C)}
        shapes |= {"gate": (C, F), "up": (C, F), "down": (F, C)}
        block = {name: linear(*shape) for name, shape in shapes.items()}
        block = nn.ModuleDict(block | {"n1": norm(), "n2": norm()})
        self.blocks = nn.ModuleList(deepcopy(block) for _ in range(L))
        self.norm, self.lm_head = norm(), linear(C, V)
        self.double()

    def turned(self, x):
        """x[B, H, T, D], turned by its positions."""
        if self.mistake == "no rotary":
            return x
        T, D = x.shape[-2:]
        theta = 500000.0 if self.mistake == "theta" else 10000.0
        angles = torch.arange(T)[:, None] * theta ** (-torch.arange(0, D, 2).double() / D)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        if self.mistake == "neighbours":
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attention(self, block, x):
        B, T, C = x.shape
        q, k, v = (block[n](x).view(B, T, -1, C // self.H).transpose(1, 2) for n in "qkv")
        q, k, G = self.turned(q), self.turned(k), self.H // self.K
        repeated = partial(torch.repeat_interleave, repeats=G, dim=1)
        if self.mistake == "repeat":
            repeated = partial(torch.tile, dims=(1, G, 1, 1))
        scale = 1.0 if self.mistake == "no scale" else None
        causal = self.mistake != "no mask"
        mixed = scaled_dot_product_attention(
            q, repeated(k), repeated(v), is_causal=causal, scale=scale
        )
        return block["o"](mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, block, x):
        gate, up = block["gate"](x), block["up"](x)
        if self.mistake == "up first":
            gate, up = up, gate
        return block["down"]((gelu if self.mistake == "gelu" else silu)(gate) * up)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.mistake == "post-norm":
                x = block["n1"](x + self.attention(block, x))
                x = block["n2"](x + self.feed_forward(block, x))
            else:
                x = x + self.attention(block, block["n1"](x))
                x = x + self.feed_forward(block, block["n2"](x))
        return self.lm_head(self.norm(x))


def names(L):
    """Return what the parts of our Llama are called in this one."""
    inner = {"norm_1": "n1", "attention.query": "q", "attention.output": "o", "norm_2": "n2"}
    inner |= {"attention.key_value": ["k", "v"], "expand": ["gate", "up"], "contract": "down"}
    found = {"embedding.token": "embed", "head.norm": "norm", "head.linear": "lm_head"}
    for i in range(L):
        for ours, theirs in inner.items():
            of_block = [f"blocks.{i}.{name}" for name in theirs]
            found[f"blocks.{i}.{ours}"] = (
                of_block if isinstance(theirs, list) else f"blocks.{i}.{theirs}"
            )
    return found
