"""The tests marked gpu, run on a stand-in for CuPy where there is no GPU: `pytest --device strict`.

They run in a pytest of their own, since the stand-in must be found before any test is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIMIT = 600  # seconds; a machine that does nothing else needs about 10


def strict(*options: str) -> subprocess.CompletedProcess:
    """Run `pytest --device strict` on this checkout, in one process."""
    command = [sys.executable, "-m", "pytest", "--device", "strict", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *options]
    env = {name: value for name, value in os.environ.items() if "PYTEST_" not in name}
    return subprocess.run(
        command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=LIMIT
    )


def passed(*options: str) -> None:
    """Require that they pass and that none is skipped, or show what pytest said."""
    done = strict(*options)
    assert done.returncode == 0, "\n" + done.stdout[-10_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]


@pytest.mark.timeout(LIMIT)
def test_what_is_marked_gpu_passes_on_the_stand_in():
    passed("-m", "gpu and not slow", "--ignore", "tests/comm/conformance", "tests")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("tests", ["tests/comm/conformance", "tests/tools/test_equivalence.py"])
def test_what_takes_longer_passes_on_the_stand_in(tests):
    passed("-m", "gpu", tests)


def test_without_the_option_nothing_is_found_that_is_called_cupy():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_backend.py"],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and " failed" not in done.stdout, done.stdout
