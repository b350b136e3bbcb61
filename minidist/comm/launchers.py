"""Which launcher has started this process.

torchrun, srun and mpiexec start copies of a program; only MPI makes them ranks. Each copy of a
program that calls `run` starts ranks of its own, and trains a model of its own.
"""

import os
import sys
from functools import cache

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
    known = os.environ
    script = "SLURM_JOB_ID" in known and "SLURM_STEP_ID" not in known  # which runs once
    within = "PMI_SIZE" in known or "OMPI_COMM_WORLD_SIZE" in known  # srun has started mpiexec's
    for by, number, processes in LAUNCHERS:
        mine = known.get(number, "")
        if mine.isdecimal() and not (by == "srun" and (script or within)):
            counts = [known[name] for name in processes.split() if name in known]
            counted = next(iter(counts), "") if processes else str(int(mine) + 1)
            if counted.isdecimal() and int(counted) > 1:
                return by, int(mine) if processes else 0, int(counted)
    return "", 0, 1


def copies(option: str) -> str | None:
    """Return what to say where several copies of this program would each do all of it.

    option  how a user of it chooses a transport: "--transport {}"
    """
    by, _, processes = launched()
    if processes == 1:
        return None
    ranks = f"{option.format('mpi')} makes them ranks of one run"
    if by == "torchrun":
        ranks = "start one process, which starts its own ranks"
    meant = f"{option.format('process')} says that this is meant"
    by = "torchrun, or what sets RANK and WORLD_SIZE as it does," if by == "torchrun" else by
    return f"{by} has started {processes} processes, and each does all of this: {ranks}; {meant}"


@cache
def warn_of_copies() -> None:
    """Print that there are several copies: the first one does, once."""
    _, number, _ = launched()
    if number == 0 and (words := copies("transport='{}'")):
        print(f"minidist: {words}", file=sys.stderr)
