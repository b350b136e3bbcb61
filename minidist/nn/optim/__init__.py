"""Optimizers: one elementwise rule over flat vectors, in pieces that stay in the cache.

optimizer.py  what all rules share: settings, state, a step, the global norm and clipping
rules.py      SGD, Adagrad, Adam, AdamW
stochastic_rounding.py   16-bit weights without float32 copies
muon.py       a rule for whole matrices, made of many elements' momentum at once
"""

from minidist.nn.optim.muon import Muon
from minidist.nn.optim.optimizer import PIECE, Optimizer, check_setting, sum_of_squares
from minidist.nn.optim.rules import SGD, Adagrad, Adam, AdamW
from minidist.nn.optim.stochastic_rounding import StochasticRounding

__all__ = [
    "PIECE",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Muon",
    "Optimizer",
    "StochasticRounding",
    "check_setting",
    "sum_of_squares",
]
