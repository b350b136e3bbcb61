"""The gradients that one device would compute with one mistake in its code.

Each function returns gradients by name, as `one_device` does, or None if the mistake is impossible
in this case. `gradients.py` compares them with the gradients of the ranks.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.comm import Group, run
from minidist.errors import RankFailed
from minidist.rng import Randomness
from minidist.tools.strategies.cases import INPUT, Case, Split, as_input, collect, one_device
from minidist.tools.strategies.data_parallel import naive_worker

Gradients = dict[str, np.ndarray]


def of_examples(case: Case, rows: np.ndarray, masks_for: np.ndarray | None = None) -> Gradients:
    """Return what these examples contribute to the whole batch's gradient.

    masks_for  the examples whose dropout masks are used; by default the same examples
    """
    model, x = copy.deepcopy(case.model), as_input(case.inputs[rows])
    masks_for = rows if masks_for is None else masks_for
    randomness = Randomness(case.seed, 0, masks_for, len(case.inputs))
    total = case.total
    case.loss(model(x, randomness), case.targets[rows], reduction_size=total).backward()
    found = collect(model, x)
    if INPUT in found:
        whole = np.zeros(case.inputs.shape, found[INPUT].dtype)
        whole[rows] = found[INPUT]
        found[INPUT] = whole
    return found


def with_local_masks(case: Case, shares: list[np.ndarray]) -> Gradients:
    """Every share of the batch draws its dropout masks as for the examples 0, 1, ..."""
    found = [of_examples(case, rows, np.arange(len(rows))) for rows in shares if len(rows)]
    return {name: sum(part[name] for part in found) for name in found[0]}


OwnSums = Callable[[Group, np.ndarray], np.ndarray]
STATISTICS: dict[str, OwnSums] = {  # what a BatchNorm may get in place of sums over ranks
    "each rank's own statistics: batch norm is not synchronised": lambda group, sums: sums,
    "statistics of all ranks, but each rank's own sums in batch norm's backward": (
        lambda group, sums: group.all_reduce(sums) if sums.ndim == 1 else sums
    ),
    "statistics in which all ranks' shares of the batch count the same": (
        lambda group, sums: _as_if_equal(group, sums) if sums.ndim == 1 else group.all_reduce(sums)
    ),
}


def _as_if_equal(group: Group, sums: np.ndarray) -> np.ndarray:
    """Take for the sum of (count, ...) the ranks' means, times this rank's count."""
    own = max(1, sums[0])
    return own * group.all_reduce(sums / own)


def with_statistics(case: Case, ranks: int, sum_over_ranks: OwnSums) -> Gradients | None:
    """Data-parallel ranks have batch norms with these sums; None if one has too few numbers."""
    if not any(case.model.modules(nn.BatchNorm)):
        return None

    def worker(group):
        copied = copy.deepcopy(case)
        for norm in copied.model.modules(nn.BatchNorm):
            norm.sum_over_ranks = partial(sum_over_ranks, group)
        return naive_worker(group, copied).gradients

    try:
        return run(worker, ranks, transport="thread")[0]
    except RankFailed:
        return None


@dataclass(frozen=True)
class FirstPositions(Randomness):
    """Masks in which each of `parts` runs of positions has the mask of the first run."""

    parts: int = 1

    def keep(self, name, rate, shape, window=None, full_shape=None):
        run = (shape[0], shape[1] // self.parts, *shape[2:])
        return np.concatenate([super().keep(name, rate, run)] * self.parts, axis=1)


def with_repeated_masks(case: Case, parts: int) -> Gradients | None:
    """Every rank of a split sequence draws its mask as if it had the first window."""
    if not isinstance(case.model, nn.Transformer) or case.inputs.shape[1] % parts:
        return None
    model = copy.deepcopy(case.model)
    randomness = FirstPositions(case.seed, 0, np.arange(len(case.inputs)), parts=parts)
    case.loss(model(case.inputs, randomness), case.targets).backward()
    return collect(model)


BIASES: list[Callable[[str], bool]] = [
    lambda name: name.endswith("bias") and "norm" not in name,
    lambda name: name.endswith(("output.bias", "contract.bias")),  # what rows leave
    lambda name: name.endswith("output.bias"),
]


def with_biases_times(case: Case, times: int, which: Callable[[str], bool]) -> Gradients | None:
    """Forward adds the biases `times` times; their gradient is as for one addition."""
    model = copy.deepcopy(case.model)
    chosen = [p for name, p in model.named_parameters().items() if which(name)]
    for p in chosen:
        p.data[...] *= times
    return one_device(replace(case, model=model)) if chosen else None


BLOCKS = {"qkv": ("Q, K, V", 3), "key_value": ("K, V", 2)}  # what the columns of a weight are
# Which column of a weight[C, k H D] is in place of the j-th, given width, k, heads and ranks.
PERMUTATIONS: dict[str, Callable] = {
    "in equal runs, though they are [{k}, H, D]": lambda q, k, h, n: _equal_runs(q, k, n),
    "as [H, {k}, D], though they are [{k}, H, D]": lambda q, k, h, n: _heads_first(q, k, h),
}


def _equal_runs(width: int, blocks: int, ranks: int) -> np.ndarray:
    """Rank r takes the r-th run of k C / N columns as its part of each of the k blocks."""
    runs = np.arange(width).reshape(ranks, blocks, -1)  # [N, k, C/N]
    return runs.transpose(1, 0, 2).reshape(-1)


def _heads_first(width: int, blocks: int, heads: int) -> np.ndarray:
    return np.arange(width).reshape(heads, blocks, -1).transpose(1, 0, 2).reshape(-1)


def with_permuted_heads(case: Case, weight: str, order: Callable, ranks: int) -> Gradients | None:
    """The columns of these weights are used in another order; their gradients stay where they are.

    weight  "qkv" or "key_value"
    """
    model, (_, k) = copy.deepcopy(case.model), BLOCKS[weight]
    chosen = {n: p for n, p in model.named_parameters().items() if f".{weight}." in n}
    if not chosen:
        return None
    heads = case.model.layers[1].attention.heads
    if heads % ranks:
        return None
    orders = {n: order(p.shape[-1], k, heads, ranks) for n, p in chosen.items()}
    for name, p in chosen.items():
        p.data[...] = p.data[..., orders[name]].copy()
    found = one_device(replace(case, model=model))
    for name, permuted in orders.items():
        found[name] = found[name][..., np.argsort(permuted)]
    return found


def with_overwritten_inputs(case: Case, firsts: list[str], split: Split) -> Gradients:
    """Before backward, every stage input is overwritten in place by the last one of its shape.

    firsts  the first parameter of every stage but the first one
    """
    model, ends, x = copy.deepcopy(case.model), [], as_input(case.inputs)
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    begin, parts = x, list(split.parts(len(case.inputs)).values())
    for layer in model.layers:
        if next(iter(layer.named_parameters()), None) in firsts:
            ends.append((begin, x))
            begin = x = Tensor(x.data.copy(), requires_grad=True)
        x = layer(x, randomness)
    ends.append((begin, case.loss(x, case.targets)))
    for received, _ in ends[1:]:
        sound = received.data.copy()
        for rows in parts:
            received.data[rows] = sound[[other for other in parts if len(other) == len(rows)][-1]]
    grad = None
    for begin, end in reversed(ends):
        if end.requires_grad:  # else everything so far is frozen
            end.backward(grad)
        grad = begin.grad if isinstance(begin, Tensor) else None
    return collect(model, ends[0][0])


def with_padding(case: Case, parts: int) -> tuple[int, Gradients] | None:
    """Return how many columns of zeros pad the vocabulary, and the gradients with them."""
    count = -getattr(case.model, "vocab", 0) % parts
    if not count:
        return None

    def loss(logits, targets, **more):
        zeros = Tensor(np.zeros((*logits.shape[:-1], count), logits.dtype))
        return case.loss(functions.concatenate([logits, zeros], -1), targets, **more)

    return count, one_device(replace(case, loss=loss))


@dataclass(frozen=True)
class Uses:
    """A tied weight, and the gradient of each of its uses: they should be added up."""

    name: str
    gradients: dict[str, np.ndarray]


def without_tying(case: Case) -> Uses | None:
    """The head has a copy of the embedding's weights, with a separate gradient."""
    if not isinstance(case.model, nn.Transformer) or not case.model.layers[-1].tied:
        return None
    model = copy.deepcopy(case.model)
    head = model.layers[-1]
    weight = head.weight
    head.weight = nn.Parameter(weight.data.copy(), "head's copy")
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    case.loss(model(case.inputs, randomness), case.targets).backward()
    return Uses(weight.name, {"embedding": weight.grad.copy(), "head": head.weight.grad.copy()})
