"""What a model's layers hold, keep and compute on one of N ranks that split their matrices."""

from typing import NamedTuple

from minidist import nn
from minidist.attention_scores import computed_scores
from minidist.errors import WrongInput
from minidist.nn.cnn import ConvBlock, PooledHead, Stem
from minidist.planning.costs.kept import UNSPLIT, Parts, block_keeps, kept
from minidist.planning.costs.transformer_size import TransformerSize

ITEMSIZE = 8  # of float64, in which costs are measured


class Layer(NamedTuple):
    """Number of parameters on a rank; per example, bytes of activations and multiply-adds.

    deferred  the most bytes by which its deferred weight gradient may hold more than its forward
    once      bytes of activations that do not depend on the number of examples
    """

    parameters: int
    activations: int
    work: int
    deferred: int = 0
    once: int = 0


def cnn_layers(model: nn.CNN, image: tuple[int, int, int], channels: int = 1) -> list[Layer]:
    """Return the layers of a CNN for images [C, H, W]; its blocks are cut into `channels` parts.

    A convolution of k x k from C to F channels has F C k^2 weights and as many multiply-adds per
    output place; it keeps its input. Its norm has 2 F trained parameters, keeps n[F, H, W], and
    once for all examples 3 F numbers: mean, variance and r. A relu keeps its output, which is the
    next layer's input.
    """
    stem, blocks, head = parts_of(model)
    C, H, W = image
    F, places = stem.first.norm.gain.size, H * W
    result = [of_convolutions([(C, F, 3)], places, C * places + 2 * F * places)]
    for block in blocks:
        C, F = F, block.second.norm.gain.size
        own = F // channels  # between the two convolutions
        parts, kept = [(C, own, 3), (own, F, 3)], 2 * own + 2 * F
        if block.skip is not None:
            places //= 4
            parts, kept = [*parts, (C, F, 1)], kept + F + C
        result.append(of_convolutions(parts, places, kept * places))
    return [*result, pooled_head(head)]


def parts_of(model: nn.CNN) -> tuple[Stem, list[ConvBlock], PooledHead]:
    """Return the layers of a CNN by their kinds."""
    match model.layers:
        case [Stem() as stem, *blocks, PooledHead() as head]:
            return stem, [block for block in blocks if isinstance(block, ConvBlock)], head
    raise TypeError("the layers of an nn.CNN are a Stem, ConvBlocks and a PooledHead")


def pooled_head(head: PooledHead) -> Layer:
    """Return the head of a CNN, which keeps X[C], and the loss, which keeps its probabilities."""
    C, classes = head.linear.weight.shape
    return Layer(C * classes + classes, ITEMSIZE * (C + classes), C * classes)


def of_convolutions(parts: list[tuple[int, int, int]], places: int, kept: int) -> Layer:
    """Return the layer of convolutions (C, F, k), each with its norm, that keeps these numbers."""
    weights, norms = sum(C * F * k * k for C, F, k in parts), sum(F for _, F, _ in parts)
    return Layer(weights + 2 * norms, ITEMSIZE * kept, weights * places, once=3 * ITEMSIZE * norms)


def mlp_layers(model: nn.Sequential, rows: int = 1, columns: int = 1) -> list[Layer]:
    """Return the layers of an MLP whose weights are cut into `rows` or `columns` parts.

    A layer keeps X[C], gelu's input and factor; the loss keeps its probabilities.
    """
    result = []
    for i, (C, F) in enumerate(shapes_of(model)):
        kept = F if i == len(model.layers) - 1 else 2 * F // columns
        weight, bias = C * F // (rows * columns), F // columns
        result.append(Layer(weight + bias, ITEMSIZE * (C // rows + kept), weight))
    return result


def shapes_of(model: nn.Sequential) -> list[tuple[int, ...]]:
    """Return the shapes [C, F] of the weights of linear layers."""
    found = [layer.weight.shape for layer in model.layers if isinstance(layer, nn.Linear)]
    if len(found) < len(model.layers):
        raise WrongInput("only of an nn.MLP there are closed forms; measure a step of other layers")
    return found


def transformer_layers(
    size: TransformerSize,
    T: int,
    parts: Parts = UNSPLIT,
    attention: tuple[int, int] | None = None,
    routed: bool = False,
    itemsize: int = ITEMSIZE,
) -> list[Layer]:
    """Return the embedding, equal blocks and the head with the loss, for T positions.

    attention  numbers that attention keeps, and its multiply-adds; by default on one device
    routed     whether the experts, and the rows for them, are counted elsewhere
    """
    if size.experts and not routed:
        raise WrongInput("what experts keep depends on the routing: see costs/expert_parallel.py")
    C, heads, V = size.width, parts.heads, -(-size.vocab // (parts.vocabulary or 1))
    block = block_keeps(size, 1, T, itemsize, routed=routed)
    work = 2 * computed_scores(T) * C
    if attention is not None:
        block, work = block._replace(attention=itemsize * attention[0]), attention[1]
    keys = 2 * T * C * size.key_width // min(heads, size.key_heads)
    work = (2 * T * C * C + work) // heads + keys
    parameters = size.attention_parameters(heads) + C * size.experts
    if routed:
        work += T * C * size.experts + size.shared * 2 * T * C * size.hidden // parts.columns
        parameters += size.expert_parameters(parts.columns, size.shared)
    else:
        work += (3 if size.llama else 2) * T * C * size.hidden // parts.columns
        parameters += size.expert_parameters(parts.columns)
    found = kept(size, 1, T, itemsize, parts, block)
    return [
        Layer(V * C + size.positions * C, found.embedding, 0, found.deferred_end),
        *[Layer(parameters, found.block, work, found.deferred_block)] * size.layers,
        Layer(size.norm * C + V * C, found.head, T * C * V, found.deferred_end),
    ]


def width_of(model: nn.Transformer | nn.Seq2Seq) -> int:
    """Return C."""
    match model.layers:
        case [*_, nn.Head(norm=norm)]:
            return norm.gain.size
    raise TypeError("the last layer of a Transformer is an nn.Head")


def heads_of(model: nn.Transformer | nn.Seq2Seq) -> int:
    """Return H."""
    match model.layers:
        case [_, nn.Block() | nn.ExpertBlock() | nn.EncoderBlock() as block, *_]:
            return block.attention.heads
    raise TypeError("the second layer of a Transformer is a block")


def kv_heads_of(model: nn.Transformer | nn.Seq2Seq) -> int:
    """Return K: the heads of keys and values, H unless queries are grouped."""
    return getattr(model, "kv_heads", heads_of(model))


def holders_of_heads(model: nn.Transformer | nn.Seq2Seq, N: int) -> int:
    """Return how many of N ranks that split the heads hold the same one of keys and values."""
    return max(1, N // kv_heads_of(model))
