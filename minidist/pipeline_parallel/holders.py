"""Which rank holds which part of a model that is cut into stages.

A pipeline takes over a whole model on every rank, and keeps this rank's layers. The other layers
are not trained here, and their parameters say so.
"""

from minidist import nn
from minidist.comm import Group

ELSEWHERE = "another rank trains it; use state() and load_state() of the pipeline or Hybrid"


def holders(model: nn.Sequential, cut: list[range]) -> dict[str, list[int]]:
    """Return {parameter name: the stages that hold it}, in global order; a tied one has several."""
    found: dict[str, list[int]] = {name: [] for name in model.named_parameters()}
    for stage, part in enumerate(cut):
        for name in dict.fromkeys(n for i in part for n in model.layers[i].named_parameters()):
            found[name].append(stage)
    return found


def shared_groups(
    model: nn.Sequential, cut: list[range], placement: list[list[int]], group: Group
) -> dict[str, Group | None]:
    """Return {name: the group of the ranks that share this parameter, None on the other ranks}.

    placement  the stages of each rank; a frozen parameter has no gradient to share
    """
    named, shared = model.named_parameters(), {}
    for name, stages in holders(model, cut).items():
        ranks = {r for r, own in enumerate(placement) if set(own) & set(stages)}
        if len(ranks) > 1 and named[name].requires_grad:
            shared[name] = group.split(0 if group.rank in ranks else None)
    return shared


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
