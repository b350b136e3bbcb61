"""The tests marked gpu, run on a stand-in for CuPy where there is no GPU: `pytest --device strict`.

They run in a pytest of their own, since the stand-in must be found before any test is imported.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="the stand-in for CuPy needs g++, which is not installed"
)
TESTS = Path(__file__).parents[1]
LIMIT = 1200  # seconds
CONFORMANCE = "tests/comm/conformance"
SLOWER = [  # those that start many processes
    "tests/comm",
    "tests/cli/test_cli.py",
    "tests/bench",
    "tests/observe/test_costs.py",
    "tests/observe/test_measure_pipeline.py",
]


# All of these need PyTorch: without it a whole file is skipped.
NO_GPU = ["tests/interop", "tests/verify/test_wrong_ddps.py"]


def passed(*options: str) -> None:
    """Run `pytest --device strict`; require that all pass and none is skipped."""
    command = [sys.executable, "-m", "pytest", "--device", "strict", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *options]
    env = {name: value for name, value in os.environ.items() if "PYTEST_" not in name}
    env["OPENBLAS_NUM_THREADS"] = "1"  # more of them only wait for each other: matrices are small
    done = subprocess.run(
        command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, "\n" + done.stdout[-10_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_what_is_marked_gpu_passes_on_the_stand_in():
    passed("-m", "gpu and not slow", *(f"--ignore={path}" for path in SLOWER + NO_GPU), "tests")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("tests", [*SLOWER, CONFORMANCE, "tests/verify/test_equivalence.py"])
def test_what_takes_longer_passes_on_the_stand_in(tests):
    apart = [f"--ignore={CONFORMANCE}"] if tests == "tests/comm" else []
    passed("-m", "gpu", *apart, tests)
