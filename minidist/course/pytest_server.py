"""A process that has loaded what tests need, minidist left out, and forks a pytest for each order.

To start Python, pytest, NumPy and hypothesis takes longer than most tests do. This file runs as a
script, by `python -P`: `--impl` decides in the fork which minidist is tested.

An order is a line of JSON, {"output": a file, "temporary": a folder, "arguments": pytest's}; the
answer is a line, too: the exit status.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

LOADED = ("numpy", "hypothesis.strategies", "threadpoolctl", "cloudpickle", "tqdm", "pytest")


class Server:
    """Such a process, and the tests that it runs.

    answers  can be read when the tests have ended
    busy     whether they have begun and their status has not been read
    """

    def __init__(self, checkout: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        assert self.process.stdin and self.process.stdout
        self.orders, self.answers, self.busy = self.process.stdin, self.process.stdout, False

    def start(self, output: Path, temporary: Path, arguments: list[str]) -> None:
        order = {"output": str(output), "temporary": str(temporary), "arguments": arguments}
        print(json.dumps(order), file=self.orders, flush=True)
        self.busy = True

    def status(self) -> int:
        """Wait for the end of the tests; return pytest's status. RuntimeError: the server died."""
        if not (line := self.answers.readline()):
            raise RuntimeError(f"{__file__} ended with status {self.process.wait()}")
        self.busy = False
        return int(line)

    def close(self) -> None:
        """End it and what still runs, all of it."""
        self.orders.close()
        if self.busy and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)  # at which pytest tidies up
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.answers.close()


def main() -> None:
    """Carry out orders until the input ends. SIGINT ends the tests alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    *_, pytest = (importlib.import_module(name) for name in LOADED)
    gc.freeze()  # no fork has to look through this for garbage
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ |= {"TMPDIR": order["temporary"], "HYPOTHESIS_PROFILE": "first failure"}
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            sys.exit(pytest.main(order["arguments"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
