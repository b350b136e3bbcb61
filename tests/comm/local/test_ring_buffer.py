"""Small messages in ring buffers: as sent, in order, promptly, whatever sockets carry between."""

import mmap
import threading
import time
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm.communicator import Key
from minidist.comm.fabric import Mailbox
from minidist.comm.local.ring_buffer import (
    CAPACITY,
    HEADS,
    LARGEST,
    NBYTES,
    WIDEST,
    RingBufferReader,
    RingBufferWriter,
)
from minidist.comm.local.shared_memory import SharedMemory
from minidist.errors import Deadlock
from tests.strategies import seeds

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128", "g", ">f8", ">i4"]


def ends():
    """Return both ends of a new ring buffer."""
    memory = SharedMemory(mmap.mmap(-1, NBYTES), 0, 1)
    return RingBufferWriter(memory, 0), RingBufferReader(memory, 0)


def key_of(tag, run=1):
    return Key(run, (), "message", tag)


def marked(number, nbytes):
    """Return an array of about so many bytes by which its message can be told from others."""
    return np.full(1 + nbytes // 8, number, np.int64)


def test_an_array_comes_out_as_it_was_put_in_and_nobody_elses():
    writer, reader = ends()
    arrays = [np.zeros((3, 0, 2)), np.zeros(()), np.broadcast_to(np.arange(3), (2, 3))]
    arrays += [np.arange(60).reshape(3, 4, 5).astype(dtype)[::2, 1:, ::-1] for dtype in DTYPES]
    for array in arrays:
        for was_on_gpu in (False, True):
            assert writer.put(key_of(7), (array, was_on_gpu))
        for was_on_gpu in (False, True):
            key, (found, flag) = reader.poll()
            assert key == key_of(7) and flag is was_on_gpu and found.flags.owndata
            np.testing.assert_array_equal(found, array, strict=True)
            assert found.dtype == array.dtype and found.flags.writeable
    assert reader.poll() is None


def test_a_full_ring_near_its_end_loses_nothing_to_a_message_that_would_go_to_its_beginning():
    writer, reader = ends()
    large = marked(1, LARGEST // 2)
    assert writer.put(key_of(1), (large, False)) and reader.poll() is not None  # its head is known
    sent = 0
    while writer.tail < CAPACITY - LARGEST // 4:
        assert writer.put(key_of(0), (np.array(sent), False)) and reader.poll() is not None
    while writer.put(key_of(0), (np.array(sent), False)):  # once round, to where it is read
        sent += 1
    assert not writer.put(key_of(1), (large, False))
    for number in range(sent):
        assert reader.poll() == (key_of(0), (number, False))


def test_more_kinds_of_messages_than_an_end_remembers():
    writer, reader = ends()
    for tag in [*range(HEADS + 5), *range(HEADS - 5, HEADS + 10), 0, 1]:
        writer.put(key_of(tag), (np.array(tag), False))
        key, (array, _) = reader.poll()
        assert key == key_of(tag) and array == tag and len(writer.numbers) <= HEADS


def test_a_head_that_is_wider_than_a_record_can_say_goes_another_way():
    writer, reader = ends()
    for tag in (1 << 8 * (WIDEST + 1), 1 << 8 * (CAPACITY + 1)):
        for _ in range(2):
            assert not writer.put(key_of(tag), (np.ones(3), False))
            reader.from_socket.append((key_of(tag), None))
            assert reader.poll() == (key_of(tag), None)
        assert writer.put(key_of(1), (np.ones(4), False))
        assert reader.poll()[1][0].size == 4 and not reader.has_pending()


def test_what_a_sender_was_killed_over_is_not_there():
    writer, reader = ends()
    announced = bytes(writer.words)
    writer.put(key_of(0), (np.ones(5), False))
    writer.words[:] = memoryview(announced).cast("Q")  # killed before it said so
    assert not reader.has_pending() and reader.poll() is None


@settings(max_examples=30)
@given(seed=seeds, large=st.floats(0, 0.5), hurry=st.floats(0.1, 0.9))
def test_ring_and_socket_together_are_one_queue(seed, large, hurry):
    """A sender, a receiver and a slow socket take steps in any order, for a few rounds."""
    random = np.random.default_rng(seed)
    (writer, reader), mailbox, socket, late = ends(), Mailbox(), deque(), deque()
    mailbox.polled[0] = reader
    sent, found = {tag: [] for tag in range(3)}, {tag: [] for tag in range(3)}

    def send(number):
        tag, most = int(random.integers(3)), 2 * LARGEST if random.random() < large else 2000
        array = marked(number, int(random.integers(most)))
        sent[tag].append((number, array.size))
        if not writer.put(key_of(tag), (array, False)):
            socket.append((key_of(tag), (array, False)))
            late.append(number)

    def look(tag):
        """Take the next message of this tag, if no earlier message is in the socket still."""
        left = sent[tag][len(found[tag]) :]
        if not left or (late and late[0] <= left[0][0]):
            return False
        array = mailbox.take([0], key_of(tag), "recv")[1][0]
        assert (array == array[0]).all()
        found[tag].append((array[0], array.size))
        return True

    def arrive():
        late.popleft()
        reader.from_socket.append(socket.popleft())
        mailbox.notify()

    for number in range(1, 150):
        send(number)
        if socket and random.random() < hurry:
            arrive()
        if random.random() < hurry:
            look(int(random.integers(3)))
        for tag in range(3):
            assert found[tag] == sent[tag][: len(found[tag])]
    while socket:
        arrive()
    for tag in range(3):
        while look(tag):
            pass
    assert found == sent and mailbox.count == 149


def counted(reader):
    """Return a semaphore that counts the requests to be woken."""
    requests, request_wake_up = threading.Semaphore(0), reader.request_wake_up

    def request():
        request_wake_up()
        requests.release()

    reader.request_wake_up = request
    return requests


def sleeps(mailbox, requests):
    """Return whether, in some seconds, one more thread has requested to be woken, and sleeps."""
    requested = requests.acquire(timeout=20)
    with mailbox.lock:  # which it holds until it sleeps
        return requested


@contextmanager
def receiving(mailbox, requests, tag):
    """Let another thread receive this tag from rank 0; it has to get it in a moment."""
    found = []
    thread = threading.Thread(target=lambda: found.append(mailbox.take([0], key_of(tag), "recv")))
    thread.daemon = True
    thread.start()
    assert sleeps(mailbox, requests)
    yield
    thread.join(timeout=5)
    assert found and found[0][1][0] == tag


def test_a_message_that_comes_just_before_the_call_to_be_woken_is_seen():
    (writer, reader), mailbox = ends(), Mailbox()
    mailbox.polled[0], request_wake_up = reader, reader.request_wake_up

    def too_late():
        writer.put(key_of(3), (np.array(3), False))
        assert not writer.must_wake()
        request_wake_up()

    reader.request_wake_up = too_late
    found = []
    thread = threading.Thread(
        target=lambda: found.append(mailbox.take([0], key_of(3), "recv")), daemon=True
    )
    thread.start()
    thread.join(timeout=5)
    assert found and found[0][1][0] == 3


def test_one_call_wakes_all_who_sleep_and_they_ask_for_another():
    (writer, reader), mailbox = ends(), Mailbox()
    mailbox.polled[0], requests = reader, counted(reader)
    with receiving(mailbox, requests, 1), receiving(mailbox, requests, 2):
        for tag in (1, 2):
            writer.put(key_of(tag), (np.array(tag), False))
            if tag == 1:
                assert writer.must_wake() and not writer.must_wake()
                mailbox.notify()
                assert sleeps(mailbox, requests)  # the second, again
        assert writer.must_wake()
        mailbox.notify()


@pytest.fixture
def pair(cluster):
    """Return two ranks, which have a core each: else there are no ring buffers between them."""
    ranks = cluster(2)
    if not all(ranks.run(lambda group: bool(group.fabric.mailbox.polled))):
        pytest.skip("ring buffers need an x86-64 processor, and a core for each rank")
    return ranks


def test_no_call_to_wake_up_is_lost_however_the_moments_fall(pair):
    """The receiver is about to fall asleep when the message comes; nobody else will wake it."""

    def worker(group, rounds):
        group.fabric.snapshot = lambda: None  # else it would poll the ring buffers now and then
        random, stop = np.random.default_rng(group.rank), time.monotonic() + 20
        try:
            for _ in range(rounds):
                end = time.perf_counter() + random.random() * 0.001
                while time.perf_counter() < end:
                    pass
                in_time = time.monotonic() < stop  # on a busy machine fewer rounds have to do
                group.send(np.array(in_time), to=1 - group.rank)
                if not (group.recv(1 - group.rank) and in_time):
                    break
        finally:
            del group.fabric.snapshot
        return "well"

    assert pair.run(worker, 1500, timeout=60) == ["well"] * 2


def test_a_message_in_the_ring_of_a_rank_that_never_looks_hides_no_deadlock(pair):
    def worker(group):
        group.send(np.ones(1), to=1 - group.rank)
        group.recv(group.rank)

    with pytest.raises(Deadlock, match="rank 0: waits in recv"):
        pair.run(worker, timeout=8)
