"""A reader who follows one value has little to open; what is counted is in trips.py.

Whether a rank waits for another one differs from run to run, and waiting has lines of its own; so
the trips over ranks have room for it.
"""

import json
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT


@pytest.mark.parametrize(
    "trip, most_lines, most_files",
    [
        ("gradient", 350, 12),
        ("pipeline", 2080, 41),
        ("train", 5420, 84),
        ("certificate", 3350, 47),
    ],
)
def test_a_trip_opens_no_more_than(trip, most_lines, most_files):
    command = [sys.executable, "-m", "tests.trips", trip, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert sum(lines.values()) <= most_lines and len(lines) <= most_files, lines
