"""What another program's ranks have, by our names: gradients, and weights, which may differ."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from minidist import nn
from minidist.errors import WrongInput, check_name
from minidist.interop.torch import Names, as_numpy, from_torch, matches
from minidist.verify.causes.example_counts import listed
from minidist.verify.causes.examples import counting, of_examples
from minidist.verify.causes.finding import Finding, Gradients, some
from minidist.verify.compare import is_real


def of_ranks(what: str, arrays) -> list[Mapping]:
    """Return a mapping for each rank, of a list or of {rank: mapping}; ValueError otherwise."""
    ranks = [arrays] if isinstance(arrays, Mapping) else arrays
    if isinstance(arrays, Mapping) and arrays and set(arrays) == set(range(len(arrays))):
        ranks = [arrays[rank] for rank in range(len(arrays))]
    if not isinstance(ranks, list | tuple) or not all(isinstance(one, Mapping) for one in ranks):
        raise WrongInput(
            f"{what}s are {{name: {what}}}, or a list of them, not {type(arrays).__name__}; "
            "of PyTorch: {name: p.grad for name, p in module.named_parameters()}"
        )
    return list(ranks)


def by_our_names(
    model: nn.Module,
    arrays: Mapping,
    names: Names | None,
    want: Gradients,
    rank: int,
    what: str = "gradient",
) -> Gradients:
    """Return what is wanted, under our names and in our layout; ValueError where that cannot be."""
    ours, theirs = model.named_parameters(), {match.theirs for match in matches(model, names)}
    tensors = any(hasattr(g, "detach") for g in arrays.values())
    if names or tensors or len(arrays.keys() & ours) < max(1, len(arrays.keys() & theirs)):
        got = from_torch(model, arrays, names, only=want)
    else:
        for name in arrays:
            check_name("parameter", name, ours)
        for name in [n for n in want if n not in arrays]:
            raise WrongInput(f"the {what} of {name} is missing on rank {rank}")
        got = {
            name: np.zeros(w.shape) if (g := arrays[name]) is None else as_numpy(g)
            for name, w in want.items()
        }
    for name, w in want.items():
        known = {w.shape} if what == "weight" else {w.shape, w.shape[::-1]}
        if (shape := np.shape(got[name])) not in known:
            raise WrongInput(f"the {what} of {name} is {list(shape)}, not {list(w.shape)}")
        if not is_real(got[name]):
            raise WrongInput(f"the {what} of {name} is {got[name].dtype.name}, not real")
    return got


def weights_of(
    model: nn.Module, weights: Mapping | Sequence[Mapping], names: Names | None
) -> list[Gradients]:
    """Return the weights of each rank by our names; not running statistics, which have moved."""
    norms = list(model.modules(nn.BatchNorm))
    moved = {p.name for norm in norms for p in (norm.running_mean, norm.running_var)}
    want = {n: p.data for n, p in model.named_parameters().items() if n not in moved}
    ranks = enumerate(of_ranks("weight", weights))
    return [by_our_names(model, one, names, want, r, "weight") for r, one in ranks]


def other_weights(model: nn.Module, states: list[Gradients], near: float) -> str:
    """Return in words which ranks have other weights than rank 0, or rank 0 than the model."""
    named, ranks_of = model.named_parameters(), dict[tuple[str, ...], list[int]]()
    for rank, state in enumerate(states):
        other = [n for n, w in state.items() if not np.allclose(w, named[n].data, near, near**2)]
        if other:
            ranks_of.setdefault(tuple(other), []).append(rank)
    lines = []
    for names, ranks in ranks_of.items():
        where = f"all {len(names)} parameters" if len(names) == len(states[0]) else some([*names])
        if 0 in ranks:
            load = "give it rank 0's (interop.torch.load), and `weights` from before the step"
            return f"rank 0 has other weights than the model, in {where}: {load}"
        has = f"{listed('rank', ranks)} {'has' if len(ranks) == 1 else 'have'} other weights"
        frozen = not any(named[n].requires_grad for n in names)
        why = " (frozen: what has no gradient is broadcast, too)" if frozen else ""
        lines.append(f"{has} than rank 0, in {where}: not broadcast from rank 0{why}")
    return "\n".join(lines)


def explained(f: Finding, states: list[Gradients]) -> bool:
    """Return whether all have the sum of what each rank's examples give with the rank's weights."""
    parts = []
    for (rank, _), rows in counting(f).items():
        model = copy.deepcopy(f.case.model)
        model.load_state(model.state() | states[rank])
        parts.append(of_examples(replace(f.case, model=model), rows))
    whole = {name: np.sum([part[name] for part in parts], axis=0) for name in f.trained}
    return all(f.near(g[name], whole[name], name) for g in f.got for name in f.trained)
