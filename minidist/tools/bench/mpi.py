"""Measure the MPI transport against MPI itself, against processes, and against NuMPItron.

    all_reduce        through a Group and bare, in turns, on the same ranks of one mpiexec; the bare
                      call is timed while no run of ours is up
    training steps    the same steps on ranks of MPI, and on processes of this machine
    NuMPItron         its own steps, with a model and a batch of the same sizes, in its own mpiexec

Each round takes all of them once, one after the other, so that a slow moment of the machine affects
all; a ratio is the median over rounds of the ratios within a round. Times are of the slowest rank.
"""

import statistics
from collections.abc import Callable, Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.data_parallel.bucketed import Bucketed
from minidist.tensor_parallel import ParallelTransformer
from minidist.tensor_parallel.vocab_parallel import cross_entropy
from minidist.tools.bench.comm import HEAD, comparison, line, median_seconds, warm_up
from minidist.tools.bench.run_peer import answer_or_error, mpi_command, mpi_peer, why_no_mpi

__all__ = ["HEAD", "line", "measure"]

SIZES = {"8 bytes": 8, "1 MB": 1 << 20, "16 MB": 1 << 24}
VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 65, 128, 4, 4, 64, 16
REPEATS = 11
TURNS = 5  # how often a Group and the bare call take turns within a round


def times(all_reduce: Callable, barrier: Callable) -> dict[str, float]:
    """Return the median seconds of all_reduce(x, out), and of large ones without `out`."""
    found = {}
    for name, nbytes in SIZES.items():
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        calls = range(100 if nbytes < 1 << 10 else 1)

        def some(x=x, out=out, calls=calls):
            for _ in calls:
                all_reduce(x, out)

        found[name] = median_seconds(some, barrier) / len(calls)
        if nbytes >= 1 << 20:
            seconds = median_seconds(lambda x=x: all_reduce(x, None), barrier)
            found[f"{name}, new array"] = seconds
    return found


def grouped(group) -> dict[str, float]:
    """Time all_reduce through this group."""
    return times(lambda x, out: group.all_reduce(x, out=out), group.barrier)


def transformer() -> nn.Transformer:
    return nn.Transformer(VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, tied=True)


def batch() -> np.ndarray:
    """Return the tokens and their targets, [2, B, T], the same in every process."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, BATCH, CONTEXT))


def data_parallel(group) -> Callable:
    """Return a step of the Transformer whose batch is split over this group's ranks."""
    model = transformer().flatten(group.empty)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    reducer = Bucketed(model, group, cap=1 << 30)
    x, y = batch()[:, group.rank :: group.size]

    def step():
        loss = nn.cross_entropy(model(x), y, BATCH * CONTEXT)
        with reducer.reduce():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(group) -> Callable:
    """Return a step of the Transformer whose matrices are split over this group's ranks."""
    model = ParallelTransformer(transformer(), group).flatten(group.empty)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    x, y = batch()

    def step():
        cross_entropy(model(x), y, group=group, vocab=VOCAB).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = {"data parallel": data_parallel, "tensor parallel": tensor_parallel}


def training_steps(group) -> dict[str, float]:
    """Time each training step, on one BLAS thread per rank."""
    with threadpool_limits(1):
        return {
            name: median_seconds(make(group), group.barrier, REPEATS)
            for name, make in STEPS.items()
        }


def slowest(found: list[dict[str, float]]) -> dict[str, float]:
    """Return each name's longest time over the ranks."""
    return {name: max(times[name] for times in found) for name in found[0]}


def times_here() -> dict[str, dict[str, float]]:
    """Return {"ours" | "bare": times}, of ranks that mpiexec has started; all processes call this.

    A Group and the bare call take turns, and then come our steps.
    """
    from minidist import Cluster
    from minidist.comm.mpi import load

    def all_reduce(x, out):
        world.Allreduce(x, np.empty_like(x) if out is None else out)

    world, ours, bare = load().COMM_WORLD, [], []
    warm_up(world.Barrier, 20_000)
    with Cluster(world.size, "mpi") as ranks:
        for _ in range(TURNS):
            bare.append(slowest(world.allgather(times(all_reduce, world.Barrier))))
            ours.append(slowest(ranks.run(grouped)))
        steps = slowest(ranks.run(training_steps))
    return {"ours": _medians(ours) | steps, "bare": _medians(bare)}


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(times[name] for times in found) for name in found[0]}


def measure_here(rounds: int = 3) -> Iterator[dict]:
    """Yield the rows of ranks that mpiexec has started, which can start no peers."""
    from minidist.comm.mpi import processes

    peers = dict.fromkeys(("process", "NuMPItron"), "not under mpiexec: use minidist bench mpi")
    yield from rows([times_here() | peers for _ in range(rounds)], processes())


def measure(rounds: int = 3, ranks: int = 2) -> Iterator[dict]:
    """Yield rows: name, ours_ms, peer, peer_ms, ratio (ours over theirs), limit, note."""
    from minidist import Cluster

    if missing := why_no_mpi():
        raise ValueError(missing)
    numpitron = mpi_peer(STEPS, ranks, "numpitron", package="numpitron")
    with Cluster(ranks) as processes:
        found = [
            answer_or_error(mpi_command(ranks, "transport"))
            | {"process": slowest(processes.run(training_steps)), "NuMPItron": numpitron()}
            for _ in range(rounds)
        ]
    yield from rows(found, ranks)


def rows(found: list[dict], ranks: int) -> Iterator[dict]:
    """Yield the rows of these rounds: {"ours" | "bare" | "process" | "NuMPItron": times}."""
    for name, nbytes in SIZES.items():
        label = f"all_reduce {name}, {ranks} ranks"
        if nbytes < 1 << 10:
            more = [f["ours"][name] - f["bare"][name] for f in found]
            note = f"{1e6 * statistics.median(more):.1f} us more, at most 20"
            yield comparison(label, found, name, "bare", None) | {"note": note}
        else:
            yield comparison(label, found, name, "bare", 1.1)
            name = f"{name}, new array"
            yield comparison(f"all_reduce {name}, {ranks} ranks", found, name, "bare", 1.1)
    for peer, limit in (("process", 1.1), ("NuMPItron", 0.3)):
        for name in STEPS:
            yield comparison(f"step, {name}, {ranks} ranks", found, name, peer, limit)
