"""The weights of ranks that hold copies or parts of one model: compare, collect, load."""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from minidist.backend import Array, to_host
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Module
from minidist.nn.module import check_state
from minidist.parallel.statistics import check_statistics


def check_replicas(
    model: Module,
    group: Group,
    weights: bool = True,
    loads: bool = False,
    micro_batches: int = 1,
) -> Group | None:
    """Raise ValueError unless the ranks can train copies of this model on parts of a batch.

    weights  whether to compare the weights of all ranks
    loads    whether the caller sums the loads of experts (sum_loads)

    Return the ranks that must load the same state later, or None to skip this comparison, too.
    """
    check_statistics(model, group.size, micro_batches, loads)
    if weights:
        check_same_weights(model, group)
    return group if weights else None


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
    hashes = np.array([fingerprint(name, array) for name, array in state.items()], np.uint64)
    apart = group.split(0)
    counts = apart.all_gather(np.array([len(hashes)]), label="weights").tolist()
    if len(set(counts)) > 1:
        raise WrongInput(f"the ranks have models of {counts} parameters; build the same on all")
    ranks = apart.all_gather(hashes, label="weights").reshape(group.size, -1)
    differing = (ranks != ranks[0]).any(axis=0)
    if differing.any():
        first = int(differing.argmax())
        rank = int((ranks[:, first] != ranks[0, first]).argmax())
        raise WrongInput(
            f"{differing.sum()} of {len(hashes)} parameters differ between ranks; the first is "
            f"{list(state)[first]}, on ranks 0 and {rank}: give all ranks one seed, or load one "
            "state on all of them (strategies that take check_weights=False then skip this check)"
        )


def fingerprint(name: str, array: Array) -> int:
    """Return 64 bits of an array's name, dtype, shape and data."""
    data = np.ascontiguousarray(to_host(array))
    digest = hashlib.blake2b(f"{name} {data.dtype} {data.shape}".encode(), digest_size=8)
    digest.update(data.reshape(-1).view(np.uint8).data)
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
    load: Callable[[Module, dict[str, np.ndarray]], None] = Module.load_state,
) -> None:
    """Load this rank's part from the state of the whole model, whose arrays have these shapes.

    group  ranks that must have the same state, or None to skip this comparison
    load   (model, its state) -> None, where its weights are elsewhere
    """
    check_state(state, shapes)
    if group is not None:
        check_same_state(state, group)
    load(model, {name: state[name] for name in model.named_parameters()})
