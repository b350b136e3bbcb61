"""Parameters that are split: a rank's part of one, the whole arrays, the norm of the gradient."""

import numpy as np

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.parallel import sum_squares_over

SPLIT = (
    "matrices that are split: pass sum_squares=partial(tensor_parallel.sum_squares, model, group)"
)


def rows_of(p: nn.Parameter, rows: np.ndarray) -> nn.Parameter:
    """Return p[rows], the rank's part of a whole parameter."""
    return p.part(nn.Shard(0, rows, p.shape[0]), SPLIT)


def columns_of(p: nn.Parameter, columns: np.ndarray, copy: int = 0) -> nn.Parameter:
    """Return p[..., columns], the rank's part of a whole parameter: of a matrix, or of a bias."""
    return p.part(nn.Shard(p.ndim - 1, columns, p.shape[-1], copy), SPLIT)


def sum_squares(model: nn.Module, group: Group, own: float | None = None) -> float:
    """Return the sum of the squares of the whole gradient of a model whose matrices are split.

    Pass `partial(sum_squares, model, group)` to Optimizer.clip_global_norm. If the sequence is
    split, call all_reduce_partial first.

    own  the optimizer's sum, used only as a check: on each rank it includes what all ranks hold
    """
    parameters = model.parameters()
    return sum_squares_over(counted_here(parameters, group), parameters, own, group)


def counted_here(parameters: list[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """Return the parameters that count here: parts, and on the first rank also the whole ones.

    A part that several ranks hold counts on the first of them.
    """
    return [p for p in parameters if (p.shard.copy if p.shard else group.rank) == 0]


def unsplit(part: Array, p: nn.Parameter, group: Group) -> Array:
    """Return the whole array, given this rank's part of it, which is shaped like parameter p."""
    if p.shard is None:
        return part.copy()
    return p.shard.join(group.all_gather(part, p.shard.axis), group.all_gather(p.shard.indices))
