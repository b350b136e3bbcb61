"""The log that a run may be given."""

import threading
import time

import numpy as np
import pytest

from minidist import run
from minidist.comm import fabric
from minidist.events import Event, EventLog
from tests.clocks import QueueClock


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_every_operation_of_every_rank_is_an_event_with_its_bytes(transport):
    def worker(group):
        with group.log.span("work"):
            time.sleep(0.01)
        group.all_reduce(np.ones(8), label="w")
        group.barrier()
        if group.rank == 0:
            group.send(np.ones(3), to=1)
        else:
            group.recv(0)
        group.split(0).all_gather(np.ones(1))

    log = EventLog()
    run(worker, 2, transport=transport, log=log)
    names = {r: [e.name for e in log.events if e.rank == r] for r in (0, 1)}
    assert names[0] == ["work", "all_reduce w", "barrier", "send", "all_gather"]
    assert names[1] == ["work", "all_reduce w", "barrier", "recv", "all_gather"]
    assert [e.bytes for e in log.named("all_reduce w")] == [64, 64]
    assert [e.bytes for e in log.named("send")] == [24]
    assert all(e.seconds >= 0.01 and e.category == "compute" for e in log.named("work"))
    assert {e.category for e in log.events} == {"compute", "communication"}
    assert all(e.thread == "main" for e in log.events)


def test_ranks_share_a_clock():
    def worker(group):
        group.barrier()
        group.barrier()

    log = EventLog()
    run(worker, 3, log=log)
    barriers = log.named("barrier")
    first, last = barriers[::2], barriers[1::2]
    assert [event.rank for event in first] == [event.rank for event in last] == [0, 1, 2]
    for met in (first, last):  # nobody leaves before the last one has come
        assert min(event.end for event in met) >= max(event.start for event in met)


def test_a_log_with_a_device_s_clock_waits_for_nothing_until_its_seconds_are_read():
    queue = QueueClock()
    log = EventLog(rank=3, clock=queue)
    with log.span("outer"), log.span("inner"):
        pass
    assert queue.waits == 0
    assert [(e.rank, e.name, e.start, e.end) for e in log.in_seconds().events] == [
        (3, "inner", 2.0, 3.0),
        (3, "outer", 1.0, 4.0),
    ]
    assert (queue.marks, queue.waits) == (4, 4)
    assert log.in_seconds().in_seconds().events == log.in_seconds().events


def test_operations_and_spans_of_a_run_are_timed_by_the_clock_of_its_device(monkeypatch):
    monkeypatch.setattr(fabric, "clock", lambda device: QueueClock())

    def worker(group):
        with group.log.span("work"):
            group.barrier()

    log = EventLog()
    run(worker, 2, transport="thread", log=log)
    for rank in (0, 1):
        times = [(e.name, e.start, e.end) for e in log.events if e.rank == rank]
        assert times == [("barrier", 2.0, 3.0), ("work", 1.0, 4.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["process", "thread"])
def test_on_a_gpu_spans_are_in_the_machine_s_seconds(transport):
    def worker(group):
        with group.log.span("work"):
            x = group.empty(8)
            x[:] = 1
            time.sleep(0.01)
            group.all_reduce(x)

    log, before = EventLog(), time.monotonic()
    run(worker, 2, transport=transport, device="gpu", log=log)
    for inner, outer in zip(log.named("all_reduce"), log.named("work"), strict=True):
        assert before < outer.start <= inner.start < inner.end <= outer.end < time.monotonic()
        assert outer.seconds >= 0.01


@pytest.mark.gpu
def test_a_thread_of_the_worker_s_is_timed_by_the_clock_of_its_rank():
    """It uses GPU 0, and the clock is of the rank's GPU."""

    def worker(group):
        thread = threading.Thread(target=group.barrier)
        thread.start()
        thread.join()

    log = EventLog()
    run(worker, 2, transport="thread", device="gpu", log=log)
    assert len(log.named("barrier")) == 2 and min(e.seconds for e in log.events) >= 0


def test_from_zero_moves_all_times_alike():
    log = EventLog([Event(1, "b", 7.0, 8.0), Event(0, "a", 5.0, 6.5)])
    moved = log.from_zero().events
    assert [(e.name, e.start, e.end) for e in moved] == [("a", 0.0, 1.5), ("b", 2.0, 3.0)]
    assert EventLog().from_zero().events == []
    assert EventLog(unit="units").from_zero().unit == "units"
