"""Optimizers: one elementwise rule over flat vectors, in pieces that stay in the cache.

optimizer.py  what all rules share: settings, state, a step
clipping.py   the global norm, and gradients scaled by it
sgd.py, adagrad.py, adam.py   the rules; adam.py has AdamW, too
"""

from minidist.optim.adagrad import Adagrad
from minidist.optim.adam import Adam, AdamW
from minidist.optim.clipping import PIECE, sum_of_squares
from minidist.optim.optimizer import Optimizer, check_setting
from minidist.optim.sgd import SGD

__all__ = [
    "PIECE",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "check_setting",
    "sum_of_squares",
]
