"""The C text of every kernel is CUDA: NVRTC compiles it, without a GPU, where it is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nvrtc_compiles_every_kernel():
    """CUPY_PYTHON names a Python that has CuPy and NVRTC, if this one has not."""
    python = os.environ.get("CUPY_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("CuPy is not installed here, and CUPY_PYTHON names no Python that has it")
    command = [python, "-m", "tests.strict_device.compile_kernels"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) > 50
