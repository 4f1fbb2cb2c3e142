"""Isolates this process for good.

Linux namespaces leave no network, no other processes and only some files, read-only. Resource limits, no privileges and
a filter of system calls follow, also inside bubblewrap.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 1, 38, 22, 2
EPERM, ENOSPC, ENOSYS = 1, 28, 38
SIGKILL = 9  # importing `signal` would take 5 ms

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

NOBODY = 65534
NAMESPACES = 0x7E020000
"""Flags of clone(2) for new mounts, control groups, host names, IPC, users, processes and networks. The filter refuses
them to programs: within its own user namespace a process may mount anything."""
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
OLD = "/old"

libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """This machine cannot isolate a program. The text gives the reason."""


def enter(readable: Sequence[tuple[str, str]], disk_mb: int) -> None:
    """Return in a new process that sees an empty /tmp of `disk_mb`, the files in `readable`, and no network.

    readable: pairs of a path outside and its path inside.
    The calling process and the ones between stay outside and wait. They end as the new process does, and it ends with
    them. Raises Unavailable, outside, if the kernel does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    made, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(made[1])
        _map_users(child, user, group, made[0], mapped[1])
        _end_as(child)
    die_with_parent()
    os.close(made[0])
    _unshare(made[1])
    if os.read(mapped[0], 1) != b"y":
        os._exit(1)
    os.close(mapped[0])
    os.close(mapped[1])
    _build_root(readable, disk_mb)
    first = os.fork()  # the first process of the pid namespace: when it ends, the kernel kills all others
    if first:
        _end_as(first)
    die_with_parent()
    inner = os.fork()  # the program is not the first process, or it could undo die_with_parent for the namespace
    if inner:
        _end_as(inner)
    os.setsid()
    if user == 0:  # the limit on the number of processes does not apply to root
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with_parent()


def _unshare(made: int) -> None:
    refused = libc.unshare(NAMESPACES) != 0
    error = ctypes.get_errno()
    reason = "user.max_user_namespaces allows no more" if error == ENOSPC else os.strerror(error)
    os.write(made, reason.encode() if refused else b"y")
    os.close(made)
    if refused:
        os._exit(1)


def _map_users(child: int, user: int, group: int, made: int, mapped: int) -> None:
    """Map the users of the child's namespace: this user and, for root, also `nobody`."""
    reason = os.read(made, 200)
    if reason != b"y":
        raise Unavailable(f"the kernel does not allow namespaces here: {reason.decode() or 'no reason given'}")
    others = f"{NOBODY} {NOBODY} 1\n" if user == 0 else ""
    files = {"uid_map": f"{user} {user} 1\n{others}", "gid_map": f"{group} {group} 1\n{others}"}
    try:
        for name, text in (files if user == 0 else {"setgroups": "deny", **files}).items():
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        raise Unavailable(f"the kernel does not allow user namespaces here: {error.strerror}") from error
    os.write(mapped, b"y")


def _build_root(readable: Sequence[tuple[str, str]], disk_mb: int) -> None:
    """Replace this process's root directory."""
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,nr_inodes=4k,mode=755")
    os.mkdir("/tmp" + OLD)
    _checked(libc.pivot_root(b"/tmp", ("/tmp" + OLD).encode()), "pivot_root")
    os.chdir("/")
    os.mkdir("/tmp")
    size = f"size={disk_mb}m,nr_inodes=4k,mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", NO_SETUID | NO_DEVICES, size)
    for what, path in [*readable, *((device, device) for device in DEVICES)]:  # last, since Python may be below /tmp
        _show(what, path)
    _checked(libc.umount2(OLD.encode(), DETACH), "umount")
    os.rmdir(OLD)
    _mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)
    os.chdir("/tmp")


def _show(what: str, path: str) -> None:
    """Make a path of the old root readable in the new one."""
    old = OLD + what
    if not os.path.lexists(old) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    _mount(old, path, None, BIND | RECURSIVE)
    if path not in DEVICES:
        wanted = struct.pack("QQQQ", READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
        result = libc.syscall(MOUNT_SETATTR, -100, path.encode(), AT_RECURSIVE, wanted, len(wanted))
        _checked(result, f"read-only mount of {path}")  # needs Linux 5.12


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(libc.mount(*given, ctypes.c_ulong(flags), options.encode() or None), f"mount of {target}")


def _end_as(child: int) -> NoReturn:
    """Wait for a process and end with the same status, after collecting other children that have ended."""
    pid, status = os.wait()
    while pid != child:
        pid, status = os.wait()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGKILL:
        os.kill(os.getpid(), SIGKILL)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def limit(seconds: float, memory_mb: int, disk_mb: int, processes: int | None) -> None:
    """Limit the resources of this process and of each process that it starts.

    seconds: of processor time, plus two. processes: with threads, of this user in this user namespace; null: no limit.
    It does not apply to root.
    """
    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_FSIZE: disk_mb * 2**20,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_NOFILE: 64,
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0),
        **({} if processes is None else {resource.RLIMIT_NPROC: processes}),
    }
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def give_up_privileges() -> None:
    """Drop all capabilities for good and install the filter of system calls. Raises Unavailable."""
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(libc.capset(header, data), "capset")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    instructions = _filter()
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, program, 0, 0), "seccomp")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


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
