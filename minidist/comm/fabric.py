"""A rank's end of what connects the ranks: where messages arrive, what was sent, who waits.

Every transport makes a Fabric for each rank: threads, local processes, processes under MPI. They
differ in how a message gets into a mailbox.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from minidist.backend import Array, clock, device_module, on_gpu, synchronize, to_device, use_device
from minidist.comm.communicator import Communicator, Key, Message, NewGroup, Staged, staged
from minidist.comm.diagnosis import Signature, Snapshot, Wait, call_site, mismatch, snapshot
from minidist.comm.local.device_memory import TABLE, DeviceMemory
from minidist.comm.local.limits import GIVE_WAY
from minidist.comm.local.shared_memory import BLOCK, SharedMemory
from minidist.errors import WrongInput
from minidist.events import EventLog

CHECKS = 8  # of sources before a thread that spins gives its core away, which takes longer


class Stopped(BaseException):
    """Raised in a thread whose run has ended or is torn down; `except Exception` misses it."""


class Polled(Protocol):
    """The messages of one source that this rank fetches itself, in the order they were sent."""

    def poll(self) -> tuple[Key, Message] | None:
        """Return the next (key, message), or None if it is not here yet; one thread at a time."""

    def has_pending(self, checks: int = 1) -> bool:
        """Return whether a message was sent that `poll` has not returned; it may be on its way.

        checks  how often to look, where that takes less time than a call does
        """

    def request_wake_up(self) -> None:
        """Make the next send lead to `Mailbox.notify`. Poll once more before sleeping."""


class Pace(Protocol):
    """How threads of a rank wait, other than by sleeping until `Mailbox.notify` wakes them."""

    def offer(self) -> None:
        """Let another rank go first, perhaps; called before a thread communicates."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Return True when the condition holds; False, at once, if this thread has to sleep."""


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on number or size but memory.

    A transport either puts a message here, or keeps it until a thread of this rank polls: a thread
    that waits for it, or one that needs to know what has arrived. A thread that has polled for a
    moment without success requests to be woken, polls once more, and sleeps. The next message then
    makes the transport call `notify`; all threads that sleep poll, and request it again.

    polled  {source: where its messages are polled}
    spins   how often to poll before sleeping
    pace    how threads wait, if they do not sleep: in an interleaving, or where nothing wakes them
    """

    def __init__(self) -> None:
        self.polled: dict[int, Polled] = {}
        self.spins = 0
        self.messages: dict[tuple[int, Key], deque[Message]] = {}
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)
        self.waits: dict[int, Wait] = {}
        self.closed: BaseException | None = None  # why nobody communicates here any more
        self.over = -1  # the last run that has ended
        self.pace: Pace | None = None
        self.count = 0  # messages that ever arrived
        # {(source, tag): messages} of this run; a Counter takes twice as long.
        self.received = defaultdict[tuple[int, int], int](int)

    # Delivering.

    def put(self, source: int, key: Key, message: Message) -> None:
        """Add a message."""
        with self.lock:
            self._add(source, key, message)
            self.arrived.notify_all()

    def notify(self) -> None:
        """Poll every source; wake the threads that sleep, which check for themselves."""
        with self.lock:
            for source in self.polled:
                self._drain(source)
            self.arrived.notify_all()

    def _drain(self, source: int, wanted: Key | None = None) -> Message | None:
        """Take what the source has, with the lock held; stop at key `wanted` and return that."""
        polled = self.polled.get(source)
        while polled is not None and (polled_message := polled.poll()) is not None:
            key, message = polled_message
            if key == wanted:
                self.count += 1
                return message
            self._add(source, key, message)
        return None

    def _add(self, source: int, key: Key, message: Message) -> None:
        self.messages.setdefault((source, key), deque()).append(message)
        self.count += 1

    # Receiving.

    def take(self, sources: list[int], key: Key, operation: str) -> tuple[int, Message]:
        """Return (source, message): the oldest message of `key`; wait for it if need be.

        Where several sources have one, it is from the first of them in the list.
        """
        self.enter(key.run)
        seen = self.count
        received = self._pop(sources, key) or self._spin(sources, key, seen)
        if received is None:
            wait = Wait(
                f"{operation}(tag={key.number})" if key.kind == "message" else operation,
                lambda: [] if self._has_any(sources, key) else sources,
                call_site(),
            )
            with self.waiting(wait):
                while received is None:  # another thread of this rank may be faster
                    self.sleep_until(partial(self._is_ready, sources, key))
                    self.check_open(key.run)
                    received = self._pop(sources, key)
        return received

    def _pop(self, sources: list[int], key: Key) -> tuple[int, Message] | None:
        """Return the message that `take` is to return, if it is here."""
        self.lock.acquire()  # `with` would take twice as long
        try:
            for source in sources:
                queue = self.messages.get((source, key))
                if queue is None:
                    message = self._drain(source, key)
                    if message is None:
                        continue
                else:
                    message = queue.popleft()
                    if not queue:
                        del self.messages[source, key]
                if key.kind == "message":
                    self.received[source, key.number] += 1
                return source, message
            return None
        finally:
            self.lock.release()

    def _has_any(self, sources: list[int], key: Key) -> bool:
        return any((source, key) in self.messages for source in sources)

    def _is_ready(self, sources: list[int], key: Key) -> bool:
        """Return whether there is a message of `key` from one of these sources, or the run is over.

        If there is none, the next one calls `notify`.
        """
        for source in sources:
            if source in self.polled and (source, key) not in self.messages:
                self.polled[source].request_wake_up()
                self._drain(source)
        return self.is_over(key.run) or self._has_any(sources, key)

    def sleep_until(self, ready: Callable[[], bool]) -> None:
        """Return when the condition holds; it is asked after each `notify`, with the lock held."""

        def ready_now() -> bool:
            with self.lock:
                return ready()

        if self.pace is None or not self.pace.wait_until(ready_now):
            with self.lock:
                self.arrived.wait_for(ready)

    # Fast path: skip at first reading. Waking a sleeping thread takes longer than most messages.

    def _spin(self, sources: list[int], key: Key, seen: int) -> tuple[int, Message] | None:
        """Return the message if it comes while we poll `spins` times, else None.

        seen  how many messages had arrived before the caller last checked
        """
        polled = [self.polled[source] for source in sources if source in self.polled]
        if not polled:
            return None
        checks = max(1, CHECKS // len(polled))
        for _ in range(self.spins):
            if _any_has_pending(polled, checks) or self.count != seen:
                seen = self.count
                received = self._pop(sources, key)
                if received is not None or _any_has_pending(polled):
                    return received  # if None: a socket's reader needs this core
            GIVE_WAY()  # the sender may need this core
        return None

    def spin(self, condition: Callable[[], bool]) -> bool:
        """Poll the condition at most `spins` times; return whether it came to hold."""
        for _ in range(self.spins):
            GIVE_WAY()  # a rank that this one waits for may need this core
            if condition():
                return True
        return False

    # Diagnosis, and the end of runs.

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Record that this thread waits."""
        thread = threading.get_ident()
        self.waits[thread] = wait
        try:
            yield
        finally:
            del self.waits[thread]

    def enter(self, run: int) -> None:
        """Let another rank go first if an interleaving asks for it; raise if the run is over."""
        if self.pace is not None:
            self.pace.offer()
        if self.closed is not None or run <= self.over:
            self.check_open(run)

    def is_over(self, run: int) -> bool:
        return self.closed is not None or run <= self.over

    def check_open(self, run: int) -> None:
        """Stop this thread if the run is over, or if nobody communicates here any more."""
        if self.closed is not None:
            raise type(self.closed)(*self.closed.args)  # one for each thread that it stops
        if run <= self.over:
            raise Stopped(
                "this group is of a run that has ended; use the one that this run gave its worker"
            )

    def close(self, why: BaseException) -> None:
        """Stop every thread that waits here, and every one that comes; the first reason counts."""
        with self.lock:
            self.closed = self.closed or why
            self.arrived.notify_all()

    def end(self, run: int) -> None:
        """Stop every thread that communicates in this run, now or later."""
        with self.lock:
            self.over = run
            self.arrived.notify_all()

    def drop_runs_before(self, run: int) -> None:
        """Forget the messages of earlier runs."""
        self.received.clear()
        self.notify()
        with self.lock:
            for source, key in [where for where in self.messages if where[1].run < run]:
                del self.messages[source, key]


