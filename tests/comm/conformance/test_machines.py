"""What this computer lacks is skipped once, with the reason."""

import pytest

from tests.comm.conformance.machines import lacks


def test_this_computer_has_every_machine(machine):
    if reason := lacks(machine):
        pytest.skip(f"{machine}: no conformance test runs: {reason}")
