"""Which rank holds which part of a model that is cut into stages.

A pipeline takes over a whole model on every rank, and keeps this rank's layers. The other layers
are not trained here, and their parameters say so. Before the first batch the ranks compare what
they have made.
"""

from itertools import accumulate, pairwise, starmap

from minidist import nn
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.parallel import check_same_weights, check_statistics
from minidist.pipeline_parallel.actions import equal_lengths

ELSEWHERE = "another rank trains it; use state() and load_state() of the pipeline or Hybrid"


def cut_of(layers: int, stages: int, cut: list[range] | None = None) -> list[range]:
    """Return this cut if it is valid; by default, stages with equal numbers of layers."""
    if cut is None:
        ends = [0, *accumulate(equal_lengths(layers, stages))]
        return list(starmap(range, pairwise(ends)))
    if [i for part in cut for i in part] != list(range(layers)) or len(cut) != stages:
        raise WrongInput(
            f"{cut} does not cut {layers} layers into {stages} contiguous stages, in order"
        )
    return cut


def holders(model: nn.Sequential, cut: list[range]) -> dict[str, list[int]]:
    """Return {parameter name: the stages that hold it}, in global order; a tied one has several."""
    stages_of: dict[str, list[int]] = {name: [] for name in model.named_parameters()}
    for stage, part in enumerate(cut):
        for name in dict.fromkeys(n for i in part for n in model.layers[i].named_parameters()):
            stages_of[name].append(stage)
    return stages_of


def shared_groups(
    model: nn.Sequential, cut: list[range], placement: list[list[int]], group: Group
) -> dict[str, Group]:
    """Return {name: the ranks that share this parameter}, on each of them.

    placement  the stages of each rank; a frozen parameter has no gradient to share
    """
    named, shared = model.named_parameters(), {}
    for name, stages in holders(model, cut).items():
        ranks = {r for r, own in enumerate(placement) if set(own) & set(stages)}
        if len(ranks) > 1 and named[name].requires_grad:
            if together := group.split(0 if group.rank in ranks else None):
                shared[name] = together
    return shared


def take_over(model: nn.Sequential, layers: list[nn.Module], spread: str) -> nn.Sequential:
    """Make a model of this rank's layers; mark the other parameters as held elsewhere.

    spread  what the parameters are spread over, in words (see nn.Parameter)
    """
    part = nn.Sequential(layers)
    mine = part.named_parameters()
    for name, p in model.named_parameters().items():
        if name in mine:
            p.placement.spread = spread
        else:
            p.placement.elsewhere = ELSEWHERE
    return part


def check_alike(
    model: nn.Sequential, group: Group, description: str, micro_batches: int, weights: bool
) -> Group | None:
    """Raise an error on every rank unless all ranks make the same pipeline of the same model.

    description  of the programs and the cut, in words: CollectiveMismatch shows both of them
    weights      whether to compare the weights, too

    Return the ranks that must load the same state later, or None to skip this comparison, too.
    """
    group.barrier(label=description)
    if weights:
        check_same_weights(model, group)
    check_statistics(model, micro_batches=micro_batches, loads=True)  # a stage has all of them
    return group if weights else None


def check_untied(model: nn.Sequential, cut: list[range]) -> None:
    """Raise ValueError if stages share a parameter, or a step has loads: there are no flushes."""
    check_statistics(model)
    named = model.named_parameters()
    for name, stages in holders(model, cut).items():
        if len(stages) > 1 and named[name].requires_grad:
            raise WrongInput(
                f"{name} is shared by stages {stages}, which update at different times: "
                "it would come apart; use a model whose weights are not tied"
            )
