"""What ZeRO cannot cut, and what would leave a gradient unsummed: errors, with their remedies."""

from collections import Counter

from minidist import nn
from minidist.data_parallel.layer_shard import LayerShard
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import FlatParameters, check_flat, strays
from minidist.replicas import check_balance


def tied_between_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that several layers use."""
    users = Counter(p for layer in model.layers for p in layer.parameters())
    return [p for p, layers in users.items() if layers > 1]


def flat_vectors(model: nn.Module) -> list[FlatParameters]:
    """Return each layer's flat vector, laid anew if it is not of what trains now."""
    if strays(model.parameters(), [layer.home for layer in model.layers]):
        model.flatten()
    return [layer.home for layer in model.layers]


def check_stage(
    model: nn.Module, stage: int, tied: list[nn.Parameter], block: int | None = None
) -> None:
    """Raise ValueError unless the model can be cut so."""
    if stage not in (1, 2, 3):
        raise WrongInput(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
    if stage > 1 and not isinstance(model, nn.Sequential):
        raise WrongInput(f"stage {stage} needs an nn.Sequential, not {type(model).__name__}")
    if stage < 3 and block is not None:
        raise WrongInput(f"stage {stage} gathers no weights in a pass to quantize; use stage 3")
    if stage == 3 and tied:
        raise WrongInput(
            f"{tied[0].name!r} belongs to several layers, and stage 3 keeps the weights "
            "of one layer at a time; use a model that is not tied, or stage 2"
        )


def check_not_reduced(model: nn.Module, shards: list[LayerShard], stage: int, ranks: int) -> None:
    """Raise ValueError if stage 1 has summed this step's gradient already.

    Also if a parameter has left its flat vector, or a balancing loss is of one rank's examples.
    """
    check_flat(model.parameters(), [s.whole for s in shards])
    check_balance(model, ranks)
    if stage == 1 and shards[0].parameter.grad is not None:
        raise WrongInput(
            "this step's gradient is reduced already; "
            "pass last=False for all micro-batches but the last"
        )


def check_reduced(shards: list[LayerShard]) -> None:
    """Raise ValueError if a shard has no gradient."""
    if any(s.parameter.grad is None for s in shards):
        raise WrongInput("no gradient has been reduced; call zero.backward first")


def check_order(k: int, expected: int | None) -> None:
    """Raise ValueError unless backward may come to layer k; None: nobody expects a backward."""
    if expected is None:
        raise WrongInput("loss.backward() does not shard gradients; use zero.accumulate(loss)")
    if k > expected:
        raise WrongInput(
            f"backward reached layer {k} again after its gradient was reduced; "
            "give zero.accumulate the loss of one pass through the model"
        )


def check_not_split(names: list[str]) -> None:
    """Raise ValueError if there are parameters that another strategy has split."""
    if names:
        raise WrongInput(
            f"{names[0]} is split over other ranks too, and zero.sum_squares adds up over "
            "the shards only; use ZeRO on a whole model, or do not clip"
        )
