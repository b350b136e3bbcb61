"""Measure the MPI transport against MPI itself, against processes, and against NuMPItron.

    all_reduce        through a Group, and MPI's own
    training steps    the same steps on ranks of MPI, and on processes of this machine
    NuMPItron         its own steps, with a model and a batch of the same sizes

Each that needs MPI has an mpiexec of its own, in turns:

    mpiexec -n 2 python -m mpi4py -m minidist.observe.bench.mpi bare       (or transport, numpitron)

Rank 0 prints one JSON object: {workload: seconds}. Of our steps, the slowest rank's count.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from minidist import Cluster, nn, optim
from minidist.comm import Group
from minidist.comm.mpi.library import is_first, load, processes
from minidist.data_parallel.replicated import BucketedDataParallel
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.observe.bench.comm import EIGHT, all_reduces, nothing, there_and_back, times_of_sizes
from minidist.observe.bench.steps import trainer_step
from minidist.observe.bench.table import (
    Rounds,
    Step,
    Times,
    command,
    peer,
    printed_by,
    rounds_of,
    slowest,
    times_of,
    why_no_mpi,
)
from minidist.parallel.trainer import Trainer
from minidist.tensor_parallel import TensorParallel

TITLE = "float32"
VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 65, 128, 4, 4, 64, 16


def rows(rounds: int = 3, ranks: int = 2) -> Iterator[dict]:
    """Yield the rows of ranks that mpiexec starts, beside those of their peers."""
    if missing := why_no_mpi():
        raise WrongInput(missing)
    with Cluster(ranks) as others:
        contest = rounds_of(
            rounds,
            ours=lambda: printed_by(command("mpi4py", "transport", ranks=ranks)),
            bare=peer("mpi4py", "bare", ranks=ranks),
            process=lambda: slowest(others.run(training_steps)),
            NuMPItron=peer("numpitron", "numpitron", ranks=ranks),
        )
    yield from compared(contest, ranks)


def rows_here(rounds: int = 3) -> Iterator[dict]:
    """Yield the rows of ranks that mpiexec has started, which can start no peers."""
    why = "not under mpiexec: use minidist bench mpi"
    others = {"process": lambda: why, "NuMPItron": lambda: why}
    yield from compared(rounds_of(rounds, ours=transport, bare=bare, **others), processes())


def compared(contest: Rounds, ranks: int) -> Iterator[dict]:
    """Yield the rows of these rounds: {"ours" | "bare" | "process" | "NuMPItron": times}."""
    row = contest.row(f"all_reduce {EIGHT}, {ranks} ranks", EIGHT, "bare")
    if row["peer_ms"] is not None:
        row["note"] = f"{1e3 * (row['ours_ms'] - row['peer_ms']):.1f} us more, at most 20"
    yield row
    for way in product(("1 MB", "16 MB"), ("", ", new array")):
        name = "".join(way)
        yield contest.row(f"all_reduce {name}, {ranks} ranks", name, "bare", 1.1)
    for (other, limit), name in product((("process", 1.1), ("NuMPItron", 0.3)), STEPS):
        yield contest.row(f"step, {name}, {ranks} ranks", name, other, limit)


def transport() -> Times:
    """Return our times on ranks that mpiexec has started; all processes call this."""
    with Cluster(processes(), "mpi") as ranks:
        return slowest(ranks.run(all_reduces)) | slowest(ranks.run(training_steps))


def training_steps(group: Group) -> Times:
    works = {name: partial(step_of, group, trainer) for name, trainer in STEPS.items()}
    return times_of(works, group.barrier)


def batch() -> np.ndarray:
    """Return the tokens and their targets, [2, B, T], the same in every process."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, BATCH, CONTEXT))


STEPS: dict[str, Callable[[nn.Module, Group], Trainer]] = {
    "data parallel": partial(BucketedDataParallel, cap=1 << 30),
    "tensor parallel": TensorParallel,
}


def step_of(group: Group, trainer: Callable[[nn.Module, Group], Trainer]) -> Step:
    """Return a step of the Transformer under a Trainer."""
    model = nn.Transformer(VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, tied=True).flatten(group.empty)
    return trainer_step(trainer(model, group), partial(optim.Adam, lr=1e-4), Batch(*batch()))


def bare() -> Times:
    """Time MPI's Allreduce, and 8 bytes there and back, through mpi4py."""

    def in_place(elements: int) -> Step:
        return partial(world.Allreduce, mpi.IN_PLACE, np.full(elements, 0, np.float32))

    def new_array(elements: int) -> Step:
        x = np.ones(elements, np.float32)
        return lambda: world.Allreduce(x, np.empty_like(x))

    mpi = load()
    world, small = mpi.COMM_WORLD, np.ones(1)
    trip = there_and_back(world.rank, partial(world.Send, small), partial(world.Recv, small))
    collectives = times_of_sizes(world.Barrier, {"": in_place, ", new array": new_array})
    works = {"trip": lambda: trip if world.rank < 2 else nothing}
    return collectives | times_of(works, world.Barrier, 500)


def numpitron() -> Times:
    """Time a step of NuMPItron's Transformer, as its `train_shakespeare.py` takes one.

    Data parallel, it sums the gradient of the embedding, and no other one, over the ranks: less
    work than ours.
    """
    from numpitron import distributed
    from numpitron.nn import Transformer, softmax_cross_entropy
    from numpitron.optimizer import Adam

    def step_of(axis: str, tokens: np.ndarray) -> Step:
        distributed.init(**{f"{axis}_size": world.size})
        sizes = (WIDTH, HEADS, DEPTH, VOCAB, CONTEXT)
        model = Transformer(*sizes, rng=np.random.default_rng(0))
        optimizer = Adam(model, learning_rate=1e-4)
        model.scatter()
        optimizer.scatter()

        def step() -> None:
            _, gradient = softmax_cross_entropy(model(tokens[0]), tokens[1])
            model.backward(gradient)
            optimizer.step()

        return step

    world, tokens = load().COMM_WORLD, batch()
    works = {
        "data parallel": partial(step_of, "dp", tokens[:, world.rank :: world.size]),
        "tensor parallel": partial(step_of, "tp", tokens),
    }
    return times_of(works, world.Barrier, 3)


if __name__ == "__main__":
    answer = {"bare": bare, "transport": transport, "numpitron": numpitron}[sys.argv[1]]()
    if is_first():
        print(json.dumps(answer))
