"""What a model's layers hold, keep and compute on one of N ranks that split their matrices."""

from typing import NamedTuple

from minidist import nn
from minidist.autograd.attention import computed_scores, kept_scores

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


def whole_layers(model: nn.Module, T: int) -> list[Layer]:
    """Return the layers of a model that a rank holds whole; T: positions of a Transformer."""
    check_closed_forms(model)
    return transformer_layers(model, T) if isinstance(model, nn.Transformer) else mlp_layers(model)


def check_closed_forms(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers have no closed forms here."""
    if isinstance(model, nn.Seq2Seq):
        raise ValueError(
            "there is no closed form of what the layers of an nn.Seq2Seq hold and compute; measure "
            "a step (tools/costs/measured.py), or use an nn.Transformer"
        )


def cnn_layers(model: nn.CNN, image: tuple[int, int, int], channels: int = 1) -> list[Layer]:
    """Return the layers of a CNN for images [C, H, W]; its blocks are cut into `channels` parts.

    A convolution of k x k from C to F channels has F C k^2 weights and as many multiply-adds per
    output place; it keeps its input. Its norm has 2 F trained parameters, keeps n[F, H, W], and
    once for all examples 3 F numbers: mean, variance and r. A relu keeps its output, which is the
    next layer's input.
    """
    stem, *blocks, head = model.layers
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


def pooled_head(head: nn.Module) -> Layer:
    """Return the head of a CNN, which keeps X[C], and the loss, which keeps its probabilities."""
    C, classes = head.linear.weight.shape
    return Layer(C * classes + classes, ITEMSIZE * (C + classes), C * classes)


def of_convolutions(parts: list[tuple[int, int, int]], places: int, kept: int) -> Layer:
    """Return the layer of convolutions (C, F, k), each with its norm, that keeps these numbers."""
    weights, norms = sum(C * F * k * k for C, F, k in parts), sum(F for _, F, _ in parts)
    return Layer(weights + 2 * norms, ITEMSIZE * kept, weights * places, once=3 * ITEMSIZE * norms)


def mlp_layers(model: nn.MLP, rows: int = 1, columns: int = 1) -> list[Layer]:
    """Return the layers of an MLP whose weights are cut into `rows` or `columns` parts.

    A layer keeps X[C], gelu's input and factor; the loss keeps its probabilities.
    """
    result = []
    for i, (C, F) in enumerate(layer.weight.shape for layer in model.layers):
        kept = F if i == len(model.layers) - 1 else 2 * F // columns
        weight, bias = C * F // (rows * columns), F // columns
        result.append(Layer(weight + bias, ITEMSIZE * (C // rows + kept), weight))
    return result


def transformer_layers(
    model: nn.Transformer, T: int, heads: int = 1, vocabulary: int | None = None
) -> list[Layer]:
    """Return the layers of a Transformer whose heads, and whose vocabulary, are cut in parts.

    vocabulary  parts; None: not split, so that no rows are looked up for other ranks
    """
    C, H = width_of(model), heads_of(model)
    X, scores = T * C, H * kept_scores(T)
    own = 8 * C * C + 10 * C + (4 * C * C + 3 * C) // heads
    kept = ITEMSIZE * (16 * X + 2 * T + (4 * X + scores) // heads)
    work = 8 * T * C * C + (4 * T * C * C + 2 * computed_scores(T) * C) // heads
    return _between_ends(model, T, Layer(own, kept, work), vocabulary)


def split_transformer_layers(
    model: nn.Transformer, T: int, N: int, sequence: bool = False
) -> list[Layer]:
    """Return the layers of a Transformer that is split by matrices, and by sequence if asked."""
    check_closed_forms(model)
    C, H = width_of(model), heads_of(model)
    kept = block_activation_bytes(1, T, C, H, ITEMSIZE, N, sequence, dropout=False)
    work = (12 * T * C * C + 2 * computed_scores(T) * C) // N
    later = ITEMSIZE * 4 * (T * C - T * C // N)  # what is outside of the split becomes 8 X from 4 X
    block = Layer(block_parameters(C, N), kept, work, later)
    return _between_ends(model, T, block, N, N if sequence else 1)


def _between_ends(
    model: nn.Transformer, T: int, block: Layer, vocabulary: int | None, sequence: int = 1
) -> list[Layer]:
    """Return the embedding, equal blocks and the head with the loss.

    For deferred weight gradients the embedding and the head's norm hold a gradient of X. A block
    holds 20 X then, no more than after its forward: 8 X outside of split matrices, 12 X inside.
    """
    if model.experts:
        raise ValueError("what experts keep depends on the routing: see costs/expert_parallel.py")
    V, C = model.vocab, width_of(model)
    X, n = T * C, vocabulary or 1
    looked_up = 0 if vocabulary is None else ITEMSIZE * (X + T)  # rows, and whose
    ends = ITEMSIZE * (2 * X + T) // sequence + ITEMSIZE * T * V // n
    return [
        Layer(V * C // n + T * C, looked_up, 0, ITEMSIZE * X // sequence),
        *[block] * (len(model.layers) - 2),
        Layer(2 * C + V * C // n, ends, X * V // n, ITEMSIZE * X // sequence),
    ]


def width_of(model: nn.Transformer) -> int:
    """Return C."""
    return model.layers[-1].norm.gain.size


def heads_of(model: nn.Transformer) -> int:
    """Return H."""
    return model.layers[1].attention.heads


def block_parameters(C: int, N: int) -> int:
    """Return how many parameters of a block of width C, F = 4 C, each of N ranks holds.

    QKV C 3C + 3C, output C C + C, expand C 4C + 4C, contract 4C C + C, two norms of 2C: of these
    12 C^2 + 7 C are split, and every rank has the biases of output and contract, and the norms.
    There are as many gradients, and twice as many averages of Adam.
    """
    return (12 * C * C + 7 * C) // N + 6 * C


def block_activation_bytes(
    B: int,
    T: int,
    C: int,
    H: int,
    itemsize: int,
    N: int = 1,
    sequence: bool = False,
    dropout: bool = True,
) -> int:
    """Return the bytes that a block's forward leaves on each of N ranks for its backward.

    In numbers, with F = 4 C and N dividing C, H and, with the sequence split, T:

        on every rank, or split by sequence
            two norms: n[B, T, C] and r[B, T] each; the inputs of QKV and expand     4 BTC + 2 BT
        split by heads, or columns
            Q, K, V; the output of attention, which is the next product's input      4 BTC
            probabilities P[B, H, T, T]; beyond 128 positions log Z[B, H, T]         B H kept_scores
            gelu Y = X s: X and s [B, T, F]; the input of contract                  12 BTC

    and two masks of one byte per element of X, if there is dropout. For float32 and float64 only:
    float16 keeps some intermediate results in float32.

    Compared with Korthikanti et al. 2022, section 4 (`korthikanti_bytes`), at their 2 bytes a
    number, we also keep gelu's factor s (8 BTC bytes) and the norms' r (4 BT). We do not drop out
    probabilities, which would take a mask and a dropped-out copy: 3 B H T T; and of the
    probabilities themselves, 2 B H T T, we keep `kept_scores(T)` in place of T T. They keep a
    norm's input where we keep n, of the same size.
    """
    X, P = B * T * C, B * H * kept_scores(T)
    outside = (4 * X + 2 * B * T) * itemsize + (2 * X if dropout else 0)
    inside = (16 * X + P) * itemsize
    return outside // (N if sequence else 1) + inside // N
