"""What starts, and what ends, ranks that MPI starts: real `mpiexec`, of MPICH or Open MPI.

The contract of Group and Cluster is in conformance/; here are the launcher, the command line, and
what is left when a rank is killed.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from minidist import checkpoint
from minidist.comm.mpi import library as mpi
from minidist.observe.bench import table
from tests.comm.test_cluster import gone

pytestmark = pytest.mark.mpi

MPIEXEC = table.mpiexec()
OPEN_MPI = {  # more ranks than cores, and as root: MPICH asks for neither
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
MINIDIST = [sys.executable, "-m", "minidist"]


@pytest.fixture(scope="module", autouse=True)
def there_is_mpi():
    try:
        mpi.load()
    except ValueError as error:
        pytest.skip(str(error))
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec, beside this Python or on the PATH")


def mpiexec(ranks, *command, timeout=60, **settings):
    """Run a command on some ranks; return the completed process. settings: of the environment."""
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | OPEN_MPI | settings,
    )


HEAD = r"""import os, sys, time
import numpy as np
import minidist
def say(line):
    os.write(1, f"{line}\n".encode())  # in one piece: print may write the end of the line apart
"""


def script(tmp_path, body):
    """Write a script that has imported what is needed; return the command that runs it."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return [sys.executable, "-m", "mpi4py", str(path)]


def test_processes_that_are_no_ranks_say_so_and_ranks_say_nothing(tmp_path):
    body = """
        sizes = minidist.run(lambda group: group.size, 2, transport=sys.argv[1] or None)
        say(sizes)
        minidist.run(lambda group: None, 1)
        """
    command = script(tmp_path, body)
    said = "minidist: mpiexec has started 2 processes, and each does all of this: transport='mpi' "
    for transport, errors in ("", 1), ("mpi", 0):
        done = mpiexec(2, *command, transport)
        assert (done.returncode, done.stdout) == (0, 2 * "[2, 2]\n"), done.stderr
        assert (done.stderr.count(said), done.stderr.count("\n")) == (errors, errors), done.stderr


def memory_gigabytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def left_memory():
    """Return the files of shared memory that no process has mapped."""
    files = {str(path) for path in Path("/dev/shm").glob("*")}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended meanwhile
            files -= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev" in line}
    return {file for file in files if os.path.exists(file)}  # none that was removed meanwhile


# Starting.


