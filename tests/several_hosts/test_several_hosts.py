"""Hosts are hosts: bytes between them are on the wire, at its rate, and nothing is left of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from minidist.verify.equivalence import strategies
from tests.several_hosts import Hosts, why_not

HERE = Path(__file__).parent
S, ROUNDS = 16 * 2**20, 5  # of all_reduce.py
pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := why_not():
        pytest.skip(f"no several hosts: {reason}")


@pytest.fixture(scope="module")
def hosts():
    with Hosts(number=2, mbit=1000) as made:
        yield made


def rank(script, *args):
    return [sys.executable, "-m", "mpi4py", str(script), *args]


def measured(hosts, *algorithm):
    """Return the bytes that each host sends in an all_reduce of S bytes, and the least seconds."""
    argv = rank(HERE / "all_reduce.py", *algorithm)
    done = hosts.mpiexec(4, argv, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert [row["host"] for row in found] == ["host1", "host1", "host2", "host2"]
    rounds = zip(*(row["seconds"] for row in found), strict=True)
    return [median(row["sent"]) for row in found[::2]], min(map(max, rounds))


def test_an_allreduce_of_mpi_is_on_the_wire_at_its_rate(hosts):
    """Each of 2 hosts has to send S bytes at least, whatever the algorithm."""
    before = hosts.bytes_between()
    sent, seconds = measured(hosts)
    assert all(S <= host <= 1.05 * S for host in sent)
    assert hosts.bytes_between() - before >= ROUNDS * 2 * S
    assert seconds >= 0.9 * 8 * S / 1e9
    assert hosts.left_behind() == []


@pytest.mark.parametrize(
    "algorithm, bytes_per_host",
    [("ring", 1.5 * S), ("hierarchical", S)],  # h hosts, N ranks: 2 (N - 1)/N S; 2 (h - 1)/h S
)
def test_an_all_reduce_puts_its_closed_form_on_the_wire(hosts, algorithm, bytes_per_host):
    sent, _ = measured(hosts, algorithm)
    assert sent == pytest.approx([bytes_per_host] * 2, rel=0.01)


def minidist(*args):
    return [sys.executable, "-m", "mpi4py", "-m", "minidist", *args, "--transport", "mpi"]


def test_training_sends_between_hosts_one_gradient_per_step(hosts):
    """Two pipelines, each on a host: a stage's gradient S is summed over 2 ranks, 2 S bytes."""
    between = {}
    for steps in (5, 25):
        argv = minidist("train", "--dp", "2", "--pp", "2", "--steps", str(steps), "--sample", "0")
        before = hosts.bytes_between()
        done = hosts.mpiexec(4, argv, stdout=subprocess.PIPE, text=True, check=True)
        between[steps] = hosts.bytes_between() - before
        assert "certificate: ok. 4 ranks against one device" in done.stdout
    parameters = int(re.search(r"([\d,]+) parameters", done.stdout)[1].replace(",", ""))
    assert (between[25] - between[5]) / 20 == pytest.approx(2 * 4 * parameters, rel=0.05)
    assert hosts.left_behind() == []


@pytest.mark.timeout(600)
def test_every_strategy_is_certified_on_two_hosts(hosts):
    done = hosts.mpiexec(4, minidist("verify"), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ rows, all ok;", done.stdout, re.MULTILINE)
    assert {line.split()[1] for line in done.stdout.splitlines() if line[:3] == "ok "} == set(
        strategies()
    )


def test_hosts_share_neither_processes_nor_memory_nor_names():
    with Hosts(number=3) as hosts:
        argv = ["sh", "-c", "hostname; readlink /proc/self/ns/* | sort; touch /dev/shm/mine"]
        done = hosts.mpiexec(3, argv, stdout=subprocess.PIPE, text=True, check=True)
        lines = done.stdout.split()
        assert {"host1", "host2", "host3"} < set(lines)
        for kind in ["net", "uts", "ipc", "mnt", "pid"]:
            assert len({line for line in lines if line.startswith(kind + ":")}) == 3
        assert hosts.left_behind() == [f"{name}: /dev/shm/mine" for name in hosts.names]


def links():
    return subprocess.run(["ip", "-brief", "link"], stdout=subprocess.PIPE, check=True).stdout


def processes():
    """Yield the folders of /proc of the processes that run on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if "\nState:\tZ" not in (folder / "status").read_text():
                yield folder
        except OSError:
            continue  # it has ended


def namespaces(folder):
    try:
        return {os.readlink(folder / "ns" / kind) for kind in ["net", "mnt", "pid"]}
    except OSError:
        return set()


def namespaces_of(marker):
    """Return the namespaces of what has the marker in its command line, but not our own."""
    found = set()
    for folder in processes():
        if marker in (folder / "cmdline").read_text():
            found |= namespaces(folder)
    return found - namespaces(Path("/proc/self"))


def none_is_left(made):
    """Wait until no process is in the namespaces, for two seconds at most."""
    end = time.monotonic() + 2
    while any(made & namespaces(folder) for folder in processes()) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(made & namespaces(folder) for folder in processes())


ENDLESS = """
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
ones, total = numpy.ones(100_000), numpy.empty(100_000)
world.Allreduce(ones, total)
if world.rank == 0:
    print("running", flush=True)
while True:
    world.Allreduce(ones, total)
"""


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_nothing_is_left_of_a_job_that_is_stopped_in_the_middle(end, tmp_path):
    script, before = tmp_path / "endless.py", links()
    script.write_text(ENDLESS)
    command = [sys.executable, "-m", "tests.several_hosts", "-n", "4", "--", *rank(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as job:
        try:
            assert job.stdout.readline() == b"running\n"
            made = namespaces_of(str(script))
            assert len(made) == 9  # of the login node and two hosts
            if end == "SIGINT":
                os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            else:
                job.send_signal(signal.Signals[end])
            job.communicate(timeout=10)  # until nobody holds its stdout
        finally:
            job.kill()
    assert job.returncode == (130 if end == "SIGINT" else -signal.Signals[end])
    assert none_is_left(made)
    assert links() == before
