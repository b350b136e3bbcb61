"""Losses: a sum over targets, divided by `reduction_size`.

Pass the number of targets of the whole optimizer update, over all ranks and micro-batches, as
`reduction_size`. Then gradients of parts only have to be summed, and the sum is the gradient of the
mean over all targets, also where the parts are uneven or empty. The default is the number of
targets at hand: the mean, right for one device and one batch.
"""

from minidist.autograd.functions import squared_error
from minidist.autograd.softmax import cross_entropy

__all__ = ["cross_entropy", "squared_error"]
