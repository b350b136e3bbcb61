"""Axes that are cut into factors, so that a reshape and a transpose need no op.

    Y[B, T, 3C]  reshaped to  [B, T, 3, H, D]        the axis 3C of Y is cut into 3, H and D;
    Y = X[B, T, C] W[C, 3C]                          it is a twin of W's columns: W[C, 3, H, D]

An array of the model is then a view of a value: each of its axes is a list of the value's axes.
"""

from dataclasses import dataclass, field

from minidist.errors import WrongInput


@dataclass(eq=False)
class Axis:
    """An axis of a value: how long it is, its parts once it is cut, its twins: cut alike."""

    size: int
    parts: list["Axis"] = field(default_factory=list)
    twins: dict["Axis", None] = field(default_factory=dict)

    def leaves(self) -> list["Axis"]:
        """Return the axes that this one has been cut into; an axis that is not cut: itself."""
        return leaves(self.parts) if self.parts else [self]

    def cut(self, first: int) -> None:
        """Cut this leaf and its twins into `first` and the rest; the first changes slowest."""
        self.parts = [Axis(first), Axis(self.size // first)]
        for twin in self.twins:
            if not twin.parts:
                twin.cut(first)
            match(self.parts, twin.parts)


def leaves(axes: list[Axis]) -> list[Axis]:
    return [leaf for axis in axes for leaf in axis.leaves()]


def match(left: list[Axis], right: list[Axis]) -> None:
    """Cut both until their leaves agree, and make these twins."""
    left, right = list(left), list(right)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.parts or b.parts:
            left[:0], right[:0] = a.leaves(), b.leaves()
        elif a.size == b.size and bool(left) != bool(right) and is_one(left + right):
            one_more = b if left else a  # [C] and [C, 1]
            one_more.cut(one_more.size)
            left[:0], right[:0] = [a], [b]
        elif a.size == b.size:
            a.twins[b] = b.twins[a] = None
        else:
            cut_one(a, b)
            left[:0], right[:0] = [a], [b]


def is_one(axes: list[Axis]) -> bool:
    return all(axis.size == 1 for axis in axes)


def cut_one(a: Axis, b: Axis) -> None:
    """Cut the longer leaf, by the length of the shorter."""
    long, short = (a, b) if a.size > b.size else (b, a)
    if long.size % short.size:
        raise WrongInput(
            f"an axis of {long.size} does not divide into parts of {short.size}; reshape such that "
            "each axis is cut into whole factors, or several are merged into one"
        )
    long.cut(short.size)


def reshaped(dims: list[list[Axis]], shape: tuple[int, ...]) -> list[list[Axis]]:
    """Return the axes of a view in another shape; axes are cut where the new shape cuts them."""
    left = leaves([axis for dim in dims for axis in dim])
    found: list[list[Axis]] = []
    for size in shape:
        taken: list[Axis] = []
        if size == 1 and not left:  # [C] becomes [C, 1]
            last = found[-1].pop()
            last.cut(last.size)
            kept, one = last.leaves()
            found[-1].append(kept)
            left = [one]
        while size > 1 or not taken:
            axis = left.pop(0)
            if axis.size > size or size % axis.size:
                cut_one(axis, Axis(size))
                left[:0] = axis.leaves()
            else:
                taken.append(axis)
                size //= axis.size
        found.append(taken)
    return found
