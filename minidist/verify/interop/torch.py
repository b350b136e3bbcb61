"""A model's weights and gradients under PyTorch's names and in its layouts, and back.

    here                              PyTorch
    Linear.weight[in, out]            weight[out, in]      Y = X W + b here, X W^T + b there
    Conv2d.weight[out, in, k, k]      the same
    Embedding.weight[rows, C]         the same
    gain of all norms                 weight
    bias, running_mean, running_var   the same
    one array, such as key_value      several: names={"blocks.0.attention.key_value": ["k", "v"]}

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
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from minidist import nn
from minidist.backend import to_host
from minidist.errors import WrongInput, check_name

if TYPE_CHECKING:
    import torch

Names = Mapping[str, str | Sequence[str]]
Norm = nn.LayerNorm | nn.RMSNorm | nn.BatchNorm
# What DDP, torch.compile, activation checkpointing and FSDP add to names, anywhere in them.
WRAPPED = re.compile(
    r"(?<![^.])(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
TRACKED = "num_batches_tracked"  # a count that PyTorch's BatchNorm keeps and does not use


class Match(NamedTuple):
    """One array of PyTorch's: our parameter's name, its own, and whether it is a transpose.

    Where one parameter of ours is several arrays, several matches follow each other.
    """

    ours: str
    theirs: str
    transposed: bool


def matches(model: nn.Module, names: Names | None = None) -> list[Match]:
    """Return which array of PyTorch's each parameter of a model is, or which arrays.

    names  {our name, or the first parts of it: PyTorch's}; the longest that fits is replaced, and
           what nothing fits is called the same: {"layers.0": "0", "layers.1": "2"} for an nn.MLP
           that is a torch.nn.Sequential with activations between. A list of names is one of our
           arrays cut into equal parts, by its outputs: key_value into keys and values, expand of a
           Llama into gate and up, qkv into three. ValueError for one that fits none
    """
    turned = {layer.weight for layer in model.modules(nn.Linear)}
    renamed = {norm.gain: "weight" for kind in get_args(Norm) for norm in model.modules(kind)}
    table, names, ours = [], names or {}, dict[str, None]()
    for name, p in model.named_parameters().items():
        place, _, last = name.rpartition(".")
        theirs = f"{place}.{renamed.get(p, last)}"
        table += [Match(name, t, p in turned) for t in _replaced(theirs, name, names)]
        ours |= dict.fromkeys([*accumulate(place.split("."), "{}.{}".format), name])
    for name, new in names.items():
        check_name("name of ours", name, ours)
        if not new and not isinstance(new, str):
            raise WrongInput(f"names[{name!r}] is empty; give PyTorch's name, or several")
    return table


def _replaced(theirs: str, ours: str, names: Names) -> list[str]:
    first = [ours] if ours in names else [n for n in names if theirs.startswith(f"{n}.")]
    if not first:
        return [theirs]
    longest = max(first, key=len)
    new, rest = names[longest], "" if longest == ours else theirs[len(longest) :]
    return [f"{name}{rest}" for name in ([new] if isinstance(new, str) else new)]


def _by_parameter(table: list[Match]) -> Iterator[tuple[str, list[Match]]]:
    for ours, parts in groupby(table, key=lambda match: match.ours):
        yield ours, list(parts)


def to_torch(model: nn.Module, names: Names | None = None) -> "dict[str, torch.Tensor]":
    """Return the model's weights as a state_dict of PyTorch: copies, in the model's dtype."""
    import torch

    state = model.state()
    return {
        match.theirs: torch.tensor(np.ascontiguousarray(part))
        for ours, parts in _by_parameter(matches(model, names))
        for match, part in zip(parts, _cut(state[ours], parts), strict=True)
    }


def from_torch(
    model: nn.Module,
    arrays: Mapping,
    names: Names | None = None,
    only: Container[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return {our name: array} of PyTorch's {name: tensor or array}: a state_dict, or gradients.

    only  leave out all but these names of ours

    None stands for a gradient of zeros. ValueError where a parameter has no array, an array no
    parameter, or another shape. Left out are a tied weight's second name, BatchNorm's
    num_batches_tracked, and wrappers' words in names.
    """
    table, parameters = matches(model, names), model.named_parameters()
    arrays = {
        name: a for name, a in _unwrapped(arrays, table).items() if not name.endswith(TRACKED)
    }
    if only is None:
        only = set(parameters)
    others = {match.theirs for match in table if match.ours not in only}
    table = [match for match in table if match.ours in only]
    arrays = {name: a for name, a in arrays.items() if name not in others}
    _check_names(table, arrays)
    named: dict[str, np.ndarray] = {}
    for ours, parts in _by_parameter(table):
        shape = list(_cut(np.empty(parameters[ours].whole_shape), parts)[0].shape)
        pieces = []
        for name, array in ((match.theirs, arrays[match.theirs]) for match in parts):
            theirs = np.zeros(shape) if array is None else as_numpy(array)
            if list(theirs.shape) != shape:
                layout = "[out, in]" if parts[0].transposed else "as here"
                raise WrongInput(
                    f"{name} is {list(theirs.shape)}; for {ours} it has to be {shape} "
                    f"({layout}); what a rank has a part of must be gathered first"
                )
            pieces.append(theirs)
        joined = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        named[ours] = joined.T if parts[0].transposed else joined
    return named


def _unwrapped(arrays: Mapping, table: list[Match]) -> dict:
    """Return the arrays under the table's names: words that wrappers add make no difference."""
    named = {WRAPPED.sub("", match.theirs): match.theirs for match in table}
    plain = {name: WRAPPED.sub("", name) for name in arrays}
    renamed = {named.get(plain[name], plain[name]): array for name, array in arrays.items()}
    if len(renamed) < len(arrays):
        twice = next(n for n in plain.values() if list(plain.values()).count(n) > 1)
        raise WrongInput(f"several names are {twice!r} without the words of wrappers; rename one")
    return renamed


def load_torch(
    module: "torch.nn.Module", model: nn.Module, names: Names | None = None
) -> "torch.nn.Module":
    """Give a PyTorch module the model's weights and dtype; return it."""
    state, theirs = to_torch(model, names), module.state_dict()
    from_torch(model, theirs, names)  # raises where names or shapes differ
    plain = dict(zip(_unwrapped(theirs, matches(model, names)), theirs, strict=True))
    module.to(next(x.dtype for x in state.values()))
    loaded = {plain[name]: x for name, x in state.items()}
    module.load_state_dict(loaded, strict=False)  # not a tied weight's second name
    return module


def load(model: nn.Module, source, names: Names | None = None) -> None:
    """Give a model the weights of a torch.nn.Module, or of a state_dict."""
    state = source if isinstance(source, Mapping) else source.state_dict()
    model.load_state(from_torch(model, state, names))


def gradients(
    model: nn.Module, module: "torch.nn.Module", names: Names | None = None
) -> dict[str, np.ndarray]:
    """Return {our name: gradient} of a PyTorch module after backward; zeros where it has none."""
    theirs = {name: p.grad for name, p in module.named_parameters()}
    only = {name for name, p in model.named_parameters().items() if p.requires_grad}
    return from_torch(model, theirs, names, only)


def of_ranks(module: "torch.nn.Module") -> dict[str, list[dict]]:
    """Return {"gradients": each rank's, "weights": each rank's}, on every rank of torchrun.

    All ranks call it, after backward and before the step. What FSDP2 has cut is gathered:
    `verify.against(model, inputs=x, targets=y, **of_ranks(module))`.
    """
    import torch.distributed as dist

    def whole(x):
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        return None if x is None else x.detach().cpu()

    named = dict(module.named_parameters())
    mine = [{n: whole(x) for n, x in named.items()}, {n: whole(p.grad) for n, p in named.items()}]
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {"weights": [of[0] for of in ranks], "gradients": [of[1] for of in ranks]}


def as_numpy(x) -> np.ndarray:
    """Return a tensor or an array as a NumPy array on the host; bfloat16 as float32.

    ValueError for a DTensor.
    """
    if not hasattr(x, "detach"):
        return to_host(x)
    if hasattr(x, "full_tensor"):
        raise WrongInput("a DTensor is a rank's part; give x.full_tensor(), called on every rank")
    x = (x.to_dense() if x.is_sparse else x).detach().cpu()
    return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()


def _cut(array: np.ndarray, parts: list[Match]) -> list[np.ndarray]:
    """Return one of our arrays as PyTorch's: turned, then cut into equal parts of its rows."""
    theirs = array.T if parts[0].transposed else array
    if len(parts) == 1:
        return [theirs]
    if len(theirs) % len(parts):
        names = [match.theirs for match in parts]
        raise WrongInput(f"the {len(theirs)} outputs of {parts[0].ours} are no equal parts {names}")
    return np.split(theirs, len(parts))


def _check_names(table: list[Match], arrays: Mapping) -> None:
    """Raise ValueError unless every parameter has an array, and every array a parameter."""
    wanted = {match.theirs for match in table}
    spare = sorted(arrays.keys() - wanted)
    if missing := [match for match in table if match.theirs not in arrays]:
        raise WrongInput(
            f"PyTorch's model has no {missing[0].theirs!r} for {missing[0].ours}"
            + (f", but {', '.join(map(repr, spare[:3]))}" if spare else "")
            + '; say which is which: names={"layers.0": "0"}, or {"expand": ["gate", "up"]}'
        )
    for name in spare:
        if not any(_is_one_array(arrays[name], arrays[other]) for other in wanted):
            raise WrongInput(
                f"PyTorch's model has {name!r} besides what is in this one. Is it a part of an "
                "array of ours? names={'blocks.0.attention.key_value': ['k_proj', 'v_proj']} says "
                "so. Else compare with a model that has it; only a buffer, such as a mask, may go"
            )


def _is_one_array(x, y) -> bool:
    """Return whether both names are of one array in memory: a tied weight."""
    if x is None or y is None:
        return x is y
    a, b = as_numpy(x), as_numpy(y)
    return a.shape == b.shape and np.may_share_memory(a, b)
