"""Images cut by their rows: a convolution needs a few rows of the neighbours, its halo.

Dryden et al., Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism
(IPDPS 2019). Letters: N ranks, r this one; X[B, C, H, W], windows of K x K.

    X[B, C, H/N, W]   rank 0   . 0 1 2 3 4         K = 3: the rows that rank r needs for its rows of
                      rank 1         3 4 5 6 7     the output; 4 is rank 1's, and . is zeros
                      rank 2               6 7 8 9 .

Forward sends floor(K/2) rows over every border, both ways. In backward the gradients of these rows
go back to the rank that has them, which adds them to its own: each row is used on both sides.

Weights are the same on every rank, and each rank's gradient is the part of its rows, dW{+N}, which
`sum_partial` adds up. The mean of a channel is over all rows of all ranks, so batch norm sums its
statistics over the ranks (`sum_over_ranks`), as if rows were examples. The mean of an image is also
summed over the ranks. The head comes after it: every rank has the same, and its whole gradient.
"""

from dataclasses import dataclass, replace

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.autograd.convolution import convolution
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.cnn import ConvBlock, PooledHead, Stem
from minidist.nn.datasets import Batch
from minidist.nn.linear import ACTIVATIONS
from minidist.parallel import check_same_weights, sum_gradients, sum_statistics
from minidist.parallel.collective_functions import own_part, reduce_from
from minidist.parallel.trainer import Trainer
from minidist.pieces import split_ends
from minidist.rng import Randomness

ROWS = 2  # the axis of X[B, C, H, W] that is split


