"""Ranks in a grid."""

import numpy as np
import pytest

from minidist import Mesh
from minidist.errors import CollectiveMismatch, RankFailed


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
        {"dp": 4, "pp": 1, "tp": 2},
        {"dp": 1, "pp": 3, "tp": 1},
        {"tp": 4},
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


def test_a_mesh_on_processes(cluster):
    found = cluster(4).run(describe, {"dp": 2, "tp": 2})
    assert found[2][1] == {"dp": (1, [0, 2]), "tp": (0, [2, 3])}


def test_sizes_that_do_not_multiply_to_the_group_are_refused_with_the_numbers(cluster):
    with pytest.raises(RankFailed, match="dp=2 x tp=3 does not make 4 ranks"):
        cluster(4, "thread").run(lambda group: Mesh(group, dp=2, tp=3))
    with pytest.raises(RankFailed, match=r"tp=2\.0 does not make 2 ranks"):
        cluster(2, "thread").run(lambda group: Mesh(group, tp=2.0))


def test_ranks_that_do_not_make_the_same_mesh_are_told_so(cluster):
    def worker(group):
        Mesh(group, **({"dp": 2, "tp": 2} if group.rank else {"dp": 1, "tp": 4}))

    with pytest.raises(CollectiveMismatch, match="dp=1 x tp=4"):
        cluster(4, "thread").run(worker)


def test_a_coordinate_outside_its_axis_is_refused(cluster):
    with pytest.raises(RankFailed, match="tp=2 is outside the axis of size 2"):
        cluster(2, "thread").run(lambda group: Mesh(group, tp=2).rank_of(tp=2))


@pytest.mark.parametrize("names", [("dp",), ("cp",), ("dp", "cp"), ("pp", "tp"), ("none",)])
def test_a_group_over_several_axes_has_the_ranks_that_differ_on_these_alone(cluster, names):
    axes = {"dp": 2, "pp": 1, "cp": 2, "tp": 2}

    def worker(group):
        mesh = Mesh(group, **axes)
        over, alike = mesh.over(*names), [name for name in axes if name not in names]
        places = [mesh.coordinates_of(rank) for rank in range(group.size)]
        want = [
            r for r, at in enumerate(places) if all(at[n] == mesh.coordinates[n] for n in alike)
        ]
        wide = [name for name in names if axes.get(name, 1) > 1]
        return list(over.members) == want, len(wide) != 1 or over is getattr(mesh, wide[0])

    assert cluster(8, "thread").run(worker) == [(True, True)] * 8