def test_every_process_gets_the_results_of_all_and_a_group_of_its_own(tmp_path):
    command = script(
        tmp_path,
        """
        def worker(group, base):
            return base + group.rank

        found = minidist.run(worker, 3, 10, transport="mpi")
        with minidist.Cluster(3, transport="mpi") as cluster:  # ranks that stay up
            again = [cluster.run(worker, base) for base in (20, 30)]
        say(f"{found} {again}")
        """,
    )
    done = mpiexec(3, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[10, 11, 12] [[20, 21, 22], [30, 31, 32]]"] * 3


def test_the_worker_and_its_arguments_are_those_of_process_0_as_with_local_ranks(tmp_path):
    command = script(
        tmp_path,
        """
        from mpi4py import MPI
        mine = [MPI.COMM_WORLD.rank]
        found = minidist.run(lambda group, x: x.append(7) or x, 2, mine, transport="mpi")
        say(f"{found} {mine}")
        """,
    )
    done = mpiexec(2, *command)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[[0, 7], [0, 7]] [0]", "[[0, 7], [0, 7]] [1]"], done.stderr


def test_another_number_of_ranks_than_processes_is_named_with_the_command(tmp_path):
    command = script(tmp_path, "minidist.run(print, 3, transport='mpi')")
    done = mpiexec(2, *command)
    assert done.returncode != 0 and "MPI has started 2 processes for 3 ranks" in done.stderr
    assert f"start this with: mpiexec -n 3 python -m mpi4py {command[-1]}" in done.stderr


def test_outside_mpiexec_the_error_says_how_to_start(tmp_path):
    command = script(tmp_path, "minidist.run(print, 4, transport='mpi')")
    done = subprocess.run([sys.executable, command[-1]], capture_output=True, text=True, timeout=60)
    assert f"mpiexec -n 4 python -m mpi4py {command[-1]}" in done.stderr.splitlines()[-1]
    arguments = ["verify", "--transport", "mpi", "--strategy", "naive"]
    done = subprocess.run([*MINIDIST, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"only; start this with: mpiexec -n 4 minidist {' '.join(arguments)}\n"
    )


def test_a_missing_library_and_a_missing_thread_level_are_named_with_the_remedy(tmp_path):
    body = "minidist.run(print, 1, transport='mpi')"
    hidden = script(tmp_path, f"sys.modules['mpi4py'] = None\n{body}")
    done = subprocess.run([sys.executable, hidden[-1]], capture_output=True, text=True, timeout=60)
    assert "WrongInput: transport='mpi' needs mpi4py" in done.stderr
    done = mpiexec(1, *script(tmp_path, body), MPI4PY_RC_THREAD_LEVEL="serialized")
    assert "WrongInput: this MPI does not let several threads communicate at once" in done.stderr


@pytest.mark.skipif(memory_gigabytes() < 12, reason="needs 12 GB of memory")
def test_arrays_of_more_than_two_gigabytes_arrive_whole(tmp_path):
    command = script(
        tmp_path,
        """
        def worker(group):
            n = 2**31 + 65
            if group.rank == 0:
                x = np.zeros(n, np.uint8)
                x[:: 2**20 + 1] = x[-1] = 7
                return group.send(x, to=1)
            x = group.recv(0)
            return x.shape == (n,), int(x.sum(dtype=int)), x[0], x[-1]

        marks = len(range(0, 2**31 + 65, 2**20 + 1))
        found = minidist.run(worker, 2, transport="mpi")[1]
        assert found == (True, 7 * (marks + 1), 7, 7), found
        """,
    )
    done = mpiexec(2, *command, timeout=100)
    assert done.returncode == 0, done.stderr


# The command line.


def test_a_run_saves_and_goes_on_where_it_was(tmp_path):
    sizes = "--batch 6 --context 8 --width 8 --heads 2 --depth 1 --sample 0 --every 2 --steps 4"
    train = [*MINIDIST, "train", "--transport", "mpi", "--dp", "3", *sizes.split()]
    done = mpiexec(3, *train, "--checkpoint", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    early = tmp_path / "cut" / "step-00000002"
    shutil.copytree(tmp_path / "whole" / early.name, early)
    done = mpiexec(3, *train, "--checkpoint", str(tmp_path / "cut"), "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("goes on after step 2, from") == 1 and "2 steps in" in done.stdout
    (found, step), (want, _) = (checkpoint.load(tmp_path / name) for name in ("cut", "whole"))
    assert step == 4 and found.keys() == want.keys()
    for name, array in want.items():  # MPI promises no order of sums
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-7, err_msg=name)
    done = mpiexec(3, *train, "--checkpoint", str(tmp_path / "cut"))
    assert done.returncode == 2 and done.stderr.count("has a checkpoint of step 4; go on") == 1


def test_what_fails_in_one_process_alone_is_said_and_ends_the_others(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 1000)
    train = [*MINIDIST, "train", "--transport", "mpi", "--steps", "2", "--width", "16", "--text"]
    alone = [*train, str(text), ":", "-n", "1", *train, str(tmp_path / "missing.txt")]
    done = mpiexec(1, *alone)
    assert done.returncode == 2 and done.stderr.count("cannot read the text") == 1, done.stderr


def test_verify_says_which_rows_prove_nothing_about_bytes():
    arguments = ["--strategy", "naive", "--strategy", "layer_split"]
    done = mpiexec(3, *MINIDIST, "verify", "--transport", "mpi", *arguments)
    *rows, summary, left_out = done.stdout.splitlines()
    assert done.returncode == 0 and "all ok" in summary, done.stdout
    assert re.fullmatch(r"\d+ cases on 4 ranks or more are left out: mpiexec -n 4", left_out)
    several = [row for row in rows if " MLP" in row and " 1 rank " not in row]
    assert {row.split()[1] for row in several} == {"naive", "layer_split"}
    for row in several:
        assert ("not counted: all_reduce (by formula)" in row) == (row.split()[1] == "naive")


# GPUs: on the stand-in for CuPy, which has 4.


def test_ranks_under_mpi_that_share_a_gpu_are_named(tmp_path):
    command = script(
        tmp_path,
        """
        try:
            minidist.run(lambda group: None, 3, transport="mpi-nccl", device="gpu:2")
        except minidist.errors.RankFailed as error:
            print(error.__cause__)
        """,
    )
    root = Path(__file__).parents[3]
    folders = os.pathsep.join([str(root / "tests" / "strict_device"), str(root)])
    done = mpiexec(3, *command, PYTHONPATH=folders)
    assert done.stdout.count("ranks 0 and 1 are on one GPU, 0x12000 on the PCI bus of host 0") == 3


# Ending.


def test_an_uncaught_failure_ends_all_processes_with_the_remote_traceback(tmp_path):
    command = script(
        tmp_path,
        """
        def worker(group):
            if group.rank == 1:
                raise KeyError("the reason")
            while True:
                pass

        minidist.run(worker, 3, transport="mpi")
        """,
    )
    begin, before = time.monotonic(), left_memory()
    done = mpiexec(3, *command)
    assert done.returncode != 0 and time.monotonic() - begin < 20
    assert "RankFailed: rank 1 failed:" in done.stderr and "KeyError: 'the reason'" in done.stderr
    assert left_memory() <= before


ENDLESS = r"""
def worker(group):
    say(f"[rank {group.rank} is {os.getpid()}]")
    x, pair = group.empty(100_000), group.split(group.rank % 2)
    x[:] = 1
    while True:
        group.all_reduce(x)
        pair.all_reduce(x, algorithm="hierarchical")
        group.send(x, to=(group.rank + 1) % group.size)
        group.recv((group.rank - 1) % group.size)

minidist.run(worker, 3, transport="mpi")
"""


def launch(tmp_path):
    """Start three ranks that communicate; return the launcher and {rank: its process}."""
    launcher = subprocess.Popen(
        [MPIEXEC, "-n", "3", *script(tmp_path, ENDLESS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | OPEN_MPI,
        start_new_session=True,
    )
    said = ""
    while len(pids := dict(re.findall(r"\[rank (\d) is (\d+)\]", said))) < 3:
        said += (line := launcher.stdout.readline())
        assert line, said
    return launcher, {int(rank): int(pid) for rank, pid in pids.items()}


@pytest.mark.timeout(300)
def test_a_rank_killed_at_any_moment_ends_the_job_and_leaves_nothing(tmp_path):
    draw, before = random.Random(0), left_memory()
    for _ in range(50):
        launcher, pids = launch(tmp_path)
        time.sleep(draw.uniform(0, 0.2))
        rank = draw.randrange(3)
        os.kill(pids[rank], signal.SIGKILL)
        said, _ = launcher.communicate(timeout=20)
        assert launcher.returncode != 0
        # The launcher names the rank, or the signal; a peer that was just reading the memory of the
        # dead process may end the job before the launcher has seen the death, with MPI's own error.
        peers = "".join(str(peer) for peer in range(3) if peer != rank)
        unreadable = rf"Abort.* \(rank [{peers}] in comm (?s:.*)process_vm_readv failed \(errno 3\)"
        launcher_said = f"process rank {rank} with PID {pids[rank]}" in said or "signal 9" in said
        assert launcher_said or re.search(unreadable, said), said
        assert gone(pids.values(), within=10)
        assert left_memory() <= before


def test_ctrl_c_ends_all_processes_and_leaves_nothing(tmp_path):
    before = left_memory()
    launcher, pids = launch(tmp_path)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert launcher.returncode != 0 and gone(pids.values(), within=10)
    assert left_memory() <= before


@pytest.mark.timeout(600)
def test_mpi_keeps_the_contract_of_groups_and_clusters():
    """Every process of one job runs the same tests; see one_report.py."""
    suite = [sys.executable, "-m", "mpi4py", "-m", "pytest", "tests/comm/conformance"]
    suite += ["--machine=mpi", "--machine=mpi, messages", "-p", "no:cacheprovider", "--color=no"]
    done = mpiexec(4, *suite, timeout=550)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode != 0 or passed is None or int(passed[1]) == 0:
        ended = f"mpiexec ended with {done.returncode}"
        pytest.fail(f"{ended}:\n{done.stdout[-20_000:]}\n{done.stderr[-9000:]}", pytrace=False)
