"""Measure communication against MPICH and gloo, and data parallelism against DDP, in one run.

Each round times every contestant once, one after the other, so that a slow moment of the machine
affects all; a ratio is the median over rounds of the ratios within a round. Install the peers with

    pip install 'minidist[bench]'

If a peer is missing, or fails, its rows say so.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.tools.bench.run_peer import mpi_peer, torch_peer, why_not

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "64 MB": 1 << 26}
WIDTHS, BATCH = [784, 512, 512, 10], 1024


def median_seconds(call: Callable, meet: Callable, repeats: int = 15) -> float:
    """Return the median time of call(), started by all ranks together."""
    call()
    times = []
    for _ in range(repeats):
        meet()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def warm_up(meet: Callable, times: int) -> None:
    """Wait some tenths of a second: threads that BLAS starts in each process spin at first."""
    for _ in range(times):
        meet()


def all_reduces(group) -> dict[str, float]:
    """Time all_reduce in place, of an array from `empty` and of an ordinary one; and the checks."""
    found = {}
    warm_up(group.barrier, 20_000)
    for name, nbytes in SIZES.items():
        x = group.empty(nbytes // 4)
        x[:] = 1
        found[name] = median_seconds(lambda x=x: group.all_reduce(x, out=x), group.barrier)
        y = np.ones(nbytes // 4, np.float32)
        found[f"{name}, ordinary"] = median_seconds(lambda y=y: group.all_reduce(y), group.barrier)
    small = np.ones(1)

    def there_and_back():
        if group.rank == 0:
            group.send(small, 1)
            group.recv(1)
        elif group.rank == 1:
            group.recv(0)
            group.send(small, 0)

    found["8 bytes there and back"] = median_seconds(there_and_back, group.barrier, 300)
    with_check = median_seconds(group.barrier, lambda: None, 1000)
    without = median_seconds(lambda: group.communicator.board.barrier("bench"), lambda: None, 1000)
    found["contract check"] = with_check - without
    return found


def training(group, way: str) -> float:
    """Time a step of the MLP on this rank's part of the batch; `alone`: without communication."""
    from minidist import nn, optim
    from minidist.data_parallel.bucketed import Bucketed

    model = nn.MLP(WIDTHS).flatten(group.empty)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    reducer = Bucketed(model, group, cap=1 << 30)
    x = np.ones((BATCH // group.size, WIDTHS[0]), np.float32)
    y = np.zeros(len(x), int)

    def step():
        loss = nn.cross_entropy(model(x), y, BATCH)
        if way == "alone":
            loss.backward()
        else:
            with reducer.reduce():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with threadpool_limits(1):
        return median_seconds(step, group.barrier, 15)


def adamw_steps(group, ways=("plain", "zero_1")) -> list[float]:
    """Time a step of the MLP with AdamW: plain data parallelism, and ZeRO's stages, in turn."""
    from minidist import nn, optim
    from minidist.data_parallel.bucketed import Bucketed
    from minidist.data_parallel.zero import Zero

    x = np.ones((BATCH // group.size, WIDTHS[0]), np.float32)
    y = np.zeros(len(x), int)

    def plain(model):
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        reducer = Bucketed(model, group, cap=1 << 30)

        def step():
            loss = nn.cross_entropy(model(x), y, BATCH)
            with reducer.reduce():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def zero(model, stage):
        sharded = Zero(model, group, stage)
        optimizer = optim.AdamW(sharded.parameters(), lr=1e-3)

        def step():
            sharded.backward(nn.cross_entropy(model(x), y, BATCH))
            sharded.step(optimizer)

        return step

    models = [nn.MLP(WIDTHS).flatten(group.empty) for _ in ways]
    steps = [
        plain(model) if way == "plain" else zero(model, int(way[-1]))
        for way, model in zip(ways, models, strict=True)
    ]
    with threadpool_limits(1):
        times = [[median_seconds(step, group.barrier, 5) for step in steps] for _ in range(5)]
    return np.median(times, axis=0).tolist()


def measure(rounds: int = 3) -> Iterator[dict]:
    """Yield rows: name, ours_ms, peer, peer_ms, ratio (ours over theirs), limit, note."""
    for size in (2, 4):
        yield from _communication(size, rounds)
    yield from _start_up(rounds)
    yield _data_parallel(rounds)
    yield _zero(rounds)


def _communication(size: int, rounds: int) -> Iterator[dict]:
    """Compare collectives and messages of `size` ranks with MPICH's and gloo's."""
    from minidist import Cluster

    message = "8 bytes there and back"
    peers = {
        "MPICH": mpi_peer([*SIZES, message], size, "mpi"),
        "gloo": torch_peer(SIZES, "gloo", str(size)),
    }
    with Cluster(size) as ranks:
        found = [
            {"ours": ranks.run(all_reduces)[0], **{name: peer() for name, peer in peers.items()}}
            for _ in range(rounds)
        ]
    for name in SIZES:
        yield comparison(f"all_reduce {name}, {size} ranks", found, name, "gloo", 0.25)
        if name != "64 KB":
            yield comparison(f"all_reduce {name}, {size} ranks", found, name, "MPICH", 0.5)
            ordinary = f"{name}, ordinary"
            label = f"all_reduce {ordinary}, {size} ranks"
            yield comparison(label, found, ordinary, "MPICH", 1.0, name)
    if size == 2:
        yield comparison(message, found, message, "MPICH", 3.0)
    check = statistics.median(f["ours"]["contract check"] for f in found)
    yield _plain(f"contract check, {size} ranks", check, 20e-6)


def comparison(label, found, name, peer, limit, peer_name=None) -> dict:
    """Compare what we took for `name` with what a peer took, round by round."""
    ours = statistics.median(f["ours"][name] for f in found)
    row = {"name": label, "ours_ms": 1e3 * ours, "peer": peer, "limit": limit, "note": ""}
    if reason := why_not(f[peer] for f in found):
        return {**row, "peer_ms": None, "ratio": None, "note": reason}
    theirs = [f[peer][peer_name or name] for f in found]
    ratio = statistics.median(f["ours"][name] / t for f, t in zip(found, theirs, strict=True))
    return {**row, "peer_ms": 1e3 * statistics.median(theirs), "ratio": ratio}


def _plain(name: str, seconds: float, limit: float) -> dict:
    note = f"at most {1e3 * limit:g} ms"
    row = {"name": name, "ours_ms": 1e3 * seconds, "peer": None, "peer_ms": None, "ratio": None}
    return {**row, "limit": None, "note": note}


def _start_up(rounds: int) -> Iterator[dict]:
    """Time the start of four ranks, and a run of four ranks that does nothing."""
    from minidist import Cluster

    starts, nothings = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        with Cluster(4) as ranks:
            ranks.run(_nothing)
            starts.append(time.perf_counter() - begin)
            nothings.append(median_seconds(lambda: ranks.run(_nothing), lambda: None, 50))
    yield _plain("4 ranks up", statistics.median(starts), 1.0)
    yield _plain("a run of 4 ranks that does nothing", statistics.median(nothings), 5e-3)


def _nothing(group) -> None:
    pass


def _data_parallel(rounds: int) -> dict:
    """Compare speed-ups on two ranks: ours, DDP's, and two processes that do not communicate."""
    from minidist import Cluster

    ddp = torch_peer(["one device", "data parallel"], "ddp", "2")
    ours, ideal, answers = [], [], []
    with Cluster(1) as one, Cluster(2) as two:
        for _ in range(rounds):
            whole = one.run(training, "alone")[0]
            ours.append(whole / max(two.run(training, "together")))
            ideal.append(whole / max(two.run(training, "alone")))
            answers.append(ddp())
    gain, most = statistics.median(ours), statistics.median(ideal)
    share = statistics.median(a / b for a, b in zip(ours, ideal, strict=True))
    note = f"{gain:.2f}; without communication {most:.2f}: {share:.0%} of it (at least 85%)"
    if reason := why_not(answers):
        note += f"; DDP: {reason}"
    else:
        theirs = statistics.median(a["one device"] / a["data parallel"] for a in answers)
        note += f"; {theirs:.2f} with DDP"
    empty = dict.fromkeys(["ours_ms", "peer", "peer_ms", "ratio", "limit"])
    return {"name": "data parallel, 2 ranks: speed-up", **empty, "note": note}


def _zero(rounds: int) -> dict:
    """Compare a step of ZeRO's stage 1 with one of plain data parallelism, on two ranks."""
    from minidist import Cluster

    with Cluster(2) as two:
        found = [np.max(two.run(adamw_steps), axis=0).tolist() for _ in range(rounds)]
    found = [{"ours": {"step": ours}, "plain": {"step": plain}} for plain, ours in found]
    return comparison("zero_1 with AdamW, 2 ranks", found, "step", "plain", 1.1)


FORM = "{:<36}{:>12} {:<6}{:>12}{:>7}{:>7}  {}"
HEAD = FORM.format("float32", "minidist", "peer", "", "ratio", "limit", "").rstrip()


def line(row: dict) -> str:
    """Return a row of `measure` for people."""
    cells = [row["name"]]
    for key, unit in (("ours_ms", "{:.3f} ms"), ("peer", "{}"), ("peer_ms", "{:.3f} ms")):
        cells.append("" if row[key] is None else unit.format(row[key]))
    for key in ("ratio", "limit"):
        cells.append("" if row[key] is None else f"{row[key]:.2f}")
    return FORM.format(*cells, row["note"]).rstrip()
