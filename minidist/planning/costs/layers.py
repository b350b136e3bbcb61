"""What a model's layers hold, keep and compute on one of N ranks that split their matrices."""

from minidist import nn
from minidist.errors import WrongInput


def shapes_of(model: nn.Sequential) -> list[tuple[int, ...]]:
    """Return the shapes [C, F] of the weights of linear layers."""
    found = [layer.weight.shape for layer in model.layers if isinstance(layer, nn.Linear)]
    if len(found) < len(model.layers):
        raise WrongInput("only of an nn.MLP there are closed forms; measure a step of other layers")
    return found


def heads_of(model: nn.Transformer | nn.Seq2Seq) -> int:
    """Return H."""
    match model.layers:
        case [_, nn.Block() | nn.ExpertBlock() | nn.EncoderBlock() as block, *_]:
            return block.attention.heads
    raise TypeError("the second layer of a Transformer is a block")
