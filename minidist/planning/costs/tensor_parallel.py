"""What split matrices move and hold.  N ranks; one activation has S = B T C itemsize bytes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from minidist import nn
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, cost_of, positions_of
from minidist.planning.costs.gradients import needed, needed_at
from minidist.planning.costs.kept import Parts
from minidist.planning.costs.layers import (
    heads_of,
    holders_of_heads,
    mlp_layers,
    shapes_of,
    transformer_layers,
    width_of,
)
from minidist.planning.costs.transformer_size import TransformerSize


def column_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_gather of Y forward and an all_reduce of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(F + 2 * C for C, F in shapes))


def row_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_reduce of Y forward and an all_gather of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(2 * F + C for C, F in shapes))


class Reduced(NamedTuple):
    """Positions of an example whose rows, of C numbers, pass an all_reduce, forward or backward.

    predicted  positions for which a word is predicted
    """

    attention: int
    feed_forward: int
    vocabulary: int
    predicted: int


COLUMNS = "qkv.weight", "query.weight", "key_value.weight", "expand.weight"
GATHERED = "qkv.weight", "query.weight", "expand.weight"  # with queries, keys and values
ROWS = "output.weight", "contract.weight"
SCATTERED = (*ROWS, "token.weight")


def reduced(case: Workload, starts: Iterable[int] = ()) -> Reduced:
    """Return what a step sums over ranks that split all matrices; `starts`: see `needed`.

    A block of a Transformer sums T rows in each direction in its attention, and again in its
    feed-forward part. Of a Seq2Seq, the attention of an encoder block sums the source's rows once
    forward, and twice backward: for queries, and for keys and values. The two attentions of a
    decoder block sum the target's rows twice each way and, backward, the source's once. The
    embeddings sum the rows of both, the head those of the target.

    That is: forward, the output of every product with rows; backward, the gradient of X of every
    product with columns, if it needs one. Of a mixture, that is once for all its experts.
    """
    both, source = case.inputs.shape[1], getattr(case.model, "source_length", 0)
    T, attention, feed_forward = both - source, 0, 0
    _, *layers, head = needed(case.model, starts)
    for block, met in zip(case.model.layers[1:-1], layers, strict=True):
        if isinstance(block, nn.ExpertBlock):
            feed_forward += 2 * T if needed_at(met, "expand.weight") else T
        for name, gradient in met.items():
            if ".experts." in name or ".shared." in name:
                continue
            if not (name.endswith(ROWS) or (name.endswith(COLUMNS) and gradient)):
                continue
            of_source = isinstance(block, nn.EncoderBlock) or name.endswith("key_value.weight")
            if name.endswith(("expand.weight", "contract.weight")):
                feed_forward += source if of_source else T
            else:
                attention += source if of_source else T
    vocabulary = both + T if needed_at(head, "weight") else both
    return Reduced(attention, feed_forward, vocabulary, T)


def attention_bytes(case: Workload, N: int) -> int:
    """Return the all_reduces of every block's attention: per Transformer block two of S."""
    return summed_bytes(case, N, reduced(case).attention) + copied_bytes(case, N)


def vocab_bytes(case: Workload, N: int) -> int:
    """Return the all_reduces of embedding and head, and the loss's three of B T numbers."""
    return summed_bytes(case, N, reduced(case).vocabulary) + loss_bytes(case, N)


def copied_bytes(case: Workload, N: int) -> int:
    """Return the all_reduces of W_kv[C, 2KD] over ranks that hold the same of its K heads.

    N/K ranks sum 2 C D numbers for each head and block.
    """
    named = case.model.named_parameters().items()
    numbers = sum(p.size for n, p in named if "key_value" in n and p.requires_grad)
    return 2 * (holders_of_heads(case.model, N) - 1) * numbers * ITEMSIZE


def summed_bytes(case: Workload, N: int, rows: int) -> int:
    """Return the bytes of all_reduces; rows: how many rows of C numbers per example are summed."""
    return 2 * (N - 1) * len(case.inputs) * rows * width_of(case.model) * ITEMSIZE


def loss_bytes(case: Workload, N: int) -> int:
    """Return the bytes of three all_reduces of B T numbers, in the loss over split logits."""
    return 6 * (N - 1) * len(case.inputs) * reduced(case).predicted * ITEMSIZE


