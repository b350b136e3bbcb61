"""Ranks in a grid."""

import numpy as np
import pytest

from minidist import Mesh
from minidist.errors import CommError


def describe(group, axes):
    mesh = Mesh(group, **axes)
    found = {}
    for name in axes:
        line = getattr(mesh, name)
        found[name] = line.rank, line.all_gather(np.array([group.rank])).tolist()
    back = mesh.rank_of(**mesh.coordinates_of(group.rank))
    return mesh.coordinates, found, back, mesh.rank_of()


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "pp": 2, "tp": 2},
        {"dp": 1, "pp": 3, "tp": 1},
        {"dp": 1, "tp": 1},
    ],
)
def test_the_last_axis_varies_fastest_and_each_axis_is_a_group(cluster, axes):
    names, sizes = list(axes), list(axes.values())
    grid = np.arange(np.prod(sizes)).reshape(sizes)
    found = cluster(grid.size, "thread").run(describe, axes)
    for rank, (coordinates, lines, back, own) in enumerate(found):
        position = [int(i) for i in np.unravel_index(rank, sizes)]
        assert coordinates == dict(zip(names, position, strict=True))
        assert back == own == rank
        for axis, name in enumerate(names):
            index = tuple(slice(None) if i == axis else p for i, p in enumerate(position))
            assert lines[name] == (position[axis], grid[index].tolist())


REFUSED = [
    (4, lambda group: Mesh(group, dp=2, tp=3), "dp=2 x tp=3 does not make 4 ranks"),
    (2, lambda group: Mesh(group, tp=2.0), r"tp=2\.0 does not make 2 ranks"),
    (2, lambda group: Mesh(group, tp=2).rank_of(tp=2), "tp=2 is outside the axis of size 2"),
    (
        2,
        lambda group: Mesh(group, **{"dp": 2} if group.rank else {"tp": 2}),
        r"(?s)did not call the same.*dp=2",
    ),
]


def test_what_is_no_mesh_is_refused_with_the_numbers(cluster):
    for size, worker, message in REFUSED:
        with pytest.raises(CommError, match=message):
            cluster(size, "thread").run(worker)


def test_a_group_over_several_axes_has_the_ranks_that_differ_on_these_alone(cluster):
    axes = {"dp": 2, "pp": 1, "cp": 2, "tp": 2}

    def worker(group, names):
        mesh = Mesh(group, **axes)
        over, alike = mesh.over(*names), [name for name in axes if name not in names]
        places = [mesh.coordinates_of(rank) for rank in range(group.size)]
        want = [
            r for r, at in enumerate(places) if all(at[n] == mesh.coordinates[n] for n in alike)
        ]
        wide = [name for name in names if axes.get(name, 1) > 1]
        return list(over.members) == want, len(wide) != 1 or over is getattr(mesh, wide[0])

    for names in [("dp",), ("cp",), ("dp", "cp"), ("pp", "tp"), ("none",)]:
        assert cluster(8, "thread").run(worker, names) == [(True, True)] * 8, names
