"""Sums of gradients, and of their squares, over ranks that hold copies or parts of one model."""

from collections.abc import Iterable, Iterator

import numpy as np

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import BiasBalance, Parameter
from minidist.nn.optim import sum_of_squares


def sum_gradients(parameters: Iterable[Parameter], group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    for p in summed_once(parameters, group):
        p.grad = group.all_reduce(gradient(p), label=p.name)


def gradient(p: Parameter) -> Array:
    """Return p's gradient; zeros if it has none."""
    return p.xp.zeros_like(p.data, p.format.grad_dtype) if p.grad is None else p.grad


def summed_once(parameters: Iterable[Parameter], group: Group) -> Iterator[Parameter]:
    """Yield the parameters that train; the loop gives each its sum over the ranks of the group.

    ValueError if a gradient is a sum over them already, which would be summed again.
    """
    for p in parameters:
        if p.requires_grad:
            ranks = summed_ranks(p, group)
            yield p
            p.summed_over = ranks


def summed_ranks(p: Parameter | BiasBalance, group: Group) -> frozenset[int]:
    """Return the ranks whose sum p's gradient, or load, will be once it is summed over the group.

    ValueError if it already contains a sum over two of the group's ranks, which would be summed
    again. Sums over two axes of a mesh may follow each other: these groups share only this rank.
    """
    before, ranks = p.summed_over, frozenset(group.members)
    if len(before & ranks) > 1:
        raise WrongInput(
            f"the gradient of {p.name} has a sum over the ranks {sorted(before)} in it, and would "
            "be summed over them again; call the model's zero_grad() after each step"
        )
    return before | ranks


def sum_squares_over(
    counted: Iterable[Tensor | Array], held: Iterable[Tensor], own: float | None, *groups: Group
) -> float:
    """Return the sum of the squares of gradients over all ranks of these groups.

    counted  the parameters, or the parts of gradients, that this rank counts, so that each counts
             once over all ranks
    held     all parameters of this rank
    own      an optimizer's own sum of squares, or None; ValueError if it is not the sum of `held`
    """
    if own is not None and abs(own - (all_of := squares(held))) > 1e-5 * max(own, all_of):
        raise WrongInput(
            f"on this rank the optimizer's gradients have a sum of squares of {own:.6g}, all "
            f"gradients {all_of:.6g}; clip by one optimizer that has all of the rank's parameters"
        )
    total = np.array(squares(counted))
    for group in groups:
        total = group.all_reduce(total, label="squares")
    return float(total)


def squares(counted: Iterable[Tensor | Array]) -> float:
    gradients = [x.grad if isinstance(x, Tensor) else x for x in counted]
    return float(sum(sum_of_squares(g.reshape(-1)) for g in gradients if g is not None))
