"""Measure communication against MPICH and gloo, and data parallelism against DDP, in one run.

If a peer is missing, or fails, its rows say so: pip install 'minidist[bench]'.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from minidist import Cluster, Tensor, nn, optim
from minidist.comm import Group
from minidist.data_parallel.replicated import BucketedDataParallel
from minidist.data_parallel.zero import Zero
from minidist.expert_parallel import keep_own_experts
from minidist.nn.datasets import Batch
from minidist.observe.bench.steps import trainer_step, training_step
from minidist.observe.bench.table import (
    Step,
    Times,
    Works,
    middle,
    peer,
    rounds_of,
    slowest,
    times_of,
)
from minidist.rng import generator

TITLE = "float32"
EIGHT, SIZES = "8 bytes", {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "64 MB": 1 << 26}
WIDTHS, BATCH = [784, 512, 512, 10], 1024
POSITIONS, WIDTH = 2048, 256  # of the experts


def rows(rounds: int = 3) -> Iterator[dict]:
    """Yield the rows of collectives, messages, starts and data parallel steps."""
    for size in (2, 4):
        yield from communication(size, rounds)
    contest = rounds_of(rounds, ours=start_and_run)
    yield contest.row("4 ranks up", "up", note="at most 1000 ms")
    yield contest.row("a run of 4 ranks that does nothing", "run", note="at most 5 ms")
    for size in (2, 4):
        yield journeys(size, rounds)
    yield from data_parallel(rounds)


def communication(size: int, rounds: int) -> Iterator[dict]:
    """Compare collectives and messages of `size` ranks with MPICH's and gloo's."""
    with Cluster(size) as ranks:
        contest = rounds_of(
            rounds,
            ours=lambda: ranks.run(all_reduces)[0] | ranks.run(messages)[0],
            MPICH=peer("mpi4py", "bare", ranks=size),
            gloo=peer("torch", "gloo", str(size)),
        )
    for name in SIZES:
        label = f"all_reduce {name}, {size} ranks"
        yield contest.row(label, name, "gloo", 0.25)
        if name != "64 KB":
            yield contest.row(label, name, "MPICH", 0.5)
            label = f"all_reduce {name}, ordinary, {size} ranks"
            yield contest.row(label, f"{name}, new array", "MPICH", 1.0, theirs=name)
    if size == 2:
        yield contest.row("8 bytes there and back", "trip", "MPICH", 3.0)
    yield contest.row(f"contract check, {size} ranks", "check", note="at most 0.02 ms")


def journeys(size: int, rounds: int) -> dict:
    """Compare positions that travel once to each rank of their experts with a row per expert."""
    with Cluster(size) as ranks:

        def times(way: str) -> Times:
            return slowest([times for times, _ in ranks.run(experts_step, way, 11)])

        contest = rounds_of(rounds, ours=lambda: times("positions"), rows=lambda: times("rows"))
        sent = {
            way: sum(n for _, n in ranks.run(experts_step, way, 1)) for way in ("positions", "rows")
        }
    note = f"{sent['positions'] / 1e6:.1f} MB; rows {sent['rows'] / 1e6:.1f} MB"
    return contest.row(f"experts, {size} ranks: positions travel", "both ways", "rows", note=note)


def experts_step(group: Group, dispatch: str, repeats: int) -> tuple[Times, int]:
    """Time forward and backward of experts over ranks; return the bytes of one pass, too.

    A position chooses 4 of 16 narrow experts, on at most 2 ranks.
    """
    groups = {"groups": group.size, "most_groups": 2}
    layer = nn.MixtureOfExperts(WIDTH, 16, 4, None, 0.0, expert_width=8, **groups)
    keep_own_experts(layer, group, dispatch)
    x = generator(group.rank, "positions").standard_normal((1, POSITIONS, WIDTH)).astype("float32")
    dy = np.ones_like(x)

    def step() -> None:
        layer(Tensor(x, requires_grad=True)).backward(dy)

    step()
    sent = group.ledger.total
    return times_of({"both ways": lambda: step}, group.barrier, repeats), sent


def times_of_sizes(meet: Step, ways: dict[str, Callable[[int], Step]]) -> Times:
    """Return the seconds of a collective on arrays of SIZES, and of EIGHT in place.

    ways  {"": in place, ", new array": ...}: each prepares a call on so many elements of float32
    """
    works = {
        name + ending: partial(prepare, size // 4)
        for ending, prepare in ways.items()
        for name, size in SIZES.items()
    }
    return times_of({EIGHT: partial(ways[""], 2)}, meet, 300) | times_of(works, meet, 11)


def all_reduces(group: Group) -> Times:
    """Time all_reduce in place, from `empty`, and of an ordinary array into a new one."""

    def in_place(elements: int) -> Step:
        x = group.empty(elements)
        x[:] = 0  # zeros, so that repeated sums in place do not overflow
        return partial(group.all_reduce, x, out=x)

    def new_array(elements: int) -> Step:
        return partial(group.all_reduce, np.ones(elements, np.float32))

    return times_of_sizes(group.barrier, {"": in_place, ", new array": new_array})


def messages(group: Group) -> Times:
    """Time a message there and back, and a barrier less one that compares no calls."""
    trip = there_and_back(group.rank, partial(group.send, np.ones(1)), group.recv)
    board = group.communicator.board  # type: ignore[attr-defined]  # of ranks on this machine
    works: Works = {
        "trip": lambda: trip if group.rank < 2 else nothing,
        "check": lambda: group.barrier,
        "unchecked": lambda: partial(board.barrier, "bench"),
    }
    seconds = times_of(works, group.barrier, 500)
    return seconds | {"check": seconds["check"] - seconds["unchecked"]}


def there_and_back(rank: int, send: Callable, recv: Callable) -> Callable[[], None]:
    """Return a call in which an even rank sends to the next rank, which answers."""

    def first() -> None:
        send(rank + 1)
        recv(rank + 1)

    def second() -> None:
        recv(rank - 1)
        send(rank - 1)

    return second if rank % 2 else first


def nothing(group: Group | None = None) -> None:
    pass


def start_and_run() -> Times:
    """Time the start of four ranks, and a run of four ranks that does nothing."""
    begin = time.perf_counter()
    with Cluster(4) as ranks:
        ranks.run(nothing)
        up = time.perf_counter() - begin
        return {"up": up} | times_of({"run": lambda: partial(ranks.run, nothing)}, repeats=50)


def mlp_steps(group: Group, *ways: str) -> Times:
    """Return the seconds of a step of the MLP on this rank's part of the batch, way by way.

    ways  alone: no communication, SGD; SGD or AdamW: data parallel; zero_1: ZeRO's stage, AdamW
    """

    def step_of(way: str) -> Step:
        model = nn.MLP(WIDTHS).flatten(group.empty)
        if way == "alone":
            a, b = x[: BATCH // group.size], y[: BATCH // group.size]
            optimizer = optim.SGD(model.parameters(), lr=1e-3)
            return training_step(lambda: nn.cross_entropy(model(a), b, BATCH), optimizer)
        if way == "zero_1":
            return trainer_step(Zero(model, group, 1), partial(optim.AdamW, lr=1e-3), Batch(x, y))
        one_bucket = BucketedDataParallel(model, group, cap=1 << 30)
        return trainer_step(one_bucket, partial(getattr(optim, way), lr=1e-3), Batch(x, y))

    x, y = np.ones((BATCH, WIDTHS[0]), np.float32), np.zeros(BATCH, int)
    return times_of({way: partial(step_of, way) for way in ways}, group.barrier, 15)


def data_parallel(rounds: int) -> Iterator[dict]:
    """Compare speed-ups on two ranks: ours, DDP's, and two processes that do not communicate.

    Then compare ZeRO's stage 1 with plain data parallelism.
    """
    with Cluster(1) as one, Cluster(2) as two:
        contest = rounds_of(
            rounds,
            whole=lambda: one.run(mlp_steps, "alone")[0],
            ours=lambda: slowest(two.run(mlp_steps, "alone", "SGD", "zero_1")),
            plain=lambda: slowest(two.run(mlp_steps, "AdamW")),
            DDP=peer("torch", "ddp", "2"),
        )
    one_device = contest.seconds("whole", "alone")
    speed_up, most = (one_device / contest.seconds("ours", way) for way in ("SGD", "alone"))
    note = f"{middle(speed_up):.2f}; without communication {middle(most):.2f}: "
    note += f"{middle(speed_up / most):.0%} of it (at least 85%)"
    if not any(isinstance(one["DDP"], str) for one in contest):
        theirs = contest.seconds("DDP", "one device") / contest.seconds("DDP", "data parallel")
        note += f"; {middle(theirs):.2f} with DDP"
    name = "data parallel, 2 ranks: speed-up"
    yield contest.row(name, "SGD", "DDP", theirs="data parallel", note=note)
    yield contest.row("zero_1 with AdamW, 2 ranks", "zero_1", "plain", 1.1, theirs="AdamW")
