"""Irrevocable restrictions of this process: resource limits, no privileges, and a filter of system calls."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 1, 38, 22, 2
EPERM, ENOSYS = 1, 38
SIGKILL = 9  # importing `signal` would take 5 ms
NAMESPACES = 0x7E020000
"""Flags of clone(2) that make a new namespace: within its own user namespace a process may mount anything."""

LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""Instructions of the kernel's filter programs (BPF)."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000

REFUSED = {
    "socket": (41, 198),  # some, such as vsock from a virtual machine to its host, ignore namespaces
    "memfd_create": (319, 279),  # files that no disk limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # memory that outlives its process
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
    "io_uring_setup": (425, 425),  # performs refused operations without a system call
    "personality": (135, 92),
}
"""Refused system calls, with their numbers on x86_64 and on aarch64."""
ARCHITECTURES = {"x86_64": (0xC000003E, 0, 56), "aarch64": (0xC00000B7, 1, 220)}
"""The kernel's constant, the column in REFUSED, and the number of clone(2)."""
CLONE3 = 435
X32 = 0x40000000
"""System calls from this number on belong to the x32 ABI of x86_64."""


class Unavailable(Exception):
    """This machine cannot isolate a program. The text gives the reason."""


def limit(seconds: float, memory_mb: int, disk_mb: int) -> None:
    """Limit the resources of this process and of each process that it starts. seconds: of processor time, plus two."""
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
    """Limit the processes and threads of this user in this user namespace. The limit does not apply to root."""
    _lower(resource.RLIMIT_NPROC, most)


def _lower(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def give_up_privileges() -> None:
    """Drop all capabilities for good and install the filter of system calls. Raises Unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(libc.capset(header, data), "capset")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    instructions = _filter()
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, program, 0, 0), "seccomp")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _filter() -> list[bytes]:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise Unavailable(f"{machine} processors are not supported")
    architecture, column, clone = ARCHITECTURES[machine]
    number, kernel, flags = 0, 4, 16  # offsets in the kernel's struct seccomp_data
    return [
        _instruction(LOAD, kernel),
        _instruction(EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, number),
        *_answer(AT_LEAST, X32, ENOSYS),
        *_answer(EQUAL, CLONE3, ENOSYS),  # the filter cannot see its flags; the C library falls back to clone
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
