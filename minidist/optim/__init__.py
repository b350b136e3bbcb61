"""Optimizers: one elementwise rule over flat vectors, in pieces that stay in the cache.

optimizer.py  what all rules share: settings, state, a step
clipping.py   the global norm, and gradients scaled by it
sgd.py, adagrad.py, adam.py   the rules; adam.py has AdamW, too
stochastic_rounding.py   16-bit weights without float32 copies
muon.py       a rule for whole matrices, made of many elements' momentum at once
"""

from minidist.optim.adagrad import Adagrad
from minidist.optim.adam import Adam, AdamW
from minidist.optim.clipping import PIECE, sum_of_squares
from minidist.optim.muon import Muon
from minidist.optim.optimizer import Optimizer, check_setting
from minidist.optim.sgd import SGD
from minidist.optim.stochastic_rounding import StochasticRounding

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
