"""The single-device models. They know nothing about ranks.

A module maps a tensor, and a `Randomness` if it has dropout, to a tensor. A model is the
composition of its `model.layers`; a pipeline cuts between them. Read `module.py`, `parameter.py`,
`shard.py`, `flat_parameters.py`, then the layers (`linear.py`, `norms.py`, `dropout.py`,
`embedding.py`, `attention.py`, `rotary.py`), then `mlp.py`, `siamese.py`, `cnn.py`, `router.py`,
`mixture_of_experts.py`, `transformer.py`, `llama.py`, `seq2seq.py`, `key_value_cache.py`,
`generate.py` and `dual.py`.
"""

from minidist.autograd.losses import IGNORED, counted, cross_entropy, squared_error
from minidist.nn.attention import CausalSelfAttention, GroupedQueryAttention, PaddedAttention
from minidist.nn.cnn import CNN, AveragePool, Conv2d
from minidist.nn.dropout import Dropout
from minidist.nn.dual import Dual
from minidist.nn.embedding import Embedding, TokenAndPosition
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.nn.key_value_cache import CachedDecoder, CachedTranslator
from minidist.nn.linear import Linear
from minidist.nn.llama import Llama
from minidist.nn.mixture_of_experts import MixtureOfExperts, mixtures
from minidist.nn.mlp import MLP, Expert, Residual, ResidualMLP
from minidist.nn.module import Module, Parameter, Sequential
from minidist.nn.norms import BatchNorm, LayerNorm, RMSNorm
from minidist.nn.router import BiasBalance, move_biases
from minidist.nn.seq2seq import DecoderBlock, EncoderBlock, Seq2Seq, SourceAndTarget
from minidist.nn.shard import Shard, Slice
from minidist.nn.siamese import Siamese
from minidist.nn.transformer import Block, ExpertBlock, Head, Transformer

__all__ = [
    "CNN",
    "IGNORED",
    "MLP",
    "AveragePool",
    "BatchNorm",
    "BiasBalance",
    "Block",
    "CachedDecoder",
    "CachedTranslator",
    "CausalSelfAttention",
    "Conv2d",
    "DecoderBlock",
    "Dropout",
    "Dual",
    "Embedding",
    "EncoderBlock",
    "Expert",
    "ExpertBlock",
    "FlatParameters",
    "FlatSlice",
    "GroupedQueryAttention",
    "Head",
    "LayerNorm",
    "Linear",
    "Llama",
    "MixtureOfExperts",
    "Module",
    "PaddedAttention",
    "Parameter",
    "RMSNorm",
    "Residual",
    "ResidualMLP",
    "Seq2Seq",
    "Sequential",
    "Shard",
    "Siamese",
    "Slice",
    "SourceAndTarget",
    "TokenAndPosition",
    "Transformer",
    "counted",
    "cross_entropy",
    "mixtures",
    "move_biases",
    "squared_error",
]
