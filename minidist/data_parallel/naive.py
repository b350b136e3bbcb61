"""Data parallelism, naively: after backward, sum each parameter's gradient over the ranks.

Letters: n targets in the whole batch, m_k of them in rank k's shard, l_i the loss of target i. One
device computes

    dw = d/dw (1/n) sum_i l_i  =  sum_k (m_k / n) d/dw (1/m_k) sum_{i in shard k} l_i,

the mean of the shards' gradients, each weighted by its size. A loss that divides by the n of the
whole batch (`reduction_size`) already contains these weights. Rank k's backward computes

    (1/n) sum_{i in shard k} dl_i/dw,

so only a sum over the ranks is left to do. No factor is applied after the loss, and uneven or empty
shards need no special case.

Layouts: X[B/dp, ...] -> dW{+dp}, a partial sum on every rank -> all_reduce -> dW.

Every rank must begin with the same weights, because only gradients are exchanged:
call `check_same_weights(model, group)` (replicas.py) once to check it.

Bytes: 2 (N - 1) times the parameters' size from all N ranks together; 2 (N - 1) / N from each, up
to rounding where N does not divide a parameter.
"""

from minidist.comm import Group
from minidist.nn import Module
from minidist.replicas import check_batch_norm, summed_ranks


def all_reduce_gradients(model: Module, group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    check_batch_norm(model, group.size)
    for name, p in model.named_parameters().items():
        if p.requires_grad:
            ranks = summed_ranks(p, group)  # ValueError if it is a sum over them already
            grad = p.xp.zeros_like(p.data, p.grad_dtype) if p.grad is None else p.grad
            p.grad = group.all_reduce(grad, label=name)
            p.note_sum(ranks)
