"""Operations of ranks that hold parts or copies of one model: sum gradients, measure, compare.

sum_gradients       dW{+N} -> dW on every rank; never twice over the same ranks
sum_squares_over    the squared norm of a gradient that is spread over ranks
check_same_weights  check that replicas have the same weights
sum_statistics      let a batch norm use the statistics of a group
check_batch_norm    check that every batch norm gets the statistics of the whole batch
from_holders        arrays by name, of which each rank holds some
"""

import hashlib
from collections.abc import Iterable
from functools import partial

import numpy as np

from minidist.autograd import Tensor
from minidist.backend import Array, to_host
from minidist.comm import Group
from minidist.nn import BatchNorm, Module
from minidist.nn.module import check_state
from minidist.optim import sum_of_squares


def sum_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    for p in parameters:
        if p.requires_grad:
            ranks = summed_ranks(p, group)
            grad = p.xp.zeros_like(p.data, p.grad_dtype) if p.grad is None else p.grad
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
    counted: Iterable[Tensor | Array], held: Iterable[Tensor], own: float | None, *groups: Group
) -> float:
    """Return the sum of the squares of gradients over all ranks of these groups.

    counted  the parameters, or the parts of gradients, that this rank counts, so that each counts
             once over all ranks
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


def squares(counted: Iterable[Tensor | Array]) -> float:
    gradients = [x.grad if isinstance(x, Tensor) else x for x in counted]
    return float(sum(sum_of_squares(g.reshape(-1)) for g in gradients if g is not None))


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


def check_batch_norm(model: Module, ranks: int = 1, micro_batches: int = 1) -> None:
    """Raise ValueError if a BatchNorm would use the statistics of a part of the batch.

    The gradient would then be another one.
    """
    if max(ranks, micro_batches) == 1:
        return
    for norm in model.modules(BatchNorm):
        if not norm.training:
            continue
        if micro_batches > 1:
            raise ValueError(
                f"{norm.name} needs the statistics of the whole batch, not of one of "
                f"{micro_batches} micro-batches; sync_batch_norm sums over ranks only, so use one "
                "micro-batch"
            )
        if norm.sum_over_ranks is None:
            raise ValueError(
                f"{norm.name} needs the statistics of the whole batch, not of the examples on one "
                f"of {ranks} ranks; call sync_batch_norm(model, group) before training "
                "(data_parallel/sync_batch_norm.py)"
            )


def sum_statistics(norm: BatchNorm, group: Group) -> None:
    """Let a norm add up its statistics over ranks that hold parts of every batch.

    ValueError if it adds them up over other ranks already, which would be left out.
    """
    if left_out := set(norm.ranks) - set(group.members):
        raise ValueError(
            f"{norm.name} adds up over the ranks {list(norm.ranks)}, and would leave out "
            f"{sorted(left_out)}; call sync_batch_norm last, with a group of all ranks that hold "
            "parts of the batch, such as mesh.over('dp', 'tp')"
        )
    norm.sum_over_ranks, norm.ranks = partial(group.all_reduce, label=norm.name), group.members


def fingerprint(name: str, array: Array) -> int:
    """Return 64 bits of an array's name, dtype, shape and data."""
    data = np.ascontiguousarray(to_host(array))
    digest = hashlib.blake2b(f"{name} {data.dtype} {data.shape}".encode(), digest_size=8)
    digest.update(data.reshape(-1).view(np.uint8))
    return int.from_bytes(digest.digest(), "little")


def shapes_of(model: Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the global arrays, by name."""
    return {name: p.whole_shape for name, p in model.named_parameters().items()}


def from_holders(mine: dict, names: Iterable[str], group: Group) -> dict:
    """Return arrays by name: this rank's own, the others from the first rank that has them."""
    has = group.all_gather(np.array([[name in mine for name in names]]))
    result = {}
    for name, ranks in zip(names, has.T, strict=True):
        if ranks.any():
            sent = group.broadcast(mine.get(name), int(ranks.argmax()), label=name)
            result[name] = mine.get(name, sent)
    return result


def load_own(
    model: Module,
    state: dict[str, np.ndarray],
    shapes: dict[str, tuple[int, ...]],
    group: Group | None,
) -> None:
    """Load this rank's part from the state of the whole model, whose arrays have these shapes.

    group  ranks that must have the same state, or None to skip this comparison
    """
    check_state(state, shapes)
    if group is not None:
        check_same_state(state, group)
    model.load_state({name: state[name] for name in model.named_parameters()})
