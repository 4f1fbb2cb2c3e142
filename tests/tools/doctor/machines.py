"""Machines that are broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpocli_tools.doctor.machine import Ended, Finding, Machine, Package, run_command

FILES = {
    "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n",
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu avx2 avx512f\n",
    "proc/self/cgroup": "0::/job\n",
}
TORCH = [
    {"version": "2.13.0", "cuda": "13.0", "hip": None},
    {"cpu": True},
    {"gpus": []},
    {"importing": "", "broken": {}, "seconds": 5.0},
]
VLLM = [{"device": "cpu", "seconds": 6.0}, {"kernels": True}]


def said(*objects: Mapping[str, Any], code: int | None = 0, err: str = "") -> Ended:
    """A probe that printed these objects."""
    return Ended(code, "".join(f"{json.dumps(one)}\n" for one in objects), err)


def machine(
    folder: Path,
    *,
    files: Mapping[str, str] = {},
    environ: Mapping[str, str] = {},
    answers: Mapping[str, Ended] = {},
    packages: Iterable[Package] = (),
    free: float = 100 * 2**30,
    **more: Any,
) -> Machine:
    """A machine in a folder. answers: what commands and probes end with, by a part of their command line.

    free: bytes on every disk.
    """
    for path, text in {**FILES, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name in ("dev/shm", "home", "work", "bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    known = {
        "probes.py torch": said(*TORCH),
        "probes.py vllm": said(*VLLM),
        "probes.py sandbox": said({"backend": "bubblewrap"}),
    }

    def command(words: Sequence[str], seconds: float, environ: Mapping[str, str]) -> Ended:
        line = " ".join(words)
        found = {**known, **answers}
        return next((found[part] for part in found if part in line), None) or run_command(words, seconds, environ)

    for name, part in {"nvidia-smi": "query-gpu", "sbatch": "sbatch", "sinfo": "sinfo"}.items():
        if part in answers:
            (folder / "bin" / name).write_text("#!/bin/sh\n")
            (folder / "bin" / name).chmod(0o755)
    return Machine(
        environ={"HOME": str(folder / "home"), "PATH": str(folder / "bin"), **environ},
        folder=folder / "work",
        root=folder,
        command=command,
        packages=lambda: {one.name: one for one in packages},
        disk_usage=lambda path: SimpleNamespace(free=free, total=2 * free),
        reach=more.pop("reach", lambda url: ""),
        **more,
    )


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}
