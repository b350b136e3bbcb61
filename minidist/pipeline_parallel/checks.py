"""What the ranks of a pipeline compare before the first batch."""

from minidist import nn
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.pipeline_parallel.holders import holders
from minidist.replicas import check_same_weights, check_statistics


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
