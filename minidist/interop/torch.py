"""A model's weights and gradients under PyTorch's names and in its layouts, and back.

    here                              PyTorch
    Linear.weight[in, out]            weight[out, in]      Y = X W + b here, X W^T + b there
    Conv2d.weight[out, in, k, k]      the same
    Embedding.weight[rows, C]         the same
    LayerNorm.gain, BatchNorm.gain    weight
    bias, running_mean, running_var   the same

What no name shows, and a comparison must have alike:

    gelu                 the tanh form: torch.nn.functional.gelu(x, approximate="tanh")
    qkv.weight[C, 3C]    columns [3, H, D]: queries of all heads, then keys, then values, as in
                         MultiheadAttention.in_proj_weight; Megatron-LM has [H, 3, D]
    blocks               norms before the sub-layers, eps 1e-5 (norm_first=True in PyTorch)
    loss                 the mean over the targets of the whole batch, not over a rank's
    weights              drawn by name and seed, in every rank alike: compare after `load`

`twins.twin(model)` is the model in plain PyTorch under the same names. PyTorch is imported by what
needs it: pip install torch.
"""

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minidist import nn
from minidist.backend import to_host
from minidist.errors import check_name

if TYPE_CHECKING:
    import torch

Norm = nn.LayerNorm | nn.BatchNorm
WRAPPED = re.compile(r"((module|_orig_mod)\.)+")  # before each name in DDP and torch.compile
TRACKED = "num_batches_tracked"  # a count that PyTorch's BatchNorm keeps and does not use


class Match(NamedTuple):
    """One parameter: our name, PyTorch's, and whether PyTorch's array is its transpose."""

    ours: str
    theirs: str
    transposed: bool


def matches(model: nn.Module, names: Mapping[str, str] | None = None) -> list[Match]:
    """Return which array of PyTorch's each parameter of a model is.

    names  {our name, or the first parts of it: PyTorch's}; the longest that fits is replaced, and
           what nothing fits is called the same: {"layers.0": "0", "layers.1": "2"} for an nn.MLP
           that is a torch.nn.Sequential with activations between. ValueError for one that fits none
    """
    turned = {layer.weight for layer in model.modules(nn.Linear)}
    norms: list[Norm] = [*model.modules(nn.LayerNorm), *model.modules(nn.BatchNorm)]
    renamed = {norm.gain: "weight" for norm in norms}
    found, names, known = [], names or {}, dict[str, None]()
    for name, p in model.named_parameters().items():
        place, _, last = name.rpartition(".")
        theirs = f"{place}.{renamed.get(p, last)}"
        found.append(Match(name, _replaced(theirs, name, names), p in turned))
        known |= dict.fromkeys([*accumulate(place.split("."), "{}.{}".format), name])
    for name in names:
        check_name("name of ours", name, known)
    return found


def _replaced(theirs: str, ours: str, names: Mapping[str, str]) -> str:
    if ours in names:
        return names[ours]
    first = [name for name in names if theirs.startswith(f"{name}.")]
    if not first:
        return theirs
    longest = max(first, key=len)
    return names[longest] + theirs[len(longest) :]


def to_torch(model: nn.Module, names: Mapping[str, str] | None = None) -> "dict[str, torch.Tensor]":
    """Return the model's weights as a state_dict of PyTorch: copies, in the model's dtype."""
    import torch

    state = model.state()
    return {
        match.theirs: torch.tensor(np.ascontiguousarray(_turned(state[match.ours], match)))
        for match in matches(model, names)
    }