def _any_has_pending(polled: list[Polled], checks: int = 1) -> bool:
    for one in polled:  # any() over a generator takes four times as long for one
        if one.has_pending(checks):
            return True
    return False


@dataclass(frozen=True)
class Place:
    """Which rank this is: the part of its fabric that can be sent to another process.

    device   "cpu", "gpu" or "gpu:N": where `Fabric.empty` allocates
    hosts    the number of every rank's host, by first appearance: 0, 0, 1, 0, ...
    connect  makes communicators, see Fabric.communicator
    """

    rank: int
    size: int
    device: str
    hosts: list[int]
    connect: "Connect"


def numbered(hosts: Sequence[Hashable] | None, size: int) -> list[int]:
    """Return the number of each rank's host, by first appearance; all 0 if no host is named.

    ValueError unless there is one name for each of the `size` ranks.
    """
    if hosts is None:
        return [0] * size
    if len(hosts) != size:
        raise WrongInput(f"{len(hosts)} hosts are named for {size} ranks; name the host of each")
    names = list(dict.fromkeys(hosts))
    return [names.index(host) for host in hosts]


def fresh(array: Array) -> Array:
    """Return a copy that is done, also for other streams of a GPU."""
    copy = array.copy()
    synchronize(copy)
    return copy


class Outgoing:
    """What one rank sends to one other, by one thread at a time: the one that has the lock.

    posted  messages ever sent
    sent    {tag: messages} of this run, without the messages of collectives
    """

    def __init__(self) -> None:
        self.lock, self.posted = threading.Lock(), 0
        self.sent = defaultdict[int, int](int)  # a Counter takes twice as long


