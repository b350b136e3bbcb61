"""Sequence parallelism: between the split matrices, the sequence is split instead of repeated.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section
4.2.2. Letters: N ranks, r this one, T the sequence.

    X_r[B, T/N, C] -> norm -> all_gather -> columns ... rows -> reduce_scatter -> dropout -> + X_r

Under plain tensor parallelism every rank computes layer norm, dropout and the residual sum for all
T positions, and keeps the results. Here f becomes an all_gather over T (backward: reduce_scatter),
and g a reduce_scatter (backward: all_gather); together they move as many bytes as two all_reduces.

A rank keeps only X_r. dW needs all of X, so backward gathers it again: one more all_gather per
column-parallel layer. Parameters that act on a part of the sequence (norms, row biases, positions)
get only a part of their gradient on each rank; `all_reduce_partial` sums the parts.
"""

from functools import partial

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.autograd.deferred import Product
from minidist.autograd.kernels.softmax import sum_rows
from minidist.backend import array_module, matmul
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.linear import ACTIVATIONS
from minidist.parallel import sum_gradients
from minidist.parallel.collective_functions import reduce_scatter, reduce_scatter_along
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.parallel_transformer import ParallelTransformer, Parts
from minidist.tensor_parallel.row_parallel import RowParallelLinear

SEQUENCE = 1  # the axis of X[B, T, C] that is split


class GatheredLinear(Function):
    """Y = X W + b, X = all_gather of X_r over T.  dX_r = reduce_scatter of dY W^T, dW = X^T dY.

    X_r[B, T/N, C] -> Y[B, T, F/N]. Only X_r is kept; backward gathers X once more.
    """

    def __init__(self, group: Group, transposed: bool = False):
        self.group, self.transposed = group, transposed

    def forward(self, x, w, b=None):
        self.x, self.w = x, w.T if self.transposed else w
        whole = self.group.all_gather(x, SEQUENCE, label="sequence")
        y = matmul(whole.reshape(-1, x.shape[-1]), self.w)
        if b is not None:
            y += b
        return y.reshape(*whole.shape[:-1], y.shape[-1])

    def backward(self, grad):
        rows, dx, dw = grad.reshape(-1, grad.shape[-1]), None, None
        if self.inputs[0] is not None:
            dx = matmul(rows, self.w.T).reshape(*grad.shape[:-1], len(self.w))
            dx = reduce_scatter_along(dx, self.group, SEQUENCE)
        if self.inputs[1] is not None:
            whole = self.group.all_gather(self.x, SEQUENCE, label="sequence, once more")
            whole = whole.reshape(-1, whole.shape[-1])
            dw = Product(rows, whole) if self.transposed else Product(whole, rows)

        def db(out=None):
            return sum_rows(rows, out=out)

        return (dx, dw, db)[: len(self.inputs)]


class GatheredProducts(Function):
    """[Y_1, Y_2] = [X W_1, X W_2]: as GatheredLinear, for two weights[C, F_i/N] and one gather."""

    def __init__(self, group: Group):
        self.group = group

    def forward(self, x, *weights):
        self.x, self.weights = x, weights
        whole = self.group.all_gather(x, SEQUENCE, label="sequence")
        return array_module(x).concatenate([matmul(whole, w) for w in weights], axis=-1)

    def backward(self, grad):
        end = self.weights[0].shape[1]
        parts, dx = (grad[..., :end], grad[..., end:]), None
        dws = [None] * len(parts)
        if self.inputs[0] is not None:
            dx = sum(matmul(g, w.T) for g, w in zip(parts, self.weights, strict=True))
            dx = reduce_scatter_along(dx, self.group, SEQUENCE)
        if any(w is not None for w in self.inputs[1:]):
            whole = self.group.all_gather(self.x, SEQUENCE, label="sequence, once more")
            whole = whole.reshape(-1, whole.shape[-1])
            dws = [Product(whole, g.reshape(-1, g.shape[-1])) for g in parts]
        return dx, *dws


class SequenceColumnLinear(ColumnParallelLinear):
    """Y[B, T, F/N] = activation(all_gather(X[B, T/N, C]) W[C, F/N] + b[F/N])."""

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        arguments = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return ACTIVATIONS[self.activation](GatheredLinear(self.group)(*arguments))


class SequenceRowLinear(RowParallelLinear):
    """Y[B, T/N, F] = activation(reduce_scatter(X[B, T, C/N] W[C/N, F]) + b[F])."""

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = reduce_scatter(functions.linear(x, self.weight), self.group, SEQUENCE)
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


class SequenceDropout(nn.Module):
    """Dropout of X[B, T/N, C]: this rank's window of the mask that one device draws for [T, C]."""

    def __init__(self, dropout: nn.Dropout, group: Group):
        self.dropout, self.group = dropout, group

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        each, C = x.shape[1:]
        here = slice(self.group.rank * each, (self.group.rank + 1) * each)
        window, whole = (here, slice(0, C)), (self.group.size * each, C)
        return self.dropout.forward(x, randomness, window, whole)


def gathered_products(x: Tensor, group: Group, *weights: Tensor) -> list[Tensor]:
    y, first = GatheredProducts(group)(x, *weights), weights[0].shape[1]
    return [y[..., :first], y[..., first:]]


def gathered_product(x: Tensor, weight: Tensor, group: Group, transposed: bool) -> Tensor:
    return GatheredLinear(group, transposed)(x, weight)


def own_positions(T: int, group: Group) -> slice:
    if T % group.size:
        raise WrongInput(
            f"cannot split a sequence of {T} positions over {group.size} ranks; "
            f"use a multiple of {group.size}"
        )
    each = T // group.size
    return slice(group.rank * each, (group.rank + 1) * each)


SEQUENCE_PARALLEL = Parts(
    columns=SequenceColumnLinear,
    rows=SequenceRowLinear,
    dropout=SequenceDropout,
    positions=own_positions,
    leave=partial(reduce_scatter, axis=SEQUENCE),
    product=gathered_product,
    products=gathered_products,
)


def sequence_parallel(
    model: nn.Transformer | nn.Seq2Seq, group: Group, check_weights: bool = True
) -> ParallelTransformer:
    """Return the model with its matrices split and, between them, the sequence split."""
    if isinstance(model, nn.Seq2Seq):
        raise WrongInput(
            f"sequence parallelism cuts one sequence, and an nn.Seq2Seq has two, of "
            f"{model.source_length} and {model.target_length} positions; use ParallelTransformer, "
            "or split_sequence=False"
        )
    if getattr(model, "experts", 0):
        raise WrongInput(
            "sequence parallelism would show a mixture of experts a part of each sequence; use "
            "ParallelTransformer, or split_sequence=False"
        )
    if any(p.format.product is not None for p in model.parameters()):
        raise WrongInput(
            "the gathered products of a split sequence are of the model's dtype, not of eight "
            "bits; use ParallelTransformer, or split_sequence=False"
        )
    return ParallelTransformer(model, group, SEQUENCE_PARALLEL, check_weights)


def all_reduce_partial(model: nn.Module, group: Group) -> None:
    """Sum the gradients of parameters that all ranks hold, each using them on its positions."""
    sum_gradients([p for p in model.parameters() if p.shard is None], group)