def from_torch(
    model: nn.Module,
    arrays: Mapping,
    names: Mapping[str, str] | None = None,
    trained: bool = False,
) -> dict[str, np.ndarray]:
    """Return {our name: array} of PyTorch's {name: tensor or array}: a state_dict, or gradients.

    trained  leave out what is frozen; None is then a gradient of zeros

    ValueError where a parameter has no array, an array no parameter, or another shape. Left out
    are a tied weight's second name, BatchNorm's num_batches_tracked, and the first words of names
    that DistributedDataParallel and torch.compile add.
    """
    table, parameters = matches(model, names), model.named_parameters()
    arrays = {
        name: a for name, a in _unwrapped(arrays, table).items() if not name.endswith(TRACKED)
    }
    if trained:
        frozen = {match.theirs for match in table if not parameters[match.ours].requires_grad}
        table = [match for match in table if match.theirs not in frozen]
        arrays = {name: a for name, a in arrays.items() if name not in frozen}
    _check_names(table, arrays)
    found = {}
    for match in table:
        shape = list(_turned(np.empty(parameters[match.ours].whole_shape), match).shape)
        given = arrays[match.theirs]
        theirs = np.zeros(shape) if given is None else as_numpy(given)
        if list(theirs.shape) != shape:
            layout = "[out, in]" if match.transposed else "as here"
            raise ValueError(
                f"{match.theirs} is {list(theirs.shape)}; for {match.ours} it has to be {shape} "
                f"({layout}); what a rank has a part of must be gathered first"
            )
        found[match.ours] = _turned(theirs, match)
    return found


def _unwrapped(arrays: Mapping, table: list[Match]) -> dict:
    """Return the arrays without the first words that wrappers put before every name."""
    every = all(map(WRAPPED.match, arrays))
    if not every or any(WRAPPED.match(match.theirs) for match in table):
        return dict(arrays)
    return {WRAPPED.sub("", name): array for name, array in arrays.items()}


def load_torch(
    module: "torch.nn.Module", model: nn.Module, names: Mapping[str, str] | None = None
) -> "torch.nn.Module":
    """Give a PyTorch module the model's weights and dtype; return it."""
    state, own = to_torch(model, names), module.state_dict()
    from_torch(model, own, names)  # raises where names or shapes differ
    plain = dict(zip(_unwrapped(own, matches(model, names)), own, strict=True))
    module.to(next(x.dtype for x in state.values()))
    loaded = {plain[name]: x for name, x in state.items()}
    module.load_state_dict(loaded, strict=False)  # not a tied weight's second name
    return module


def load(model: nn.Module, source, names: Mapping[str, str] | None = None) -> None:
    """Give a model the weights of a torch.nn.Module, or of a state_dict."""
    state = source if isinstance(source, Mapping) else source.state_dict()
    model.load_state(from_torch(model, state, names))


def gradients(
    model: nn.Module, module: "torch.nn.Module", names: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Return {our name: gradient} of a PyTorch module after backward; zeros where it has none."""
    theirs = {name: p.grad for name, p in module.named_parameters()}
    return from_torch(model, theirs, names, trained=True)


def as_numpy(x) -> np.ndarray:
    """Return a tensor or an array as a NumPy array on the host; bfloat16 as float32.

    ValueError for a DTensor.
    """
    if not hasattr(x, "detach"):
        return to_host(x)
    if hasattr(x, "full_tensor"):
        raise ValueError("a DTensor is a rank's part; give x.full_tensor(), called on every rank")
    x = (x.to_dense() if x.is_sparse else x).detach().cpu()
    return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()


def _turned(array: np.ndarray, match: Match) -> np.ndarray:
    return array.T if match.transposed else array


def _check_names(table: list[Match], arrays: Mapping) -> None:
    """Raise ValueError unless every parameter has an array, and every array a parameter."""
    wanted = {match.theirs for match in table}
    spare = sorted(arrays.keys() - wanted)
    if missing := [match for match in table if match.theirs not in arrays]:
        raise ValueError(
            f"PyTorch's model has no {missing[0].theirs!r} for {missing[0].ours}"
            + (f", but {', '.join(map(repr, spare[:3]))}" if spare else "")
            + '; say which is which: names={"layers.0": "0"}'
        )
    for name in spare:
        if not any(_is_one_array(arrays[name], arrays[other]) for other in wanted):
            raise ValueError(
                f"PyTorch's model has {name!r} besides what is in this one; leave it out, or "
                "compare with a model that has it"
            )


def _is_one_array(x, y) -> bool:
    """Return whether both names are of one array in memory: a tied weight."""
    if x is None or y is None:
        return x is y
    a, b = as_numpy(x), as_numpy(y)
    return a.shape == b.shape and np.may_share_memory(a, b)
