"""Checks of cores, memory, disk and limits, of the hub, of ports and of SLURM."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from huggingface_hub import constants, get_token

from grpocli.cache import cache_dir
from grpocli_tools.doctor.machine import GIB, Finding, not_needed, ok, problem, warning

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine, Needs

MIB = 2**20
LEAST_DISK, ROOMY_DISK = 200 * MIB, 5 * GIB
"""Bytes that the default run may write, and below which there is a warning: 0.5B parameters take 6 GB."""
DOCKER, SHARED = 64 * MIB, 1 * GIB
"""Bytes of /dev/shm: Docker's default, and those below which there is a warning."""
LEAST_MEMORY, ROOMY_MEMORY = 1.0 * GIB, 4.0 * GIB
"""Bytes: a default run takes about 0.8 GiB."""
LEAST_FILES, MANY_FILES = 128, 4096
"""Open files without which a run fails, and below which there is a warning."""
NO_LIMIT = 2**60
"""Control groups of version 1 write a larger number for no limit."""


def runs_folder(machine: Machine, needs: Needs) -> Path:
    """The folder that the run's folder will be in."""
    return needs.runs or machine.folder / "runs"


def disk(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The folders that a run writes to: whether they take a file, and how much room there is."""
    folders = {
        "working folder": (machine.folder, "cd FOLDER on another disk, or hydra.run.dir=FOLDER"),
        "runs": (runs_folder(machine, needs), "hydra.run.dir=FOLDER on another disk"),
        "cache": (cache_dir(machine.environ), "export GRPOCLI_CACHE=FOLDER on another disk"),
        "temporary": (Path(machine.environ.get("TMPDIR", "/tmp")), "export TMPDIR=FOLDER on another disk"),
    }
    for name, (folder, advice) in folders.items():
        yield room(machine, name, folder, LEAST_DISK, advice)


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
            file.write(bytes(64 * 1024))
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
    else:
        yield ok("memory", detail) if free >= ROOMY_MEMORY else warning("memory", detail, advice)


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
    allowed, limit = len(os.sched_getaffinity(0)), cpu_limit(machine)
    detail = f"{allowed} of {os.cpu_count()}"
    if limit < allowed:
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


def open_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The limit of open files (`ulimit -n`)."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MANY_FILES:
        detail = f"at most {most}; many servers and workers need more"
        yield problem("open files", detail, "ulimit -n 65536", most < LEAST_FILES)
    else:
        yield ok("open files", "no limit" if most < 0 else f"at most {most}")


def hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether the model hub answers, its cache, and whether there is a token, which is not shown."""
    missing = f"; not in the cache: {needs.hub}" if needs.hub else ""
    if constants.HF_HUB_OFFLINE:
        detail = f"HF_HUB_OFFLINE is set: only what is in the cache{missing}"
        yield problem("hub", detail, "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE to download", needs.hub)
    elif reason := machine.reach(constants.ENDPOINT):
        advice = (
            "export HTTPS_PROXY=URL of a proxy or HF_ENDPOINT=URL of a mirror, or work without the hub: "
            "model=hf model.path=FOLDER task.path=FILE"
        )
        yield problem("hub", f"{constants.ENDPOINT} does not answer: {reason}{missing}", advice, needs.hub)
    else:
        yield ok("hub", f"{constants.ENDPOINT} answers")
    least, cache = LEAST_DISK if needs.hub else 0, Path(constants.HF_HUB_CACHE)
    found = room(machine, "hub cache", cache, least, "export HF_HOME=FOLDER on another disk")
    yield replace(found, status="warning") if found.status == "error" and not needs.hub else found
    if get_token():
        yield ok("hub token", "set")
    else:
        yield not_needed("hub token", "none; only gated models and private data need one (`hf auth login`)")


def in_cache(name: str, kind: str) -> bool:
    """Whether a model or a data set (kind: "model" or "dataset") has been downloaded."""
    if Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}").exists():
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    plain = name.lower().replace("/", "").replace("_", "")
    found = prepared.iterdir() if kind == "dataset" and prepared.exists() else ()
    return any(one.name.lower().replace("_", "") == plain for one in found)


def slurm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """SLURM's commands, and whether this is a job of it."""
    job = machine.environ.get("SLURM_JOB_ID")
    inside = f", inside of job {job}" if job else ""
    if not machine.has("sbatch"):
        advice = "ssh to a login node of the cluster, or leave out hydra/launcher=slurm"
        yield problem("SLURM", f"no sbatch on the path{inside}", advice, needs.slurm, otherwise="-")
        return
    ended = machine.run(["sinfo", "--noheader", "--format=%P %D %t"])
    if ended.code == 0:
        yield ok("SLURM", f"answers: {len(ended.out.splitlines())} lines of sinfo{inside}")
        return
    advice = "scontrol ping shows whether slurmctld runs; SLURM_CONF=FILE names another slurm.conf"
    yield problem("SLURM", f"sbatch is installed, and sinfo fails: {ended.reason}", advice, needs.slurm)


def _size(size: float) -> str:
    if size >= GIB:
        return f"{size / GIB:,.1f} GiB"
    return f"{size / MIB:,.0f} MiB" if size >= MIB else f"{max(0, size) / 1024:,.0f} KiB"
