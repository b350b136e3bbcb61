"""The conformance suite on MPI: every process of one job runs the same tests; see one_report.py."""

import re
import sys

import pytest

from tests.comm.mpi.test_mpiexec import mpiexec, there_is_mpi  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
SUITE = [sys.executable, "-m", "mpi4py", "-m", "pytest", "tests/comm/conformance"]


def test_mpi_keeps_the_contract_of_groups_and_clusters():
    machines = ["--machine=mpi", "--machine=mpi, messages"]
    done = mpiexec(4, *SUITE, *machines, "-p", "no:cacheprovider", "--color=no", timeout=550)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode != 0 or passed is None or int(passed[1]) == 0:
        ended = f"mpiexec ended with {done.returncode}"
        pytest.fail(f"{ended}:\n{done.stdout[-20_000:]}\n{done.stderr[-9000:]}", pytrace=False)
