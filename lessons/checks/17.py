"""Lesson 17's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.autograd.convolution import convolution
from minidist.tensor_parallel import SpatialConv2d


def crossing(group, start, window, stride):
    """Send the halos of one image of 24 rows, 1 channel and few columns; return the rows sent."""
    conv = nn.Conv2d(1, 1, window, stride, window // 2, dtype="float64")
    split = SpatialConv2d(conv, group, (0, start, 24))
    split(Tensor(np.zeros((1, 1, (start, 24 - start)[group.rank], window))))
    return group.ledger.total // (8 * window)


def check_1(attempt):
    cases = [(12, 3, 1), (12, 5, 1), (12, 3, 2), (11, 3, 2), (12, 5, 2), (13, 7, 3), (12, 5, 4)]
    with Cluster(2, "thread") as pair:
        for start, window, stride in cases:
            found = attempt(start, window, stride)
            right = sum(pair.run(crossing, start, window, stride))
            if not isinstance(found, int | float | np.number) or found != right:
                return (
                    f"{found!r:.40} rows for windows of {window}, stride {stride} and a second "
                    f"rank that begins at row {start}; sent were {right}"
                )


def solution_1(start, window, stride):
    last = (start - 1) // stride * stride  # the middle of the first rank's last window
    following = -(-start // stride) * stride  # and of the second rank's first window
    down = max(0, last + window // 2 - start + 1)
    up = max(0, start - (following - window // 2))
    return down + up


hints_1 = (
    "Draw start = 12, window = 5 and stride = 4: in which rows are the middles of the windows?",
    "The first rank's last window has the last multiple of stride below start in its middle.",
    "The second rank's first window has the first multiple from start on: it begins window // 2 "
    "rows above it, and needs those of them that are above start.",
)


def always_two_halves(start, window, stride):
    return 2 * (window // 2)


def half_per_stride(start, window, stride):
    return 2 * (window // 2) // stride


def overlap_of_windows(start, window, stride):
    return max(0, window - stride)


tempting_1 = [always_two_halves, half_per_stride, overlap_of_windows]

ROWS = (3, 4, 3)  # of three ranks


def gradients(halo, rank):
    """Return the gradient of this rank's rows and their halos."""
    shape = 2, 2, ROWS[rank] + 2 * halo, 3
    return np.random.default_rng([halo, rank]).standard_normal(shape)


def returned(group, attempt, halo):
    return attempt(group, gradients(halo, group.rank), halo)


def check_2(attempt):
    """Add up on one device what every rank has for a row of the image."""
    ends = np.cumsum([0, *ROWS])
    with Cluster(3, "thread") as ranks:
        for halo in (1, 2, 3):
            padded = np.zeros((2, 2, ends[-1] + 2 * halo, 3))
            for r, start in enumerate(ends[:-1]):
                padded[:, :, start : start + ROWS[r] + 2 * halo] += gradients(halo, r)
            found, wrong = ranks.run(returned, attempt, halo), []
            for r, got in enumerate(found):
                want = padded[:, :, halo:-halo][:, :, ends[r] : ends[r + 1]]
                if np.shape(got) != want.shape:
                    return f"rank {r} returns the shape {np.shape(got)}, not {want.shape}"
                off = abs(got - want).max(axis=(0, 1, 3)) > 1e-9
                wrong += (ends[r] + np.flatnonzero(off)).tolist()
            if wrong:
                return f"halos of {halo}: dX is wrong in the rows {wrong} of {ends[-1]}"


def solution_2(group, dy, halo):
    dx = dy[:, :, halo:-halo].copy()
    above, below = group.rank > 0, group.rank < group.size - 1
    if above:
        group.send(dy[:, :, :halo], group.rank - 1)
    if below:
        group.send(dy[:, :, -halo:], group.rank + 1)
    if above:
        dx[:, :, :halo] += group.recv(group.rank - 1)
    if below:
        dx[:, :, -halo:] += group.recv(group.rank + 1)
    return dx


hints_2 = (
    "A row beside a border is seen by the windows of two ranks. How many gradients has it got?",
    "The upper neighbour sends the gradients of its last `halo` rows: those are your first rows.",
    "They are one part of the sum, and your own part is in dx already: += instead of =.",
)


def exchanged(group, dy, halo, add, mirrored=False):
    dx = dy[:, :, halo:-halo].copy()
    ends = slice(None, halo), slice(-halo, None)
    sides = [(group.rank - 1, ends[0]), (group.rank + 1, ends[1])]
    sides = [(q, end) for q, end in sides if 0 <= q < group.size]
    for q, end in sides:
        group.send(dy[:, :, end], q)
    for q, end in sides:
        end = ends[end == ends[0]] if mirrored else end
        dx[:, :, end] = group.recv(q) + (dx[:, :, end] if add else 0)
    return dx


def replaces(group, dy, halo):
    return exchanged(group, dy, halo, add=False)


def forgets(group, dy, halo):
    return dy[:, :, halo:-halo].copy()


def at_the_other_end(group, dy, halo):
    return exchanged(group, dy, halo, add=True, mirrored=True)


def one_row(group, dy, halo):
    inner = dy[:, :, halo - 1 : dy.shape[2] - halo + 1]
    return exchanged(group, inner, 1, add=True)


tempting_2 = [replaces, forgets, at_the_other_end, one_row, lambda *_: None]


def check_3(attempt):
    """Ask autograd which rows of an image have a gradient."""
    for layers in ([(3, 1), (3, 1)], [(5, 1), (3, 1), (7, 1)], [(3, 2), (3, 1)], [(5, 3), (3, 2)],
                   [(3, 2), (5, 2), (3, 1)]):  # fmt: skip
        strides = int(np.prod([stride for _, stride in layers]))
        rows = 24 * strides
        x = y = Tensor(np.zeros((1, 1, rows, 1)), requires_grad=True)
        for window, stride in layers:
            weight = Tensor(np.ones((1, 1, window, 1)))
            y = convolution(y, weight, stride=stride, padding=(window // 2, 0))
        i = y.shape[2] // 2
        chosen = np.zeros(y.shape)
        chosen[:, :, i] = 1
        y.backward(chosen)
        right = i * strides - np.flatnonzero(x.grad)[0]
        found = attempt(layers)
        if not isinstance(found, int | float | np.number) or found != right:
            return f"{found!r:.40} rows for {layers}; its gradient reaches {right} rows up"


def solution_3(layers):
    rows, apart = 0, 1
    for window, stride in layers:
        rows += window // 2 * apart
        apart *= stride
    return rows


hints_3 = (
    "Without strides each layer sees window // 2 rows further up than the layer after it.",
    "After a layer of stride 2, neighbours in its output are two rows of the image apart.",
    "So a layer counts window // 2 times the product of the strides of all layers before it.",
)


def without_strides(layers):
    return sum(window // 2 for window, _ in layers)


def own_stride_too(layers):
    rows, apart = 0, 1
    for window, stride in layers:
        apart *= stride
        rows += window // 2 * apart
    return rows


def largest_window(layers):
    return max(window // 2 for window, _ in layers)


tempting_3 = [without_strides, own_stride_too, largest_window]
