"""Which rank holds which part of a model that is cut into stages, and the state of the whole.

A pipeline takes over a whole model on every rank, and keeps this rank's layers. The other layers
are not trained here, and their parameters say so; the whole state is collected from its holders.
"""

from collections.abc import Iterable

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.nn.module import check_state
from minidist.replicas import check_same_state

ELSEWHERE = "another rank trains it; use state() and load_state() of the pipeline or Hybrid"


def holders(model: nn.Sequential, cut: list[range]) -> dict[str, list[int]]:
    """Return {parameter name: the stages that hold it}, in global order; a tied one has several."""
    found: dict[str, list[int]] = {name: [] for name in model.named_parameters()}
    for stage, part in enumerate(cut):
        for name in dict.fromkeys(n for i in part for n in model.layers[i].named_parameters()):
            found[name].append(stage)
    return found


def take_over(model: nn.Sequential, layers: list[nn.Module], spread: str) -> nn.Sequential:
    """Return this rank's layers as a model; mark the other parameters as held elsewhere.

    spread  what the parameters are spread over, in words (see nn.Parameter)
    """
    own = nn.Sequential(layers)
    mine = own.named_parameters()
    for name, p in model.named_parameters().items():
        if name in mine:
            p.spread = spread
        else:
            p.elsewhere = ELSEWHERE
    return own


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
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
    model: nn.Module,
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
