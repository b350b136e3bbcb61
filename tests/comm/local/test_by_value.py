"""A function that travels by value keeps its file, whatever cloudpickle makes of it."""

import pickle
import subprocess
import sys

import cloudpickle
import pytest

from minidist.comm.local import by_value

SCRIPT = """
import sys
from minidist.comm.local import by_value

def outer(n):
    def inner(divisor):
        return n / divisor
    return inner

sys.stdout.buffer.write(by_value.dumps([outer, outer(1)]))
"""


def test_a_function_of_a_script_keeps_its_file_and_lines_also_one_inside_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    sent = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    outer, inner = pickle.loads(sent)
    assert [f.__code__.co_filename for f in (outer, outer(1), inner)] == [str(script)] * 3
    with pytest.raises(ZeroDivisionError) as caught:
        inner(0)
    assert caught.traceback[-1].lineno == 6 and inner(2) == 0.5


def test_what_has_no_code_is_as_cloudpickle_sends_it():
    for value in ({"a": (1, None)}, len, RuntimeError("no"), pickle):
        assert by_value.dumps(value) == cloudpickle.dumps(value)
