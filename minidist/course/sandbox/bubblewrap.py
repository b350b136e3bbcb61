"""bubblewrap: a Linux command that shows a process only the files that it is given, and no network.

`bwrap` starts a process among its own processes, network, shared memory and mounts, and ends all of
them with it. It needs no root, but a kernel and a container that let it (default Docker does not):
it is used where it is found to work. <https://github.com/containers/bubblewrap>
"""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM = "/usr /bin /lib /lib64 /etc/alternatives /etc/ld.so.cache".split()
# What the supervisor keeps, if it is root: it becomes another user, ends it, sees its files.
RIGHTS = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_DAC_OVERRIDE"]


def wrapped(command: list[str], root: bool, readable=(), writable=()) -> list[str]:
    """Return the command that runs another one, with the system and these folders alone.

    root  whether root runs it: it keeps RIGHTS
    """
    bwrap = shutil.which("bwrap") or "bwrap"
    found = [bwrap, "--die-with-parent", "--as-pid-1", "--chdir", "/", "--cap-drop", "ALL"]
    found += [word for right in RIGHTS if root for word in ("--cap-add", right)]
    found += [f"--unshare-{what}" for what in ("ipc", "net", "pid", "uts")]
    found += ["--proc", "/proc", "--dev", "/dev"]
    paths = dict.fromkeys([*SYSTEM, sys.base_prefix, *readable], "--ro-bind-try")
    paths |= dict.fromkeys(writable, "--bind")
    for folder in dict.fromkeys(f for path in paths for f in reversed(Path(path).parents)):
        found += ["--perms", "0755", "--dir", str(folder)]  # open to the student's user
    found += [word for path, way in paths.items() for word in (way, path, path)]
    return [*found, "--remount-ro", "/dev", "--remount-ro", "/", *command]


@functools.cache
def why_not(root: bool, folders: tuple[str, ...]) -> str | None:
    """Return why bubblewrap is not used here; None if it has just run Python and NumPy.

    folders  where NumPy is imported from
    """
    code = f"import sys; sys.path += {folders}; import numpy"
    python = [str(Path(sys.executable).resolve()), "-I", "-S", "-B", "-c", code]
    try:
        done = subprocess.run(wrapped(python, root, folders), capture_output=True, timeout=60)
    except FileNotFoundError:
        return "it is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    message = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return (message or f"exit code {done.returncode}") if done.returncode else None
