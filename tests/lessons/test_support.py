"""What lessons share: pictures that move, devices and links that sleep, notes of a probe."""

import re
import time

import numpy as np

from lessons.support import animations
from lessons.support.devices import Device
from minidist import Cluster, Tensor, nn
from minidist.comm.collectives import ring
from tests.lessons.pages import FOLDER, ROOT


def test_a_picture_in_the_repository_is_the_scripts():
    for name, movie in animations.MOVIES.items():
        made = movie().svg()
        assert (ROOT / "figures" / "moving" / f"{name}.svg").read_text("utf-8") == made
        assert "prefers-reduced-motion" in made and "<script" not in made


def test_after_the_last_hop_of_the_ring_every_piece_is_the_sum_of_all():
    for N in (2, 3, 4):
        movie = animations.ring(N)
        last = [part for part in movie.parts if f'class="s{2 * N}_{2 * N + 1}"' in part]
        numbers = [int(n) for part in last for n in re.findall(r">(\d+)</text>", part)]
        assert numbers == [N] * N * N


def test_a_device_is_its_linear_layer():
    device = Device("layers.0", 3, 0.0, 0.0, dtype="float64")
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    y = device(x)
    y.backward(np.ones((2, 3)))
    assert np.array_equal(y.data, device.linear(Tensor(x.data)).data)
    assert np.array_equal(x.grad, np.ones((2, 3)) @ device.linear.weight.data.T)


def seconds(group, n):
    from support.links import Links

    links, x = Links(group, 0.01, 1e-7), np.full(n, group.rank, np.float64)
    group.barrier()
    start = time.monotonic()
    ring(links, x, np.add)
    return time.monotonic() - start, x.tolist()


def test_a_ring_on_links_takes_at_least_its_closed_form_and_gives_the_sum(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    with Cluster(3, "thread") as cluster:
        for took, x in cluster.run(seconds, 30_000):
            assert 0.9 * 4 * (0.01 + 1e-7 * 80_000) <= took
            assert x == [3.0] * 30_000


def reduce(group):
    x = np.full(1000, 1.0)
    group.barrier()
    start = time.monotonic()
    both = group.all_reduce(x).tolist(), group.split(0).all_reduce(x).tolist()
    return *both, time.monotonic() - start


def test_an_all_reduce_of_a_linked_cluster_sleeps_also_in_a_split_group(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from support.links import linked_cluster

    with linked_cluster(2, 0.01, 1e-6) as cluster:
        for one, two, took in cluster.run(reduce):
            assert one == two == [2.0] * 1000 and took >= 2 * 2 * (0.01 + 1e-6 * 4000)


def test_a_probe_notes_what_is_held_and_how_much_work_is_done(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from support.probes import Probed, watch

    notes = []
    model = nn.Sequential([Probed(notes, 64, 64, name=f"layers.{i}") for i in range(4)])
    x = Tensor(np.ones((512, 64), "float32"), requires_grad=True)
    work, held = watch(notes, lambda: model(x).sum().backward())
    assert work.tolist() == [0, 1, 2, 3, 6, 8, 10, 12]
    assert len(held) == 8
