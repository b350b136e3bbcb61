"""The workloads of `steps.py` in PyTorch eager (needs the extra `bench`)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

torch.set_num_threads(1)


def mlp_step():
    images, labels = torch.randn(128, 784), torch.randint(0, 10, (128,))
    model = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
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


def transformer_step():
    tokens = torch.randint(0, 96, (2, 16, 64))
    model = Transformer(96, 128, 4, 4, 64)
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


STEPS = {"MLP step": mlp_step, "Transformer step": transformer_step, "1,000 tiny ops": chain_step}
