"""A model whose matrices are split, seen as a whole: its arrays, and the norm of its gradient."""

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.replicas import sum_squares_over

SPLIT = (
    "matrices that are split: pass sum_squares=partial(tensor_parallel.sum_squares, model, group)"
)


def sum_squares(model: nn.Module, group: Group, own: float | None = None) -> float:
    """Return the sum of the squares of the whole gradient of a model whose matrices are split.

    Pass `partial(sum_squares, model, group)` to Optimizer.clip_global_norm. If the sequence is
    split, call all_reduce_partial first.

    own  the optimizer's sum, used only as a check: on each rank it includes what all ranks hold
    """
    held = model.parameters()
    return sum_squares_over(counted_here(held, group), held, own, group)


def counted_here(parameters: list[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """Return what counts on this rank: its parts; on the first rank also what all ranks hold."""
    return [p for p in parameters if p.shard is not None or group.rank == 0]


def unsplit(part: Array, p: nn.Parameter, group: Group) -> Array:
    """Return the whole array, given this rank's part of it, which is shaped like parameter p."""
    if p.shard is None:
        return part.copy()
    return p.shard.join(group.all_gather(part, p.shard.axis), group.all_gather(p.shard.indices))
