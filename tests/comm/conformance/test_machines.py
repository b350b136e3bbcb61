"""What this computer lacks is skipped once, with the reason."""

import pytest

from minidist.backend import why_no_gpu
from tests.comm.conformance.machines import MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_this_computer_has_every_machine(name):
    if MACHINES[name].device == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"{name}: no conformance test runs: {reason}")
