"""The sums over dp that begin inside the pipeline, under MPI: two threads of a rank call it."""

import sys

import pytest

from tests.comm.mpi.test_mpiexec import mpiexec, there_is_mpi  # noqa: F401 (a fixture)
from tests.hybrid.test_sums import CASES

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def test_under_mpi_a_second_thread_sums_too():
    """A library adds up in an order of its own, so the bits need not be the same."""
    code = f"""
import numpy as np
from minidist import run
from tests.hybrid.test_sums import after_the_program, two_batches

for case in {CASES[:2]}:
    beside, after = (
        run(two_batches, 2, *case, True, False, prepare, transport="mpi")
        for prepare in (lambda hybrid: hybrid, after_the_program)
    )
    for (got, sent), (want, due) in zip(beside, after, strict=True):
        assert sent == due
        for batch in range(2):
            for name in want[batch]:
                np.testing.assert_allclose(got[batch][name], want[batch][name], 1e-9, 1e-12)
"""
    done = mpiexec(2, sys.executable, "-m", "mpi4py", "-c", code, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
