"""Links that sleep take the time that they say; a probe notes what is held."""

import time

import numpy as np
import pytest

from minidist import Cluster, Tensor, nn
from minidist.comm.collectives import ring
from tests.lessons.pages import FOLDER


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def seconds(group, n):
    from support.links import Links

    links, x = Links(group, 0.01, 1e-7), np.full(n, group.rank, np.float64)
    group.barrier()
    start = time.monotonic()
    ring(links, x, np.add)
    return time.monotonic() - start, x.tolist()


def test_a_ring_on_links_takes_its_closed_form_and_gives_the_sum():
    with Cluster(3, "thread") as cluster:
        for took, x in cluster.run(seconds, 30_000):
            assert 0.9 * 4 * (0.01 + 1e-7 * 80_000) <= took
            assert x == [3.0] * 30_000


def reduce(group):
    x = np.full(1000, 1.0)
    group.barrier()
    start = time.monotonic()
    return (
        group.all_reduce(x).tolist(),
        group.split(0).all_reduce(x).tolist(),
        time.monotonic() - start,
    )


def test_an_all_reduce_of_a_linked_cluster_sleeps_also_in_a_split_group():
    from support.links import linked_cluster

    with linked_cluster(2, 0.01, 1e-6) as cluster:
        for one, two, took in cluster.run(reduce):
            assert one == two == [2.0] * 1000 and took >= 2 * 2 * (0.01 + 1e-6 * 4000)


def test_a_probe_notes_what_is_held_and_how_much_work_is_done():
    from support.probes import Probed, watch

    notes = []
    model = nn.Sequential([Probed(notes, 64, 64, name=f"layers.{i}") for i in range(4)])
    x = Tensor(np.ones((512, 64), "float32"), requires_grad=True)
    work, held = watch(notes, lambda: model(x).sum().backward())
    assert work.tolist() == [0, 1, 2, 3, 6, 8, 10, 12]
    assert len(held) == 8
