"""Isolates a process by Linux namespaces: no network, no other processes, and only some files, read-only."""

from __future__ import annotations

import ctypes
import os
import struct

from .restrict import SIGKILL, Unavailable, die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

NOBODY = 65534
ENOSPC = 28
NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC, NEW_USERS, NEW_PROCESSES, NEW_NETWORK = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
ALL_NEW = NEW_MOUNTS | NEW_CGROUP | NEW_NAMES | NEW_IPC | NEW_USERS | NEW_PROCESSES | NEW_NETWORK
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
OLD = "/old"

libc = ctypes.CDLL(None, use_errno=True)


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
    refused = libc.unshare(ALL_NEW) != 0
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
    try:
        if user != 0:
            _write(f"/proc/{child}/setgroups", "deny")
        _write(f"/proc/{child}/uid_map", f"{user} {user} 1\n{others}")
        _write(f"/proc/{child}/gid_map", f"{group} {group} 1\n{others}")
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
    for what, path in (
        *readable,
        *((device, device) for device in DEVICES),
    ):  # after the mount, since Python may be below /tmp
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
        _make_read_only(old, path)


def _make_read_only(old: str, path: str) -> None:
    wanted = struct.pack("QQQQ", READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, -100, path.encode(), AT_RECURSIVE, wanted, len(wanted)) == 0:
        return
    # before Linux 5.12 only one mount at a time, without the mounts below it
    _checked(libc.umount2(path.encode(), DETACH), f"umount {path}")
    _mount(old, path, None, BIND)
    _mount(None, path, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES | os.statvfs(path).f_flag & 0x40E)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(libc.mount(*given, ctypes.c_ulong(flags), options.encode() or None), f"mount of {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise Unavailable(f"{what} was refused: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _end_as(child: int) -> NoReturn:
    """Wait for a process and end with the same status, after collecting other children that have ended."""
    pid, status = os.wait()
    while pid != child:
        pid, status = os.wait()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGKILL:
        os.kill(os.getpid(), SIGKILL)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
