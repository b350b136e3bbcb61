"""Ranks on GPUs: which one each thread uses, what is copied, and in which order streams work.

The tests that count copies, or look for races, ask the stand-in of tests/strict_device.
"""

import numpy as np
import pytest

from minidist import Cluster, nn, optim
from minidist.backend import device_module, to_device, to_host
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("transport", ["process", "thread"])


@pytest.fixture
def stand_in():
    if not hasattr(pytest.importorskip("cupy"), "_counters"):
        pytest.skip("a real GPU does not count")


def gpus():
    return device_module("gpu").cuda.runtime.getDeviceCount()


@both
def test_every_thread_of_a_rank_uses_the_ranks_gpu(cluster, transport):
    def worker(group):
        Device, numbers = device_module("gpu").cuda.Device, [group.rank]
        beside = group.beside(lambda: numbers.append(Device().id), "beside")
        for _ in range(2):
            beside.put()
            beside.wait("the second thread")
        group.send(to_device(np.ones(2), "gpu"), to=(group.rank + 1) % group.size)
        received = group.recv((group.rank - 1) % group.size)
        shared = group.empty(3)
        return [*numbers, Device().id, received.device.id, shared.device.id]

    for rank, *numbers in cluster(3, transport, "gpu").run(worker):
        assert numbers == [rank % gpus()] * 5
    last = gpus() - 1
    for _, *numbers in cluster(2, transport, f"gpu:{last}").run(worker):
        assert numbers == [last] * 5


def copies(call):
    """Return how often a call copies to the host, and how often to the device."""
    from cupy import _counters

    with _counters.counting() as counts:
        call()
    return counts.to_host, counts.to_device


CALLS = {
    "send": lambda g, x: (g.send(x, (g.rank + 1) % g.size), g.recv((g.rank - 1) % g.size)),
    "broadcast": lambda g, x: g.broadcast(x),
    "all_gather": lambda g, x: g.all_gather(x),
    "all_gather, out": lambda g, x: g.all_gather(x, out=to_place(g, x)),
    "all_reduce": lambda g, x: g.all_reduce(x),
    "all_reduce, in place": lambda g, x: g.all_reduce(y := to_place(g, x), out=y),
    "reduce_scatter, shared": lambda g, x: g.reduce_scatter(to_place(g, x)),
    "ring": lambda g, x: g.all_reduce(x, algorithm="ring"),
}


def to_place(group, x):
    """Return an array from `empty` that has the elements of x once per rank."""
    place = group.empty(x.size * group.size, x.dtype)
    for r in range(group.size):
        place[r * x.size : (r + 1) * x.size] = x
    return place


def test_a_message_is_copied_to_the_host_once_however_many_receive_it(cluster, stand_in):
    def worker(group):
        x = to_device(np.ones(6), "gpu")
        return {name: copies(lambda call=call: call(group, x)) for name, call in CALLS.items()}

    root, *others = cluster(4, "process", "gpu").run(worker)
    assert root.pop("broadcast") == (1, 0)
    assert [found.pop("broadcast") for found in others] == [(0, 1)] * 3
    for found in (root, *others):
        assert found == {
            "send": (1, 1),
            "all_gather": (1, 3),
            "all_gather, out": (0, 0),
            "all_reduce": (0, 0),
            "all_reduce, in place": (0, 0),
            "reduce_scatter, shared": (0, 0),
            "ring": (6, 6),
        }


def test_ranks_that_are_threads_copy_nothing_to_the_host(cluster, stand_in):
    def worker(group):
        x = to_device(np.ones(6), "gpu")
        group.barrier()  # the count is of the process: all ranks together
        found = [copies(lambda call=call: call(group, x)) for call in CALLS.values()]
        group.barrier()
        return found

    assert cluster(4, "thread", "gpu").run(worker) == [[(0, 0)] * len(CALLS)] * 4


def model_of(group):
    model = nn.MLP([6, 8, 8, 3])
    model.to("gpu")
    return model.flatten(group.empty)


def examples(group):
    random = np.random.default_rng(group.rank)
    return to_device(random.standard_normal((4, 6)).astype("float32"), "gpu"), np.arange(4) % 3


def bucketed(group):
    model, (x, y) = model_of(group), examples(group)
    reducer = Bucketed(model, group, cap=64)
    for _ in range(3):
        for p in model.parameters():
            p.grad = None
        with reducer.reduce():
            nn.cross_entropy(model(x), y, reduction_size=4 * group.size).backward()
    return [to_host(p.grad) for p in model.parameters()]


def sharded(group):
    model, (x, y) = model_of(group), examples(group)
    zero = Zero(model, group, 3)
    optimizer = optim.SGD(zero.parameters(), 0.1)
    for _ in range(3):
        zero.accumulate(nn.cross_entropy(model(x), y, reduction_size=4 * group.size))
        zero.step(optimizer)
    return list(zero.state().values())


@both
@pytest.mark.parametrize("work", [bucketed, sharded])
def test_what_is_beside_backward_gives_the_same_bits_as_on_one_card(cluster, transport, work):
    found = [cluster(2, transport, device).run(work) for device in ("gpu", "gpu:0")]
    for ranks in found:
        for arrays in ranks:
            for a, b in zip(arrays, found[0][0], strict=True):
                assert a.tobytes() == b.tobytes()


def without_events(worker):
    """Return the worker on streams that do not wait for events."""

    def broken(group):
        cuda = device_module("gpu").cuda
        cuda.Stream.wait_event = lambda self, event: None
        return worker(group)

    return broken


@pytest.mark.parametrize("work", [bucketed, sharded])
def test_streams_that_wait_for_no_event_are_a_race(work, stand_in):
    with Cluster(2, device="gpu") as ranks:
        with pytest.raises(RankFailed, match="neither waits for the other"):
            ranks.run(without_events(work))


@both
def test_what_follows_a_wait_follows_the_work_of_the_second_stream(cluster, transport):
    def worker(group):
        x = to_device(np.zeros(3), "gpu")
        beside = group.beside(x.fill, "beside")
        beside.put(group.rank + 1)
        beside.wait("the second thread")
        return to_host(x * 2).tolist()  # it is a race if this stream has not waited

    assert cluster(2, transport, "gpu").run(worker) == [[2.0] * 3, [4.0] * 3]
