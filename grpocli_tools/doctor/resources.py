"""Checks of disk, shared memory, memory, cores and the limits of a process."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from grpocli.cache import cache_dir
from grpocli_tools.doctor.checkup import GIB, Finding, not_needed, ok, problem, warning

if TYPE_CHECKING:
    from grpocli_tools.doctor.checkup import Needs
    from grpocli_tools.doctor.machine import Machine

MIB = 2**20
LEAST_DISK, ROOMY_DISK = 200 * MIB, 5 * GIB
"""Bytes that the default run may write, and below which there is a warning: 0.5B parameters take 6 GB."""
TRIAL = 64 * 1024
"""Bytes that are written to see whether a disk takes them."""
DOCKER, SHARED = 64 * MIB, 1 * GIB
"""Bytes of /dev/shm: Docker's default, and those below which there is a warning."""
LEAST_MEMORY, ROOMY_MEMORY = 1.0 * GIB, 4.0 * GIB
"""Bytes: a default run takes about 0.8 GiB."""
LIMIT = re.compile(r"^Max (.+?)\s{2,}(\S+)", re.MULTILINE)
NO_LIMIT = 2**60
"""Control groups of version 1 write a larger number for no limit."""


def runs_folder(machine: Machine, needs: Needs) -> Path:
    """The folder that the run's folder will be in."""
    return needs.runs or machine.folder / "runs"


def disk(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The folders that a run writes to: whether they take a file, and how much room there is."""
    names = [machine.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    temporary = next((Path(name) for name in (*names, "/tmp") if name and Path(name).is_dir()), Path("/var/tmp"))
    folders = {
        "working folder": (machine.folder, "cd FOLDER on another disk, or hydra.run.dir=FOLDER"),
        "runs": (runs_folder(machine, needs), "hydra.run.dir=FOLDER on another disk"),
        "cache": (cache_dir(machine.environ), "export GRPOCLI_CACHE=FOLDER on another disk"),
        "temporary": (temporary, "export TMPDIR=FOLDER on another disk"),
    }
    for name, (folder, advice) in folders.items():
        yield room(machine, name, folder, LEAST_DISK, advice)
    home = Path(machine.environ.get("HOME", "") or "/nonexistent")
    if reason := unwritable(home):
        advice = "export HOME=FOLDER, or GRPOCLI_CACHE, HF_HOME and XDG_CACHE_HOME"
        yield warning("home", f"{home}: {reason}; libraries keep caches there", advice)


def room(machine: Machine, name: str, folder: Path, least: float, advice: str) -> Finding:
    """A finding about one folder. least: bytes without which the run fails."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    if reason := unwritable(there):
        return Finding(name, "error", f"{folder}: {reason}", advice)
    free = float(machine.disk_usage(there).free)
    detail = f"{folder}: {_size(free)} free"
    if free < least:
        return Finding(name, "error", f"{detail}, and the run needs {_size(least)}", advice)
    if free < ROOMY_DISK:
        return warning(name, f"{detail}; a checkpoint takes 12 bytes a parameter, 6 GB at 0.5B", advice)
    return ok(name, detail)


def unwritable(folder: Path) -> str:
    """Why no file can be written in a folder, as a phrase; "" if one can."""
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
        yield problem("/dev/shm", reason, advice, needs.vllm)
        return
    usage = machine.disk_usage(folder)
    detail = f"{_size(usage.free)} of {_size(usage.total)} free"
    if usage.free < SHARED:
        detail = f"{detail}; vLLM, NCCL and sync=shm share tensors there"
        yield problem("/dev/shm", detail, advice, usage.free < DOCKER and needs.vllm)
    else:
        yield ok("/dev/shm", detail)


def memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The memory that this process may use: the machine's, or the limit of its control group."""
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE))
    if "MemTotal" not in kilobytes:
        yield not_needed("memory", "unknown: /proc/meminfo cannot be read")
        return
    total, free = (1024.0 * int(kilobytes[name]) for name in ("MemTotal", "MemAvailable"))
    where = _size(total)
    for folder in control_groups(machine, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            bytes_of = [machine.text(f"{folder}/{name}").strip() for name in (limit, used)]
            most, now = (int(text) if text.isdigit() else 0 for text in bytes_of)
            if bytes_of[0].isdigit() and most < min(total, NO_LIMIT):
                total, free, where = most, min(free, most - now), f"{_size(most)} (limit of the container or job)"
    detail = f"{_size(free)} of {where} free"
    advice = "`top -o %MEM` shows what to end; more memory is docker run --memory=16g or sbatch --mem=16G"
    if free < LEAST_MEMORY:
        yield Finding("memory", "error", f"{detail}, and a run needs {_size(LEAST_MEMORY)}", advice)
    elif free < ROOMY_MEMORY:
        yield warning("memory", detail, advice)
    else:
        yield ok("memory", detail)


def control_groups(machine: Machine, controller: str) -> Iterator[str]:
    """The folders, below `root`, of this process's control group and of the groups above it."""
    for line in machine.text("proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = PurePosixPath("sys/fs/cgroup") / (controller if controllers else "")
            group = PurePosixPath(own.lstrip("/"))
            yield from (str(base / one) for one in (group, *group.parents))


def cores(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The cores that this process may use: its affinity and the limit of its control group."""
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text("proc/self/status"), re.MULTILINE)
    ranges = [part.partition("-") for part in found[1].split(",")] if found else []
    allowed = sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
    total = len(re.findall("^processor", machine.text("proc/cpuinfo"), re.MULTILINE))
    detail, limit = f"{allowed or total} of {total or allowed}", cpu_limit(machine)
    if limit < (allowed or total):
        detail += f", limited to {limit:g} by the container or job"
        if machine.environ.get("OMP_NUM_THREADS") is None:
            threads = f"export OMP_NUM_THREADS={max(1, int(limit))}"
            yield warning("cores", f"{detail}, which torch does not know", threads)
            return
    yield ok("cores", detail)


def cpu_limit(machine: Machine) -> float:
    """The cores that the control groups allow; infinite without a limit."""
    limits = [inf]
    for folder in control_groups(machine, "cpu"):
        words = machine.text(f"{folder}/cpu.max").split()
        words = words or [machine.text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if all(word.isdigit() for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits)


def limits(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The limits of a process (`ulimit`): open files and processes."""
    soft = dict(LIMIT.findall(machine.text("proc/self/limits")))
    for name, letter, fatal, few in (("open files", "n", 128, 4096), ("processes", "u", 64, 2048)):
        text = soft.get(name, "unlimited")
        most = float(text) if text.isdigit() else inf
        if most < few:
            detail = f"at most {most:g} (ulimit -{letter}); many servers and workers need more"
            yield problem(name, detail, f"ulimit -{letter} 65536", most < fatal)
        else:
            yield ok(name, "no limit" if most == inf else f"at most {most:g}")


def _size(size: float) -> str:
    if size >= GIB:
        return f"{size / GIB:,.1f} GiB"
    return f"{size / MIB:,.0f} MiB" if size >= MIB else f"{max(0, size) / 1024:,.0f} KiB"
