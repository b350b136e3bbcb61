"""Copies of a program that torchrun, srun or mpiexec has started are no ranks, and are told so."""

import os
import subprocess
import sys

import pytest

from minidist.comm.mpi import library as launchers
from minidist.comm.mpi.library import launched

SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
STEP = SLURM | {"SLURM_STEP_ID": "0"}
COPIES = [
    ({"RANK": "1", "WORLD_SIZE": "4"}, ("torchrun", 1, 4)),
    ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ("mpiexec", 0, 4)),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpiexec", 2, 4)),
    ({"PMIX_RANK": "3"}, ("mpiexec", 0, 4)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, ("srun", 3, 4)),
    (STEP, ("srun", 0, 4)),
    (STEP | {"SLURM_STEP_NUM_TASKS": "2"}, ("srun", 0, 2)),
    (STEP | {"RANK": "5", "WORLD_SIZE": "8"}, ("torchrun", 5, 8)),  # one on each host
]
ALONE = [
    {},
    SLURM,  # a script of sbatch, which runs once, on the first host
    STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # of a job of 4, as an interactive shell
    STEP | {"PMI_RANK": "0", "PMI_SIZE": "1"},  # mpiexec has a process of its own on each host
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"RANK": "0", "WORLD_SIZE": "many"},
    {"RANK": "3"},  # of something else
]


@pytest.fixture
def environment(monkeypatch):
    """Hide the launcher of these tests, if there is one."""
    for _, *names in launchers.LAUNCHERS:
        for name in filter(None, names):
            monkeypatch.delenv(name, raising=False)


def test_a_launcher_is_known_by_its_variables(monkeypatch, environment):
    for known, wanted in [*COPIES, *[(known, ("", 0, 1)) for known in ALONE]]:
        with monkeypatch.context() as patch:
            for item in known.items():
                patch.setenv(*item)
            assert launched() == wanted, known


PROGRAM = """
import sys, minidist
def worker(group):
    return group.size
for _ in range(2):
    minidist.run(worker, 1, transport=sys.argv[1] if sys.argv[1:] else None)
"""
OF_TORCHRUN = (
    "minidist: torchrun, or what sets RANK and WORLD_SIZE as it does, has started 4 processes, and "
    "each does all of this: start one process, "
)
OF_SRUN = "minidist: srun has started 4 processes, and each does all of this: {}mpi{} makes them "


def ends(command, known):
    command, env = [sys.executable, *command], os.environ | known
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def test_a_run_of_several_copies_says_so_once_unless_its_transport_was_chosen(environment):
    done = ends(["-c", PROGRAM], STEP)
    assert done.returncode == 0
    assert done.stderr.startswith(OF_SRUN.format("transport='", "'"))
    assert done.stderr.endswith("; transport='process' says that this is meant\n")
    assert done.stderr.count("\n") == 1
    assert not ends(["-c", PROGRAM, "thread"], STEP).stderr


def test_a_command_of_several_copies_is_refused_unless_its_transport_was_chosen(environment):
    train = ["-m", "minidist", "train", "--ranks", "1", "--steps", "1"]
    for words, known in (  # whichever ends first may end the others
        (OF_TORCHRUN, {"RANK": "1", "WORLD_SIZE": "4"}),
        (OF_SRUN.format("--transport ", ""), STEP),
    ):
        done = ends(train, known)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
        assert done.stderr.startswith(words)
    done = ends([*train, "--transport", "process"], STEP)
    assert done.returncode == 0 and "certificate: ok" in done.stdout
    assert "srun" not in done.stderr
