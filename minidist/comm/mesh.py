"""Mesh: ranks arranged along named axes, each axis a Group (Shazeer et al., Mesh-TensorFlow, 2018).

The rank at (i, j, k) on axes of a, b, c ranks is (i b + j) c + k: ranks that differ by 1 on the
last axis follow each other.
"""

import math
from numbers import Integral

from minidist.comm.group import Group
from minidist.errors import WrongInput, check_name


class Mesh:
    """A group's ranks in a grid: `Mesh(group, dp=2, pp=2, tp=2)`; the last axis is fastest.

    `mesh.tp` is the Group of the ranks that differ from this one in t only, numbered by t. Every
    rank of the group makes the same mesh.
    """

    dp: Group  # set for the axes that the mesh has
    pp: Group
    cp: Group
    tp: Group

    def __init__(self, group: Group, **axes: int):
        product = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axis"
        are_sizes = all(isinstance(size, Integral) and size > 0 for size in axes.values())
        if not are_sizes or math.prod(axes.values()) != group.size:
            raise WrongInput(
                f"{product} does not make {group.size} ranks; "
                f"the sizes must multiply to {group.size}"
            )
        group.barrier(label=product)  # else axes of two different meshes might match
        self.group, self.axes = group, axes
        self.coordinates = self.coordinates_of(group.rank)
        for name in axes:
            first = self.rank_of(**{name: 0})  # one color per line of ranks along this axis
            setattr(self, name, group.split(first, key=self.coordinates[name]))

    def over(self, *names: str) -> Group:
        """Return the group of the ranks that differ from this one on these axes only.

        They are numbered in the order of their ranks. An axis that the mesh lacks has size 1. Every
        rank calls this with the same names.
        """
        wide = [name for name in names if self.axes.get(name, 1) > 1]
        if len(wide) == 1:
            return getattr(self, wide[0])
        return self.group.split(self.rank_of(**dict.fromkeys(wide, 0)), key=self.group.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return {axis: coordinate} of a rank of the group."""
        coordinates = {}
        for name, size in reversed(self.axes.items()):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name in self.axes}

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at these coordinates; an axis that is not named keeps this rank's own."""
        for name in coordinates:
            check_name("axis", name, self.axes)
        rank = 0
        for name, size in self.axes.items():
            c = coordinates.get(name, self.coordinates[name])
            if not 0 <= c < size:
                raise WrongInput(f"{name}={c} is outside the axis of size {size}")
            rank = rank * size + c
        return rank

    def __repr__(self):
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"Mesh({axes}, at {self.coordinates})"