def sequence_bytes(
    case: Workload, N: int, starts: Iterable[int] = (), replicas: int = 1, m: int = 1
) -> int:
    """Return (N - 1) S per passage of X (see `passages`), the loss, and partial gradients.

    replicas  groups of N ranks that share the examples; each sums all partial gradients
    m         micro-batches, for each of which copies of keys' and values' weights are summed
    """
    named = case.model.named_parameters()
    repeats = sum(named[n].size for n in repeated(named) if named[n].requires_grad)
    rows = _bytes(case, N, passages(case.model, starts) * width_of(case.model) + 6)
    copied = replicas * m * copied_bytes(case, N)
    return rows + 2 * (N - 1) * ITEMSIZE * replicas * repeats + copied


def passages(model: nn.Transformer, starts: Iterable[int] = ()) -> int:
    """Return how often X[B, T, C] is gathered or scattered over a split sequence.

    10 per block, 5 for embedding and head. A block gathers and scatters twice forward and twice
    backward, 8: as much as the four all_reduces of a block without a split sequence. It gathers
    twice more for dW. The head gathers, scatters dX, and gathers once more for dW; the embedding
    scatters, and gathers dX. What is for a frozen weight alone does not happen, and backward ends
    where no earlier parameter is trained (`starts`: see `needed`).
    """
    *others, (head, of_head) = zip(model.layers, needed(model, starts), strict=True)
    *_, last = head.parameters()  # the norm's two, and then the weight
    gathered, scattered, with_queries = [(last, of_head[str(last.name)])], [], []
    for layer, met in others:
        own = layer.named_parameters().items()
        gathered += [(p, met[name]) for name, p in own if name.endswith(GATHERED)]
        with_queries += [p for name, p in own if name.endswith("key_value.weight")]
        scattered += [met[name] or p.requires_grad for name, p in own if name.endswith(SCATTERED)]
    once_more = [p for p, _ in gathered if p.requires_grad]
    if with_queries:  # one gather for both
        pairs = zip([p for p, _ in gathered if "query" in str(p.name)], with_queries, strict=True)
        once_more += [kv for q, kv in pairs if kv.requires_grad and not q.requires_grad]
    back = [x for x in [*scattered, *(x for _, x in gathered)] if x]
    return len(gathered) + len(scattered) + len(back) + len(once_more)


def _bytes(case: Workload, N: int, numbers: int) -> int:
    """Return (N - 1) times `numbers` float64 per example, or per position of each."""
    rows = case.inputs.size if case.inputs.dtype.kind in "iu" else len(case.inputs)
    return (N - 1) * rows * numbers * ITEMSIZE


def repeated(names: Iterable[str]) -> list[str]:
    """Return the parameters of a Transformer that every rank of the tensor axis holds whole."""
    ends = ("output.bias", "contract.bias", "position.weight", "gate.weight")
    return [name for name in names if ".norm" in name or name.endswith(ends)]


def vocabulary(names: Iterable[str]) -> list[str]:
    """Return the parameters of a Transformer that are split, and padded, by the vocabulary."""
    ends = ("token.weight", "head.linear.weight")
    return [name for name in names if name.endswith(ends)]


def column_costs(case: Workload, N: int) -> list[Cost]:
    return [cost_of(mlp_layers(case.model, columns=N), len(case.inputs), 1)] * N


def row_costs(case: Workload, N: int) -> list[Cost]:
    return [cost_of(mlp_layers(case.model, rows=N), len(case.inputs), 1)] * N


def attention_costs(case: Workload, N: int) -> list[Cost]:
    return _costs(case, N, Parts(heads=N))


def vocab_costs(case: Workload, N: int) -> list[Cost]:
    return _costs(case, N, Parts(vocabulary=N))


def sequence_costs(case: Workload, N: int) -> list[Cost]:
    """Between the matrices every rank has T/N positions."""
    return _costs(case, N, Parts(N, N, N, N))


def _costs(case: Workload, N: int, parts: Parts) -> list[Cost]:
    """Return the same cost on every rank: each has a part of the layers, and all examples."""
    T = positions_of(case)
    own = transformer_layers(TransformerSize.of(case.model), T, parts)
    return [cost_of(own, len(case.inputs), T // parts.sequence)] * N


def _narrowest(axis: int, what: str, case: Workload, ranks: int) -> tuple[int, str]:
    return min(shape[axis] for shape in shapes_of(case.model)), what


row_limit: Callable = partial(_narrowest, 0, "rows")
column_limit: Callable = partial(_narrowest, 1, "columns")


def attention_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return heads_of(case.model), "heads"


def sequence_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(heads_of(case.model), case.inputs.shape[1]), "heads"


def vocab_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return case.model.vocab, "tokens"