class Fabric:
    """One rank's end of what connects the ranks of a run: a mailbox, and memory that they share.

    rank, size, hosts, device  see Place
    mailbox            where its messages arrive
    memory             its memory on the host, which the ranks of the host share
    wake               (rank): makes that rank's mailbox `notify`; None if ranks poll
    deliver            (to, key, message): the transport's part of a send to another rank, by one
                       thread at a time for each; the array has been copied when it returns
    own_process        whether the rank is a process, and not one thread of the caller's
    outgoing           for each rank, what this one has sent there
    device_memory      what the ranks share on GPUs, or None; `table` is shared memory for the list
                       of this rank's part of it, until the ranks have met

    And of the present run:

    run, worker, log   its number; the thread that runs the worker; this rank's EventLog, or None
    older              the threads of this process that were there before the run
    blocks             of the boards of groups that this run has made by `split`
    opened             {name of a group: its communicator of NCCL}
    reordered          whether a library has added up in an order of its own that may show
    """

    def __init__(
        self,
        place: Place,
        mailbox: Mailbox,
        memory: SharedMemory,
        wake: Callable[[int], None] | None,
        deliver: Callable[[int, Key, Message], None],
        own_process: bool = True,
    ):
        self.rank, self.size, self.device = place.rank, place.size, place.device
        self.hosts, self.connect = place.hosts, place.connect
        self.mailbox, self.memory, self.wake, self.deliver = mailbox, memory, wake, deliver
        self.own_process = own_process
        self.outgoing = [Outgoing() for _ in range(self.size)]
        self.run = 0
        self.worker: int | None = None
        self.older: list[threading.Thread] | None = None
        self.log: EventLog | None = None
        self.blocks: list[np.ndarray] = []
        self.opened: dict[tuple[int, ...], Any] = {}
        self.reordered = False
        self.block = self._zeros()  # the first array in every region: at one offset in each
        self.table: np.ndarray | None = None
        self.device_memory: DeviceMemory | None = None
        if wake is not None and self.device != "cpu":
            self.table = self.memory.empty(1, TABLE)  # the second; untouched so far, hence zeros

    # What Group needs.

    def communicator(self, new: NewGroup, parent: Communicator | None) -> Communicator | None:
        """Return the communicator of a new group; None for a rank that joins none.

        parent  the communicator of the group that is split, all of whose ranks call this; None for
                the group of all ranks
        """
        return self.connect(self, new, parent)

    def send(self, to: int, key: Key, array: Array | Staged) -> None:
        """Send a copy. Never wait for the receiver; `array` may be written to right after.

        array  an array, or the `staged(array)` that several sends share
        """
        self.mailbox.enter(key.run)
        gpu = False
        if type(array) is not np.ndarray and isinstance(array := staged(array), Staged):
            array, gpu = array.host if self.own_process else array.array, True
        outgoing = self.outgoing[to]
        outgoing.lock.acquire()  # `with` would take twice as long
        try:
            outgoing.posted += 1
            if key.kind == "message":
                outgoing.sent[key.number] += 1
            if to == self.rank:
                self.mailbox.put(to, key, (fresh(array), gpu))
            else:
                self.deliver(to, key, (array, gpu))
        finally:
            outgoing.lock.release()

    def recv(self, sources: list[int], key: Key, operation: str) -> tuple[int, Array]:
        """Return (source, array): the oldest message of `key`; wait for it if need be.

        The array is fresh, and on the sender's kind of device. Where several sources have one, it
        is from the first of them in the list. A table of waits shows `operation`.
        """
        source, (array, was_on_gpu) = self.mailbox.take(sources, key, operation)
        if not was_on_gpu:
            return source, array
        if not on_gpu(array):
            return source, to_device(array, "gpu")
        return source, fresh(array)  # the memory of `array` may then go back to the sender's stream

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised array where the communicators need not copy it."""
        if self.device_memory is not None:
            return self.device_memory.empty(shape, dtype)
        if self.device != "cpu":
            return device_module(self.device).empty(shape, dtype)
        return self.memory.empty(shape, dtype)

    def use_device(self) -> None:
        """Let this thread use the rank's GPU; a thread of CuPy begins with the first one.

        On "gpu" the n-th rank of a host uses the GPU n modulo their number.
        """
        use_device(self.device, self.hosts[: self.rank].count(self.hosts[self.rank]))

    def in_place(self, array: Array) -> bool:
        """Return whether an array is from `empty`, or is a contiguous part of such an array."""
        memories = self.memory, self.device_memory
        return any(m is not None and m.offset_of(array) != m.nowhere for m in memories)

    def fail(self, error: Exception) -> NoReturn:
        """Raise `error`, and in every thread of this rank that communicates; the run fails."""
        self.mailbox.close(error)
        self.mailbox.check_open(self.run)
        raise error

    # What a communicator needs.

    def note_order(self, dtype: np.dtype, ranks: int) -> None:
        """Record that a library has added up this number of ranks in an order of its own."""
        # Whole numbers are exact in any order, and two numbers have one sum.
        self.reordered |= dtype.kind not in "biu" and ranks > 2

    def exchange(
        self, members: list[int], key: Key, mine: np.ndarray, operation: str
    ) -> list[np.ndarray]:
        """Return the array of each of these ranks, all of which call this; `key` is its own."""
        received, missing = {self.rank: mine}, [rank for rank in members if rank != self.rank]
        for rank in missing:
            self.send(rank, key, mine)
        while missing:
            source, received[source] = self.recv(missing, key, operation)
            missing.remove(source)
        return [received[rank] for rank in members]

    def explain(self, members: list[int], key: Key, call: Signature) -> NoReturn:
        """Raise CollectiveMismatch, which shows what each of these ranks has called, and where."""
        text = np.frombuffer(f"{call.text} at {call_site()}".encode(), np.uint8)
        texts = self.exchange(members, key, text, "collectives that do not match")
        raise mismatch(members, [called.tobytes().decode() for called in texts])

    def new_block(self) -> np.ndarray:
        """Return memory for this rank's part of a Board."""
        self.blocks.append(self._zeros())  # a slow rank may still read it when its group is gone
        return self.blocks[-1]

    def _zeros(self) -> np.ndarray:
        block = self.memory.empty(BLOCK, np.uint8)
        block[:] = 0
        return block

    # What a transport needs.

    def begin(self, run: int, logged: bool = False) -> None:
        """Start a run, when all ranks have ended the one before."""
        self.use_device()
        self.run = run
        self.log = EventLog(rank=self.rank, clock=clock(self.device)) if logged else None
        self.mailbox.drop_runs_before(run)
        for outgoing in self.outgoing:
            outgoing.sent.clear()
        self.blocks.clear()
        self.reordered = False
        self.free_groups()  # now that no rank uses one any more, else this would wait
        self.worker = threading.get_ident()
        self.older = threading.enumerate() if self.own_process else None

    def free_groups(self, failed: bool = False) -> None:
        """Destroy the communicators of NCCL, in one order on all ranks; if `failed`, abort them.

        To destroy one waits for its kernels, which end only if the other ranks start theirs.
        """
        for name in sorted(self.opened):
            library = self.opened.pop(name)
            library.abort() if failed else library.destroy()

    def close(self, failed: bool = False) -> None:
        """Close what this rank has open on GPUs, before it ends; `failed` as in `free_groups`."""
        self.free_groups(failed)
        if self.device_memory is not None:
            self.device_memory.close()

    def unreceived(self) -> dict[tuple[int, int, int], int]:
        """Return {(source, to, tag): messages sent minus received} of this run, as this rank knows.

        Summed over all ranks, what is left was never received.
        """
        known: Counter[tuple[int, int, int]] = Counter()
        for to, outgoing in enumerate(self.outgoing):
            for tag, n in dict(outgoing.sent).items():
                known[self.rank, to, tag] = n
        for (source, tag), n in dict(self.mailbox.received).items():
            known[source, self.rank, tag] -= n
        return dict(known)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of this rank's waits."""
        mailbox = self.mailbox
        mailbox.notify()
        posted = sum(outgoing.posted for outgoing in self.outgoing)
        return snapshot(mailbox.waits, self.worker, self.older, posted, mailbox.count)


# How a transport chooses communicators: see Fabric.communicator.
Connect = Callable[[Fabric, NewGroup, Communicator | None], Communicator | None]
