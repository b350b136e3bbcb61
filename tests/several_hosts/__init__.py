"""Several hosts on one machine: namespaces on a switch, and mpiexec across them (Linux, root).

    with Hosts(number=2, mbit=1000) as hosts:
        hosts.mpiexec(4, [sys.executable, "-m", "mpi4py", "script.py"])
        hosts.bytes_between()

A host has its own name, address, processes, /dev/shm, and a link of limited rate. Hosts share the
file system, as in a cluster, and, unlike in a cluster, the cores and the clock. By hand:

    python -m tests.several_hosts --hosts 2 --mbit 1000 -n 4 -- python -m mpi4py script.py

Everything is in namespaces that end with one process, which ends when its stdin does. So nothing is
left behind when this process ends, however it ends: by Ctrl-C, by an error, or by SIGKILL.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from minidist.observe.bench import table

HERE = Path(__file__).parent
NAMESPACES = ["--net", "--uts", "--ipc", "--mount"]
COMMANDS = ["ip", "tc", "unshare", "nsenter", "mount", "hostname", "ps"]


class Hosts:
    """host1, host2, ... on one switch, for as long as the context is open.

    mbit: megabits per second that a link carries, in each direction. RuntimeError if the hosts
    cannot be made.
    """

    def __init__(self, number: int = 2, mbit: float = 1000):
        self.names = [f"host{1 + i}" for i in range(number)]
        self.mbit = mbit

    def __enter__(self) -> "Hosts":
        script = ["sh", HERE / "switch.sh", str(len(self.names)), f"{self.mbit}mbit"]
        self.login = subprocess.Popen(
            ["unshare", *NAMESPACES, "--pid", "--fork", "--mount-proc", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for mpiexec
        )
        try:
            for _ in self.names:
                if self.login.stdout.readline() != "ready\n":
                    raise RuntimeError("the hosts could not be made; see above")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.login.stdin.close()
        self.login.wait()
        self.login.stdout.close()

    def run(self, argv: list, **options) -> subprocess.CompletedProcess:
        """Run a command on the login node; subprocess.run takes the options."""
        pid = self.login.pid
        enter = ["nsenter", "--target", str(pid), *NAMESPACES]
        enter += [f"--pid=/proc/{pid}/ns/pid_for_children"]
        setting = ["env", f"--chdir={os.getcwd()}", "TMPDIR=/dev/shm"]
        return subprocess.run([*enter, *setting, *argv], **options)

    def mpiexec(self, ranks: int, argv: list, **options) -> subprocess.CompletedProcess:
        """Run argv in every rank; the first ceil(ranks / hosts) ranks are on host1, and so on."""
        each = -(-ranks // len(self.names))
        places = ",".join(f"{name}:{each}" for name in self.names)
        return self.run([*launcher(places), "-n", str(ranks), *argv], **options)

    def bytes_between(self) -> int:
        """Return the bytes, headers included, that the hosts have sent to each other so far."""
        table = Path(f"/proc/{self.login.pid}/net/dev").read_text().replace(":", " ")
        received = {link: int(count) for link, count, *_ in map(str.split, table.splitlines()[2:])}
        return sum(received[host] for host in self.names) - received["switch"]  # for the login node

    def left_behind(self) -> list[str]:
        """Return the processes that run on the hosts, and the files of /dev/shm.

        A zombie has ended: a host's first process, `sleep`, collects none.
        """
        look, found = "ps -e -o args=; find /dev/shm -mindepth 1 || true", []
        ours = {"sleep infinity", f"sh -c {look}", "ps -e -o args="}
        for host in self.names:
            done = self.run([HERE / "ssh", host, look], capture_output=True, text=True, check=True)
            lines = [x for x in done.stdout.splitlines() if not x.endswith("<defunct>")]
            found += [f"{host}: {line}" for line in lines if line not in ours]
        return found


def launcher(places: str) -> list:
    """Return mpiexec with the arguments to reach places like "host1:2,host2:2": host, ranks."""
    mpiexec, agent = table.mpiexec(), HERE / "ssh"
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:  # as root; and hosts do not know that they share cores
        allow = ["--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return [mpiexec, *allow, "--prtemca", "plm_ssh_agent", agent, "--host", places]
    if "HYDRA" in version:  # MPICH
        return [mpiexec, "-launcher", "ssh", "-launcher-exec", agent, "-hosts", places]
    raise RuntimeError(f"{mpiexec} is neither MPICH's nor Open MPI's")


def why_not() -> str | None:
    """Return why this machine cannot have several hosts, or None."""
    if missing := [name for name in COMMANDS if not shutil.which(name)]:
        return f"no command {', '.join(missing)}"
    if subprocess.run(["unshare", *NAMESPACES, "true"], stderr=subprocess.DEVNULL).returncode:
        return "namespaces need root, and a container that allows them"
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed"
    if not table.mpiexec():
        return "no mpiexec beside this Python or on PATH"
    try:
        with Hosts(1):
            return None
    except RuntimeError as error:
        return str(error)
