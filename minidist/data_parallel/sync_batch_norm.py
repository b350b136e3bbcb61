"""Batch normalisation of a batch that is split over ranks, by the statistics of all of it.

Peng et al., MegDet (CVPR 2018): batch normalisation across GPUs. One exchange of sums each way, as
here: Zhang, https://hangzhang.org/blog/SynchronizeBN. Letters: C channels; count: numbers per
channel in the whole batch.

A rank's own mean and variance are of a smaller batch: another model, with another gradient, which
no average over ranks makes right. So every BatchNorm layer adds up over the ranks

    forward    (count, sum X, sum X^2)  2 C + 1 numbers, float64    -> mean, variance
    backward   (sum dY, sum dY n)       2 C numbers                 -> dX of the whole batch

of its own examples, where n is X normalised. (A first layer has no dX, and sends nothing backward.)

Sums, not means: a rank with more examples counts more, and one without examples adds zeros. What
the sums do in the formulas, and why they travel in float64, is in autograd/batch_norm.py. Gain and
bias get this rank's part of their gradient, as all parameters do; data parallelism sums it.

Layouts: X[B/dp, C, ...] -> mean[C]{+dp} -> all_reduce -> mean[C], the same bits on every rank. So
the running statistics stay equal, too; their variance is unbiased, by the whole batch's count.
"""

from minidist.comm import Group
from minidist.nn import BatchNorm, Module
from minidist.parallel import sum_statistics


def sync_batch_norm(model: Module, group: Group) -> Module:
    """Let every BatchNorm of a model use the statistics of all ranks' examples; return the model.

    Call it before a strategy takes the model. While it trains, every rank must run forward and
    backward of every batch, also on an empty shard.
    """
    for norm in model.modules(BatchNorm):
        sum_statistics(norm, group)
    return model
