"""The single-device models. They know nothing about ranks.

A module maps a tensor, and a `Randomness` if it has dropout, to a tensor. A model is the
composition of its `model.layers`; a pipeline cuts between them. Read `module.py`,
`flat_parameters.py`, then the layers, then `mlp.py`, `residual.py`, `siamese.py` and
`transformer.py`.
"""

from minidist.autograd.losses import cross_entropy, squared_error
from minidist.nn.attention import CausalSelfAttention
from minidist.nn.dropout import Dropout
from minidist.nn.embedding import Embedding, TokenAndPosition
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.nn.layer_norm import LayerNorm
from minidist.nn.linear import Linear
from minidist.nn.mlp import MLP
from minidist.nn.module import Module, Parameter, Sequential
from minidist.nn.residual import Residual, ResidualMLP
from minidist.nn.shard import Shard
from minidist.nn.siamese import Siamese
from minidist.nn.transformer import Block, Head, Transformer

__all__ = [
    "MLP",
    "Block",
    "CausalSelfAttention",
    "Dropout",
    "Embedding",
    "FlatParameters",
    "FlatSlice",
    "Head",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "Residual",
    "ResidualMLP",
    "Sequential",
    "Shard",
    "Siamese",
    "TokenAndPosition",
    "Transformer",
    "cross_entropy",
    "squared_error",
]