@dataclass(frozen=True)
class Halos:
    """Which rows each rank has, and which it needs, where windows of `kernel` rows are computed.

    ends  rank r has the rows ends[r] to ends[r + 1] - 1. It computes the windows that begin, but
          for the padding, in a row of its own; ValueError if a rank has no such window
    """

    ends: tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0

    def __post_init__(self):
        after = self.after
        for r in range(ranks := len(after) - 1):
            if after[r] >= after[r + 1]:
                raise WrongInput(
                    f"cannot split {self.ends[-1]} rows of an image over {ranks} ranks: rank {r} "
                    f"would have none of the {after[-1]} that a layer makes of them; use fewer "
                    "ranks or larger images"
                )

    @property
    def after(self) -> tuple[int, ...]:
        """The ends of the output's rows."""
        rows = (self.ends[-1] + 2 * self.padding - self.kernel) // self.stride + 1
        inner = (min(rows, -(-end // self.stride)) for end in self.ends[:-1])
        return (*inner, rows)

    def has(self, r: int) -> range:
        return range(self.ends[r], self.ends[r + 1])

    def needs(self, r: int) -> range:
        """Return the rows that the windows of rank r see; below 0 and from H on they are zeros."""
        first, stop = self.after[r : r + 2]
        start = first * self.stride - self.padding
        return range(start, start + (stop - first - 1) * self.stride + self.kernel)

    def piece(self, r: int, source: int) -> range:
        """Return the rows that rank r needs and `source` has."""
        needs, has = self.needs(r), self.has(source)
        return range(max(needs.start, has.start), min(needs.stop, has.stop))

    def idle(self, r: int) -> bool:
        """Return whether rank r needs its own rows, and nothing is sent from it or to it."""
        others = [q for q in range(len(self.ends) - 1) if q != r]
        moves = any(self.piece(r, q) or self.piece(q, r) for q in others)
        return self.needs(r) == self.has(r) and not moves


class HaloExchange(Function):
    """X[B, C, own rows, W] -> Y[B, C, needed rows, W].

    Forward: rows go to all ranks that need them.  Backward: dY of these rows comes back, and is
    added: dX = sum over the ranks of what each has for the row.
    """

    def __init__(self, group: Group, halos: Halos):
        self.group, self.halos = group, halos

    def forward(self, x: Array) -> Array:
        group, halos, r = self.group, self.halos, self.group.rank
        has, needs = halos.has(r), halos.needs(r)
        if x.shape[ROWS] != len(has):
            raise WrongInput(f"rank {r} has {len(has)} rows of an image, not {x.shape[ROWS]}")
        y = array_module(x).zeros((*x.shape[:ROWS], len(needs), x.shape[-1]), x.dtype)
        for q in self.others():
            self.send(x, has, halos.piece(q, r), q)
        for q in range(group.size):
            if piece := halos.piece(r, q):
                rows(y, needs, piece)[...] = rows(x, has, piece) if q == r else group.recv(q)
        return y

    def backward(self, grad: Array) -> Array:
        group, halos, r = self.group, self.halos, self.group.rank
        has, needs = halos.has(r), halos.needs(r)
        dx = array_module(grad).zeros((*grad.shape[:ROWS], len(has), grad.shape[-1]), grad.dtype)
        for q in self.others():
            self.send(grad, needs, halos.piece(r, q), q)
        for q in range(group.size):
            if piece := halos.piece(q, r):
                rows(dx, has, piece)[...] += rows(grad, needs, piece) if q == r else group.recv(q)
        return dx

    def others(self) -> list[int]:
        return [q for q in range(self.group.size) if q != self.group.rank]

    def send(self, x: Array, has: range, piece: range, to: int) -> None:
        if piece:
            self.group.send(array_module(x).ascontiguousarray(rows(x, has, piece)), to)


def rows(x: Array, has: range, piece: range) -> Array:
    """Return the view of the rows `piece` of an array that has the rows `has`."""
    return x[:, :, piece.start - has.start : piece.stop - has.start]


def with_halos(x: Tensor, group: Group, halos: Halos) -> Tensor:
    return x if halos.idle(group.rank) else HaloExchange(group, halos)(x)


class SpatialConv2d(nn.Module):
    """Y[B, F, H'/N, W'] = activation(halos(X[B, C, H/N, W]) * W[F, C, K, K] + b[F]).

    conv  the whole layer, whose parameters it uses;  ends  see Halos
    """

    def __init__(self, conv: nn.Conv2d, group: Group, ends: tuple[int, ...]):
        self.group, self.activation = group, conv.activation
        self.stride, self.padding = conv.stride, conv.padding
        self.weight, self.bias = conv.weight, conv.bias
        self.halos = Halos(ends, conv.weight.shape[2], conv.stride, conv.padding)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = with_halos(x, self.group, self.halos)  # whose zeros are the padding of rows
        y = convolution(x, self.weight, self.bias, self.stride, (0, self.padding))
        return ACTIVATIONS[self.activation](y)


class SpatialPool(nn.Module):
    """The mean of each square of k x k pixels, or of each whole image: then Y[B, C] on every rank.

    pool  the whole layer;  ends  see Halos
    """

    def __init__(self, pool: nn.AveragePool, group: Group, ends: tuple[int, ...]):
        self.pool, self.group, self.height = pool, group, ends[-1]
        if pool.k is not None and self.height % pool.k:
            raise WrongInput(
                f"cannot cut images of {self.height} rows into squares of {pool.k} x {pool.k}; use "
                f"a multiple of {pool.k}"
            )
        self.halos = None if pool.k is None else Halos(ends, pool.k, pool.k)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        if self.halos is not None:
            return self.pool(with_halos(x, self.group, self.halos))
        sums = x.mean(axis=3).sum(axis=2)  # of rows' means: the sum of all may overflow float16
        return reduce_from(sums, self.group) / self.height


def spatial_parallel(
    model: nn.CNN, group: Group, height: int, check_weights: bool = True
) -> nn.CNN:
    """Let a model take this rank's rows of images of `height` rows, in place; return the model.

    X[B, C, H/N, W], from `own_rows`, -> logits[B, classes], on every rank. After backward call
    `sum_partial`. ValueError if a rank would have no row in some layer.

    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """
    if not isinstance(model, nn.CNN):
        raise WrongInput(f"cannot split the images of {type(model).__name__}; use an nn.CNN")
    if check_weights:
        check_same_weights(model, group)
    ends = tuple(split_ends(height, group.size))
    for layer in model.layers:
        match layer:
            case Stem():
                ends = _split(layer.first, group, ends)
            case ConvBlock():
                if layer.skip is not None:
                    layer.pool = SpatialPool(layer.pool, group, ends)
                    _split(layer.skip, group, layer.pool.halos.after)
                ends = _split(layer.second, group, _split(layer.first, group, ends))
            case PooledHead():
                layer.pool = SpatialPool(layer.pool, group, ends)
    model.flatten()
    return model


def _split(layer, group: Group, ends: tuple[int, ...]) -> tuple[int, ...]:
    """Split a convolution and the norm after it, in place; return the ends of its output's rows."""
    layer.conv = SpatialConv2d(layer.conv, group, ends)
    sum_statistics(layer.norm, group)
    return layer.conv.halos.after


def own_rows(images: Array, group: Group) -> Array:
    """Return this rank's rows of images[B, C, H, W]; as equal as can be, the larger parts first."""
    return own_part(images, group, ROWS)


def sum_partial(model: nn.CNN, group: Group) -> None:
    """Sum the gradients of all layers below the head, each a sum over this rank's rows."""
    sum_gradients([p for layer in model.layers[:-1] for p in layer.parameters()], group)


class SpatialParallel(Trainer):
    """This rank's rows of all images, and the whole CNN: the Trainer of this file.

    model          a single-device CNN, the same on every rank; changed in place
    height         rows of an image
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(self, model: nn.CNN, group: Group, height: int, check_weights: bool = True):
        split = spatial_parallel(model, group, height, check_weights)
        super().__init__(split, group, check_group=group if check_weights else None)
        self.ends = split_ends(height, group.size)

    def share(self, batch: Batch) -> Batch:
        first, stop = self.ends[self.group.rank : self.group.rank + 2]
        return replace(batch, inputs=batch.inputs[:, :, first:stop])

    def sum_gradients(self) -> None:
        assert isinstance(self.model, nn.CNN)
        sum_partial(self.model, self.group)

    def total(self, loss: Array) -> float:
        return float(loss)  # the head has the mean of whole images, on every rank
