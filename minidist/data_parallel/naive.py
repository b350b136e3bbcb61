"""Data parallelism, naively: after backward, sum each parameter's gradient over the ranks.

Goyal et al. 2017, section 3, remark 3 (divide by the whole batch's size); Li et al., PyTorch
Distributed (VLDB 2020), section 3.2.1, whose gradients are a mean of means.

Letters: N ranks; n targets in the whole batch, n_r of them in rank r's shard, l_i the loss of
target i. One device computes

    dw = d/dw (1/n) sum_i l_i  =  sum_r (n_r / n) d/dw (1/n_r) sum_{i in shard r} l_i,

the mean of the shards' gradients, each weighted by its size. A loss that divides by the n of the
whole batch (`reduction_size`) already contains these weights. Rank r's backward computes

    (1/n) sum_{i in shard r} dl_i/dw,

so only a sum over the ranks is left to do. Uneven or empty shards need no special case.

Layouts: X[B/dp, ...] -> dW{+dp}, a partial sum on every rank -> all_reduce -> dW.

Every rank must begin with the same weights: DataParallel (replicated.py) checks it once.

Bytes: 2 (N - 1) times the parameters' size from all N ranks together; 2 (N - 1) / N from each, up
to rounding where N does not divide a parameter.
"""

from minidist.comm import Group
from minidist.nn import Module
from minidist.parallel import check_balance, check_statistics, gradient, sum_loads, summed_once


def all_reduce_gradients(model: Module, group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    check_statistics(model, group.size, loads=True)
    check_balance(model, group.size)
    for p in summed_once(model.parameters(), group):
        p.grad = group.all_reduce(gradient(p), label=p.name)
    sum_loads(model, group)
