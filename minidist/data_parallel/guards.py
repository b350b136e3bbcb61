"""What would make a sum over replicas wrong, checked beside the sums and not in them.

Three mistakes give no error by themselves: replicas that begin with different weights, a batch norm
with the statistics of one rank's examples, and a gradient that is summed over the ranks twice.
"""

from minidist.comm import Group
from minidist.nn import Module
from minidist.replicas import check_batch_norm, check_same_weights


def check_replicas(model: Module, group: Group, weights: bool = True) -> Group | None:
    """Raise ValueError unless the ranks can train their copies of a model on parts of a batch.

    weights  whether to compare the weights of all ranks

    Return the ranks that must load the same state later, or None to skip this comparison, too.
    """
    check_batch_norm(model, group.size)
    if weights:
        check_same_weights(model, group)
    return group if weights else None
