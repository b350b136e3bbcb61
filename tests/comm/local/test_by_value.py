"""A function that travels by value keeps its file, whatever cloudpickle makes of it."""

import pickle
import re
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from minidist.errors import RankFailed

SCRIPT = """
import sys
from minidist.comm.local import worker as by_value

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


LOCK = threading.Lock()


def through(value):
    """Return functions that need the value: by a closure, by a default, by another function."""

    def closes_over(group):
        return value

    def has_default(group, lock=value):
        return lock

    def calls(group, *, more=None):
        return closes_over(group)

    return closes_over, has_default, calls


BY_CLOSURE, BY_DEFAULT, BY_CALL = through(LOCK)
WORKERS = [
    (BY_CLOSURE, "worker's value"),
    (BY_DEFAULT, "worker's lock"),
    (BY_CALL, "worker's closes_over's value"),
    (partial(print, LOCK), "worker[1][0]"),
    (SimpleNamespace(log=LOCK).__repr__, "worker.log"),
]
ARGUMENTS = [
    (LOCK, "args[1]"),
    ({"a": [1, (2, LOCK)]}, "args[1]['a'][1][1]"),
    (SimpleNamespace(log=SimpleNamespace(lock=LOCK)), "args[1].log.lock"),
]


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_what_cannot_be_sent_to_a_rank_is_named_with_a_remedy(cluster, transport):
    for worker, args, name in [
        *[(worker, (), name) for worker, name in WORKERS],
        *[(print, (1, value), name) for value, name in ARGUMENTS],
    ]:
        words = f"{name}, of type lock, cannot be sent to another process: cannot pickle"
        with pytest.raises(ValueError, match=f"^{re.escape(words)} .*; send what it is made from"):
            cluster(1, transport).run(worker, *args)


class Holds(Exception):
    def __init__(self, text, lock):
        super().__init__(text)
        self.lock = lock


def test_an_exception_that_cannot_be_sent_back_says_why_beside_its_traceback(cluster):
    def worker(group):
        raise Holds("lost", threading.Lock())

    with pytest.raises(RankFailed) as caught:
        cluster(1).run(worker)
    message = str(caught.value)
    assert "Holds: lost\n(the exception itself stays on the rank: lock, of type lock," in message
