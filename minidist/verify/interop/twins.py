"""Our models in plain PyTorch, each parameter under our own name: `twin(model)`.

Nothing here is fast or clever. It is what one would write by hand, so that a difference is found
by reading two short texts. Letters as in nn: B batch, T positions, C width, H heads, D = C / H.
"""

from collections import OrderedDict
from functools import partial

from torch import nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from minidist import nn as ours
from minidist.errors import WrongInput
from minidist.nn.cnn import ConvBlock as OurBlock
from minidist.nn.cnn import Stem
from minidist.nn.embedding import PAD
from minidist.verify.interop.torch import load_torch

ACTIVATIONS = {"identity": lambda x: x, "relu": relu, "gelu": partial(gelu, approximate="tanh")}


def twin(model: ours.Module) -> nn.Module:
    """Return the same model in PyTorch, with copies of its weights, in its dtype, in training."""
    make = {
        ours.MLP: MLP,
        ours.Transformer: Transformer,
        ours.Seq2Seq: Seq2Seq,
        ours.CNN: CNN,
    }.get(type(model))
    if make is None:
        raise WrongInput(
            f"there is no twin of a {type(model).__name__}; write the module in PyTorch, and give "
            "its weights by torch.to_torch"
        )
    return load_torch(make(model), model)


class MLP(nn.Module):
    def __init__(self, model: ours.MLP):
        super().__init__()
        layers = list(model.modules(ours.Linear))
        self.layers = nn.ModuleList(map(_linear, layers))
        self.activations = [ACTIVATIONS[layer.activation] for layer in layers]

    def forward(self, x):
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        return x


def _linear(layer: ours.Linear) -> nn.Linear:
    columns, rows = layer.weight.shape
    return nn.Linear(columns, rows, bias=layer.bias is not None)


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(B, T, C))


class PaddedAttention(nn.Module):
    """Queries of x[B, T, C]; keys and values of memory[B, S, C], where held[B, S] is true."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x, memory, held):
        (B, T, C), S = x.shape, memory.shape[1]
        q = self.query(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(memory).view(B, S, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=held[:, None, None, :])
        return self.output(mixed.transpose(1, 2).reshape(B, T, C))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def feed_forward(self, x):
        return self.contract(gelu(self.expand(x), approximate="tanh"))


class Block(FeedForward):
    def __init__(self, width, heads):
        super().__init__(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Embedding(nn.Module):
    def __init__(self, vocab, width, context):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x))


class Transformer(nn.Module):
    def __init__(self, model: ours.Transformer):
        super().__init__()
        if model.experts:
            raise WrongInput("there is no twin of a Transformer with experts; use experts=0")
        heads = [block.attention.heads for block in model.modules(ours.Block)]
        (head,) = model.modules(ours.Head)
        C = head.norm.gain.size
        self.embedding = Embedding(model.vocab, C, model.context)
        self.blocks = nn.Sequential(*[Block(C, H) for H in heads])
        self.head = Head(C, model.vocab)
        if head.tied:
            self.head.linear.weight = self.embedding.token.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class EncoderBlock(FeedForward):
    def __init__(self, width, heads):
        super().__init__(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PaddedAttention(width, heads)

    def forward(self, x, held):
        h = self.norm_1(x)
        x = x + self.attention(h, h, held)
        return x + self.feed_forward(self.norm_2(x))


class DecoderBlock(FeedForward):
    def __init__(self, width, heads):
        super().__init__(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_source, self.norm_3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.cross = PaddedAttention(width, heads)

    def forward(self, x, source, held):
        x = x + self.attention(self.norm_1(x))
        x = x + self.cross(self.norm_2(x), self.norm_source(source), held)
        return x + self.feed_forward(self.norm_3(x))


class Seq2Seq(nn.Module):
    def __init__(self, model: ours.Seq2Seq):
        super().__init__()
        self.split, width = model.source_length, model.embedding.source.token.weight.shape[1]
        sides = (model.source_vocab, model.source_length), (model.vocab, model.target_length)
        source, target = (Embedding(vocab, width, length) for vocab, length in sides)
        self.embedding = nn.ModuleDict({"source": source, "target": target})
        of = partial(_blocks, model, width)
        self.encoder = of(ours.EncoderBlock, EncoderBlock)
        self.decoder = of(ours.DecoderBlock, DecoderBlock)
        self.head = Head(width, model.vocab)

    def forward(self, tokens):
        source, target = tokens[:, : self.split], tokens[:, self.split :]
        x, y = self.embedding["source"](source), self.embedding["target"](target)
        held = source != PAD
        for block in self.encoder:
            x = block(x, held)
        for block in self.decoder:
            y = block(y, x, held)
        return self.head(y)


def _blocks(model, width, kind, make) -> nn.ModuleList:
    return nn.ModuleList(make(width, block.attention.heads) for block in model.modules(kind))


class ConvBlock(nn.Module):
    """relu(x' + norm(conv(relu(norm(conv(x)))))), x' pooled where the channels grow."""

    def __init__(self, before, after):
        super().__init__()
        stride = 2 if before != after else 1
        self.first = _conv_norm(before, after, 3, stride)
        self.second = _conv_norm(after, after, 3)
        self.skip = None if before == after else _conv_norm(before, after, 1)

    def forward(self, x):
        y = self.second(relu(self.first(x)))
        return relu(y + (x if self.skip is None else self.skip(nn.functional.avg_pool2d(x, 2))))


def _conv_norm(before, after, k, stride=1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, k, stride, padding=k // 2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(after)))


class CNN(nn.Module):
    def __init__(self, model: ours.CNN):
        super().__init__()
        (stem,), blocks = model.modules(Stem), list(model.modules(OurBlock))
        (head,) = (layer for layer in model.modules(ours.Linear))
        pixels, first = stem.first.conv.weight.shape[1::-1]
        channels = [block.first.conv.weight.shape[1::-1] for block in blocks]
        self.stem = _conv_norm(pixels, first, 3)
        self.blocks = nn.Sequential(*[ConvBlock(before, after) for before, after in channels])
        self.head = _linear(head)

    def forward(self, x):
        return self.head(self.blocks(relu(self.stem(x))).mean(dim=(2, 3)))
