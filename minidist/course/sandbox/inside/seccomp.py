"""seccomp: a process on Linux permanently gives up a list of system calls.

Refused are: processes (threads are allowed), programs, signals, sockets, the limits and priorities
of other processes, what would outlive the process (System V's shared memory, message queues, keys),
and the rights, owners and times of files, which Landlock does not know. A refused call ends in
PermissionError.

The filter is a program for the kernel's packet filter, four fields an instruction: what to do,
where to jump if true and if false, and a number. `seccomp(2)` has its input: the call's number at
byte 0, the architecture at 4, the first argument at 16.
"""

import ctypes
import errno
import platform
import struct

# name: number on x86_64, number on aarch64; None: it has none
REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "socket": (41, 198),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
}
CLONE, CLONE3, PRLIMIT = (56, 220), 435, (302, 261)
CLONE_THREAD = 0x10000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16


def program(machine: str) -> bytes:
    """Return the filter for a machine."""
    column, architecture = MACHINES[machine]
    refuse, later = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 0x40000000),  # x86's second table of calls
        (RETURN, 0, 0, refuse),
        (EQUAL, 0, 1, CLONE3),  # its flags are out of sight: the C library then takes clone
        (RETURN, 0, 0, later),
    ]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            lines += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, refuse)]
    lines += [
        (EQUAL, 0, 4, PRLIMIT[column]),
        (LOAD, 0, 0, ARGUMENT),
        (EQUAL, 0, 1, 0),  # its own limits, which it can lower
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, refuse),
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, ARGUMENT),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def restrict() -> bool:
    """Refuse the calls above from now on. Set no_new_privs first. False: nothing is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    bits = struct.calcsize("P") * 8  # a program of 32 bits has other calls
    if platform.machine() not in MACHINES or bits != 64 or not hasattr(libc, "prctl"):
        return False
    lines = program(platform.machine())
    held = ctypes.create_string_buffer(lines, len(lines))
    header = struct.pack("@HP", len(lines) // 8, ctypes.addressof(held))
    return libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
