"""Checks of disk, shared memory, memory, cores and the limits of a process."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from grpocli.cache import cache_dir
from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.needs import GIB, LEAST_DISK, MIB

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine
    from grpocli_tools.doctor.needs import Needs

ROOMY = 5 * GIB
"""Bytes on a disk below which there is a warning: a checkpoint of a model of 0.5B parameters takes 6 GB."""
TRIAL = 64 * 1024
"""Bytes that are written to see whether a disk takes them."""
DOCKER = 64 * MIB
"""Docker's default size of /dev/shm."""
SHARED = 1 * GIB
LEAST_MEMORY, ROOMY_MEMORY = 1.0 * GIB, 4.0 * GIB
"""Bytes: a default run takes about 0.8 GiB."""
LIMIT = re.compile(r"^Max (.+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)
NO_LIMIT = 2**60
"""Control groups of version 1 write a larger number for no limit."""


def runs_folder(machine: Machine, needs: Needs) -> Path:
    """The folder that the run's folder will be in."""
    return needs.runs or machine.folder / "runs"


def disk(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The folders that a run writes to: whether they take a file, and how much room there is."""
    cache = cache_dir(machine.environ)
    folders = {
        "working folder": (machine.folder, LEAST_DISK, "cd FOLDER on another disk, or hydra.run.dir=FOLDER"),
        "runs": (runs_folder(machine, needs), LEAST_DISK, "hydra.run.dir=FOLDER on another disk"),
        "cache": (cache, LEAST_DISK, "export GRPOCLI_CACHE=FOLDER on another disk"),
        "temporary": (_temporary(machine), LEAST_DISK, "export TMPDIR=FOLDER on another disk"),
    }
    for name, (folder, least, advice) in folders.items():
        yield room(machine, name, folder, least, advice)
    home = Path(machine.environ.get("HOME", "") or "/nonexistent")
    if reason := unwritable(home):
        advice = "export HOME=FOLDER, or GRPOCLI_CACHE, HF_HOME and XDG_CACHE_HOME"
        yield warning("home", f"{home}: {reason}; libraries keep caches there", advice)


def _temporary(machine: Machine) -> Path:
    """The folder for temporary files: the first of Python's candidates that exists."""
    names = [machine.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    return next((Path(name) for name in (*names, "/tmp", "/var/tmp") if name and Path(name).is_dir()), Path("/tmp"))


def room(machine: Machine, name: str, folder: Path, least: float, advice: str) -> Finding:
    """A finding about one folder. least: bytes without which the run fails."""
    there = existing(folder)
    if reason := unwritable(there):
        return Finding(name, "error", f"{folder}: {reason}", advice)
    free = float(machine.disk_usage(there).free)
    detail = f"{folder}: {_size(free)} free"
    if free < least:
        return Finding(name, "error", f"{detail}, and the run needs {_size(least)}", advice)
    if free < ROOMY:
        return warning(name, f"{detail}; a checkpoint takes 12 bytes a parameter, 6 GB at 0.5B", advice)
    return ok(name, detail)


def existing(folder: Path) -> Path:
    """The folder, or the first of its parents that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))


def unwritable(folder: Path) -> str:
    """Why no file can be written in a folder, as a phrase; "" if one can."""
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "there is no such folder"
    try:
        with tempfile.NamedTemporaryFile(prefix=".grpocli-doctor-", dir=folder) as file:
            file.write(bytes(TRIAL))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    return ""


def shared_memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The size of /dev/shm, where vLLM, NCCL and sync=shm keep what processes share."""
    folder = machine.root / "dev" / "shm"
    advice = "enlarge it: docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm"
    if reason := unwritable(folder):
        yield problem("/dev/shm", reason, advice, needs.shared_memory)
        return
    usage = machine.disk_usage(folder)
    detail = f"{_size(usage.free)} of {_size(usage.total)} free"
    if usage.free < DOCKER and needs.shared_memory:
        yield Finding("/dev/shm", "error", f"{detail}, and {needs.shared_memory} needs it", advice)
    elif usage.free < SHARED:
        yield warning("/dev/shm", f"{detail}; vLLM, NCCL and sync=shm share tensors there", advice)
    else:
        yield ok("/dev/shm", detail)


def memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The memory that this process may use: the machine's, or the limit of its control group."""
    total, free = _of_the_machine(machine)
    if not total:
        yield not_needed("memory", "unknown: /proc/meminfo cannot be read")
        return
    limit, used = memory_limit(machine)
    limited = limit < total
    free = min(free, limit - used) if limited else free
    where = f"{_size(min(limit, total))}{' (limit of the container or job)' if limited else ''}"
    detail = f"{_size(free)} of {where} free"
    advice = "`top -o %MEM` shows what to end; more memory is docker run --memory=16g or sbatch --mem=16G"
    if free < LEAST_MEMORY:
        yield Finding("memory", "error", f"{detail}, and a run needs {_size(LEAST_MEMORY)}", advice)
    elif free < ROOMY_MEMORY:
        yield warning("memory", detail, advice)
    else:
        yield ok("memory", detail)


def _of_the_machine(machine: Machine) -> tuple[float, float]:
    """Bytes of memory, and those that are available."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE))
    return 1024.0 * int(values.get("MemTotal", 0)), 1024.0 * int(values.get("MemAvailable", 0))


def memory_limit(machine: Machine) -> tuple[float, float]:
    """The memory limit of this process's control groups in bytes (infinite without one), and what they use."""
    found = [(float("inf"), 0.0)]
    for folder in control_groups(machine, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = machine.text(f"{folder}/{limit}").strip()
            if text.isdigit() and int(text) < NO_LIMIT:
                current = machine.text(f"{folder}/{used}").strip()
                found.append((float(text), float(current) if current.isdigit() else 0.0))
    return min(found)


def control_groups(machine: Machine, controller: str) -> Iterator[str]:
    """The folders, below `root`, of this process's control group and of the groups above it."""
    for line in machine.text("proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) < 3 or (words[1] and controller not in words[1].split(",")):
            continue
        base = PurePosixPath("sys/fs/cgroup") / (controller if words[1] else "")
        own = PurePosixPath(words[2].lstrip("/"))
        for group in (own, *own.parents):
            yield str(base / group)


def cores(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The cores that this process may use: its affinity and the limit of its control group."""
    allowed, limit = _affinity(machine), cpu_limit(machine)
    total = machine.text("proc/cpuinfo").count("\nprocessor") + machine.text("proc/cpuinfo").startswith("processor")
    detail = f"{allowed or total} of {total or allowed}"
    if limit < (allowed or total):
        detail += f", limited to {limit:g} by the container or job"
        threads = max(1, int(limit))
        if machine.environ.get("OMP_NUM_THREADS") is None:
            yield warning("cores", f"{detail}, which torch does not know", f"export OMP_NUM_THREADS={threads}")
            return
    yield ok("cores", detail)


def _affinity(machine: Machine) -> int:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text("proc/self/status"), re.MULTILINE)
    ranges = [part.partition("-") for part in found[1].split(",")] if found else []
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def cpu_limit(machine: Machine) -> float:
    """The cores that the control groups allow; infinite without a limit."""
    limits = [float("inf")]
    for folder in control_groups(machine, "cpu"):
        quota, _, period = machine.text(f"{folder}/cpu.max").strip().partition(" ")
        if not quota:
            quota = machine.text(f"{folder}/cpu.cfs_quota_us").strip()
            period = machine.text(f"{folder}/cpu.cfs_period_us").strip()
        with suppress(ValueError, ZeroDivisionError):
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits)


def limits(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The limits of a process (`ulimit`): open files, processes, locked memory, core files."""
    soft = {name: value for name, value, _ in LIMIT.findall(machine.text("proc/self/limits"))}
    if not soft:
        yield not_needed("limits", "unknown: /proc/self/limits cannot be read")
        return
    files, processes, locked = (_limit(soft, name) for name in ("open files", "processes", "locked memory"))
    if files < 1024:
        yield problem("open files", f"at most {files:g} (ulimit -n)", "ulimit -n 65536", files < 128)
    elif files < 4096:
        yield warning(
            "open files", f"at most {files:g} (ulimit -n); many servers and workers need more", "ulimit -n 65536"
        )
    else:
        yield ok("open files", f"at most {files:g}")
    if processes < 2048:
        yield problem("processes", f"at most {processes:g} (ulimit -u)", "ulimit -u 65536", processes < 64)
    else:
        yield ok("processes", f"at most {processes:g}".replace("at most inf", "no limit"))
    if locked < GIB and needs.gpus > 1:
        detail = f"at most {_size(locked)} (ulimit -l); NCCL over InfiniBand locks more"
        yield warning("locked memory", detail, "ulimit -l unlimited")
    if _limit(soft, "core file size") > 0 and not machine.text("proc/sys/kernel/core_pattern").startswith("|"):
        yield warning("core files", "a crash of a large process writes its memory to disk", "ulimit -c 0")


def _limit(soft: dict[str, str], name: str) -> float:
    text = soft.get(name, "unlimited")
    return float(text) if text.isdigit() else float("inf")


def _size(size: float) -> str:
    if size >= GIB:
        return f"{size / GIB:,.1f} GiB"
    return f"{size / MIB:,.0f} MiB" if size >= MIB else f"{max(0, size) / 1024:,.0f} KiB"
