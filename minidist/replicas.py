"""Operations of ranks that hold parts or copies of one model: sum gradients, measure, compare.

sum_gradients       dW{+N} -> dW on every rank; never twice over the same ranks
sum_squares_over    the squared norm of a gradient that is spread over ranks
check_same_weights  check that replicas have the same weights
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from minidist.autograd import Tensor
from minidist.backend import Array, to_host
from minidist.comm import Group
from minidist.nn import Module
from minidist.optim import sum_of_squares


def sum_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    for p in parameters:
        if p.requires_grad:
            ranks = summed_ranks(p, group)
            grad = p.xp.zeros_like(p.data) if p.grad is None else p.grad
            p.grad = group.all_reduce(grad, label=p.name)
            p.note_sum(ranks)


def summed_ranks(p: Tensor, group: Group) -> frozenset[int]:
    """Return the ranks whose sum p's gradient will be once it is summed over the group.

    ValueError if it already contains a sum over two of the group's ranks, which would be summed
    again. Sums over two axes of a mesh may follow each other: these groups share only this rank.
    """
    before, ranks = p.summed_over, frozenset(group.members)
    if len(before & ranks) > 1:
        raise ValueError(
            f"the gradient of {p.name} has a sum over the ranks {sorted(before)} in it, and would "
            "be summed over them again; call the model's zero_grad() after each step"
        )
    return before | ranks


def sum_squares_over(
    counted: Iterable[Tensor], held: Iterable[Tensor], own: float | None, *groups: Group
) -> float:
    """Return the sum of the squares of gradients over all ranks of these groups.

    counted  the parameters that this rank counts, so that each counts once over all ranks
    held     all parameters of this rank
    own      an optimizer's own sum of squares, or None; ValueError if it is not the sum of `held`
    """
    if own is not None and abs(own - (all_of := squares(held))) > 1e-5 * max(own, all_of):
        raise ValueError(
            f"on this rank the optimizer's gradients have a sum of squares of {own:.6g}, all "
            f"gradients {all_of:.6g}; clip by one optimizer that has all of the rank's parameters"
        )
    total = np.array(squares(counted))
    for group in groups:
        total = group.all_reduce(total, label="squares")
    return float(total)


def squares(parameters: Iterable[Tensor]) -> float:
    flat = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
    return float(sum(sum_of_squares(gradient) for gradient in flat))


def check_same_weights(model: Module, group: Group) -> None:
    """Raise ValueError on every rank unless all ranks have the same names and weights, bit for bit.

    Strategies assume equal replicas, and no gradient shows the mistake: ranks that start from
    different weights stay different.
    """
    check_same_state({name: p.data for name, p in model.named_parameters().items()}, group)


def check_same_state(state: dict[str, Array], group: Group) -> None:
    """Raise ValueError on every rank unless all ranks have the same arrays, bit for bit, by name.

    Each rank sends 8 bytes per array, a hash, in a separate group, so that no ledger of the caller
    counts them.
    """
    if group.size == 1:
        return
    own = np.array([fingerprint(name, array) for name, array in state.items()], np.uint64)
    apart = group.split(0)
    counts = apart.all_gather(np.array([len(own)]), label="weights").tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks have models of {counts} parameters; build the same on all")
    ranks = apart.all_gather(own, label="weights").reshape(group.size, -1)
    differing = (ranks != ranks[0]).any(axis=0)
    if differing.any():
        first = int(differing.argmax())
        rank = int((ranks[:, first] != ranks[0, first]).argmax())
        raise ValueError(
            f"{differing.sum()} of {len(own)} parameters differ between ranks; the first is "
            f"{list(state)[first]}, on ranks 0 and {rank}: give all ranks one seed, or load one "
            "state on all of them (strategies that take check_weights=False then skip this check)"
        )


def fingerprint(name: str, array: Array) -> int:
    """Return 64 bits of an array's name, dtype, shape and data."""
    data = np.ascontiguousarray(to_host(array))
    digest = hashlib.blake2b(f"{name} {data.dtype} {data.shape}".encode(), digest_size=8)
    digest.update(data.reshape(-1).view(np.uint8))
    return int.from_bytes(digest.digest(), "little")
