"""What a process gives up for good before it runs code of others: resources, and kinds of system calls."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 1, 38, 22, 2
EPERM, ENOSYS = 1, 38
SIGKILL = 9  # the module that has its name takes 5 ms
NAMESPACES = 0x7E020000
"""The flags of clone(2) that make a new namespace: in a namespace of users of its own a process may mount anything."""

LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""Instructions of the kernel's packet filter."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000

REFUSED = {
    "socket": (41, 198),  # also those that no namespace holds back, such as a virtual machine's to its host
    "memfd_create": (319, 279),  # files that no limit on disk space counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # memory that stays when nobody holds it
    "msgget": (68, 186),
    "semget": (64, 190),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # does what is refused here without a system call
    "personality": (135, 92),
}
"""Their numbers on x86_64 and on aarch64."""
ARCHITECTURES = {"x86_64": (0xC000003E, 0, 56), "aarch64": (0xC00000B7, 1, 220)}
"""How the kernel calls it, its column of REFUSED, and the number of clone(2)."""
CLONE3 = 435
X32 = 0x40000000
"""Numbers from here on are those of another calling convention of x86_64."""


class Unavailable(Exception):
    """This machine cannot hold a program back. The text says why."""


def limit(seconds: float, memory_mb: int, disk_mb: int) -> None:
    """Of this process and of each that it starts. seconds: of the processor's time, a little more than of the clock."""
    memory, size, time = memory_mb * 2**20, disk_mb * 2**20, int(seconds) + 2
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CPU, time),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _lower(what, most)


def limit_processes(most: int) -> None:
    """Of this user in this namespace of users, threads included; of root there is no such limit."""
    _lower(resource.RLIMIT_NPROC, most)


def _lower(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def give_up_privileges() -> None:
    """No capabilities, no programs that give any, and none of the system calls of REFUSED. Raises Unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(libc.capset(header, data), "capset")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    instructions = _filter()
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, program, 0, 0), "seccomp")


def die_with_parent() -> None:
    """Be killed when the process that started this one ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _filter() -> list[bytes]:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise Unavailable(f"no list of system calls for a {machine} processor")
    architecture, column, clone = ARCHITECTURES[machine]
    number, kernel, flags = 0, 4, 16  # where they are in what the filter sees
    return [
        _instruction(LOAD, kernel),
        _instruction(EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, number),
        *_answer(AT_LEAST, X32, ENOSYS),
        *_answer(EQUAL, CLONE3, ENOSYS),  # its flags cannot be seen from here; the C library then takes clone
        *(one for numbers in REFUSED.values() for one in _answer(EQUAL, numbers[column], EPERM)),
        _instruction(EQUAL, clone, 0, 3),
        _instruction(LOAD, flags),
        *_answer(ANY_BIT, NAMESPACES, EPERM),
        _instruction(RETURN, ALLOW),
    ]


def _answer(test: int, value: int, error: int) -> tuple[bytes, bytes]:
    return _instruction(test, value, 0, 1), _instruction(RETURN, REFUSE | error)


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise Unavailable(f"{what} was refused: {os.strerror(ctypes.get_errno())}")
