"""One pytest in every process of an MPI job: they run the same tests, and the first one reports.

    mpiexec -n 4 python -m mpi4py -m pytest tests/comm/conformance --machine mpi

All processes make a run under MPI together. So they must run the same tests in the same order, with
the same examples, and agree on what failed; otherwise they would wait for each other.
"""

import faulthandler
import importlib
import os
import shlex
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, settings

RANKS = 4  # of the largest group in the suite


class OneReport:
    """A plugin of pytest. A test fails in every process if it fails in one."""

    def __init__(self, config: pytest.Config):
        from minidist.comm.mpi.library import load

        try:
            self.library, self.world = load().Get_library_version(), load().COMM_WORLD.Dup()
        except ValueError as error:
            raise pytest.UsageError(f"--machine mpi: {error}") from None
        if self.world.size < RANKS:
            raise pytest.UsageError(
                f"--machine mpi needs {RANKS} processes, and MPI has started {self.world.size}: "
                f"mpiexec -n {RANKS} python -m mpi4py -m pytest {shlex.join(sys.argv[1:])}"
            )
        config.option.timeout = 0  # a signal cannot end a call that waits in MPI; a watchdog can
        self.seconds, self.stderr = float(config.getini("timeout")), os.dup(2)
        if self.world.rank:
            sys.stdout = open(os.devnull, "w")  # before the terminal reporter takes it
        settings.register_profile(
            "one report",
            settings.get_profile("repo"),  # derandomized; nor may a clock choose examples:
            phases=[Phase.explicit, Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("one report")

    def agree(self, mine):
        """Return what every process has given. A process that waits for the others sleeps."""
        request = self.world.Ibarrier()
        while not request.Test():
            time.sleep(0.001)
        return self.world.allgather(mine)

    def pytest_report_header(self):
        return f"{self.world.size} processes, {self.library.splitlines()[0].strip()}"

    def pytest_runtest_setup(self):
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stderr)
        # Hypothesis draws constants that it finds in modules, and a process that has no rank has
        # loaded fewer of them.
        ours = [name for name in sys.modules if name.split(".")[0] in ("minidist", "tests")]
        for name in sorted(set().union(*self.agree(ours))):
            importlib.import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        outcomes = self.agree((item.nodeid, report.outcome, report.longreprtext))
        if len({outcome[:2] for outcome in outcomes}) > 1:
            report.outcome = "failed"
            rows = [f"process {n}: {' '.join(row)}" for n, row in enumerate(outcomes)]
            report.longrepr = "\n\n".join(rows)
            item.session.shouldfail = "the processes do not agree"
        return report

    def pytest_unconfigure(self):
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        self.agree(None)  # a process that ends with a failure ends all
