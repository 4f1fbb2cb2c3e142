"""The GPUs for training and serving, on one machine and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed import refused

from grpocli import hardware
from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError, Stopped
from grpocli.hardware import Devices, Multinode, Single, devices_of, node_of, split
from grpocli.launch import run as launch_run
from grpocli.launch import trainer_launcher
from grpocli.launch.overview import plan_lines
from grpocli.processes.node import Node
from grpocli.rollout.transformers_engine import Transformers
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.runs.run_dir import RunDir
from grpocli.views.view import View

EIGHT = [str(i) for i in range(8)]


@pytest.mark.parametrize(
    ("hardware", "engine", "gpus", "train", "rollout"),
    [
        (Single(), Transformers(), EIGHT, EIGHT, []),
        (Single(processes=2), Transformers(), EIGHT, ["0", "1"], []),
        (Single(), Vllm(), EIGHT, EIGHT[:7], ["7"]),
        (Single(), Vllm(tensor_parallel=2, replicas=2), EIGHT, EIGHT[:4], EIGHT[4:]),
        (Single(), Vllm(base_url="http://node2:8000"), EIGHT, EIGHT, []),
        (Single(processes=2), Vllm(), EIGHT, ["0", "1"], ["7"]),
        (Single(train_devices=4), Vllm(), EIGHT[:4], EIGHT[:4], ["3"]),
        (Single(), Vllm(), ["0"], ["0"], ["0"]),
        (Single(), Vllm(tensor_parallel=8), EIGHT, EIGHT, EIGHT),
        (Single(train_devices=4, rollout_devices=4), Vllm(replicas=4), EIGHT, EIGHT[:4], EIGHT[4:]),
        (Single(), Vllm(), ["GPU-a", "GPU-b"], ["GPU-a"], ["GPU-b"]),
    ],
)
def test_gpus_are_split_between_training_and_serving(
    hardware: Single, engine: object, gpus: list[str], train: list[str], rollout: list[str]
) -> None:
    found = split(hardware, engine, gpus)
    assert (list(found.train), list(found.rollout)) == (train, rollout)
    assert found.processes == len(train)
    assert found.shared is (None if train == ["0", "1", "2"] else bool(set(train) & set(rollout)))


@pytest.mark.parametrize(
    ("hardware", "engine", "key"),
    [
        (Single(), Vllm(replicas=3, tensor_parallel=4), "engine.replicas"),
        (Single(train_devices=9), Vllm(), "hardware.train_devices"),
        (Single(rollout_devices=1), Vllm(replicas=2), "hardware.rollout_devices"),
        (Single(rollout_devices=3), Transformers(), "hardware.rollout_devices"),
        (Single(processes=9), Transformers(), "hardware.processes"),
        (Single(processes=8), Vllm(), "hardware.processes"),
    ],
)
def test_missing_gpus_are_reported(hardware: Single, engine: object, key: str) -> None:
    with refused(key):
        split(hardware, engine, EIGHT)


def test_a_cpu_has_one_device_for_each_process() -> None:
    assert devices_of(Single(device="cpu"), Vllm()) == Devices(1)
    assert devices_of(Single(device="cpu", processes=3), Vllm()) == Devices(3)
    with pytest.raises(ConfigError, match=r"hardware\.train_devices=2: there is no GPU"):
        devices_of(Single(device="cpu", train_devices=2), Vllm())


def test_a_node_must_have_the_configured_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: EIGHT[:4])
    assert devices_of(Multinode(devices_per_node=4), Vllm()).train == tuple(EIGHT[:4])
    with pytest.raises(ConfigError, match=r"hardware\.devices_per_node=8: .* has 4 GPUs for this job"):
        devices_of(Multinode(), Vllm())
    monkeypatch.setattr(hardware, "visible_gpus", list)
    with pytest.raises(ConfigError, match=r"hardware\.devices_per_node=8: .* has 0 GPUs for this job"):
        devices_of(Multinode(device="cuda"), Vllm())
    assert devices_of(Multinode(devices_per_node=2), Vllm()) == Devices(2)


@pytest.mark.parametrize("value", ["0", "[0,1]", "some", "true"])
def test_invalid_devices_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.train_devices=.*: give auto, or how many GPUs"):
        build_run(compose([f"hardware.train_devices={value}"]))


def test_the_printed_plan_names_devices_and_machines() -> None:
    run = build_run(compose(["hardware=multinode", "engine=vllm", "engine.tensor_parallel=8"]))
    lines = plan_lines(run, Devices(8, tuple(EIGHT)))
    assert any("1 machine, each: train on GPUs 0,1,2,3,4,5,6,7; serve on 1 machine" in line for line in lines)
    assert any("8 processes" in line for line in lines)


def test_the_node_is_read_from_slurms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert node_of(Single()) is None
    with pytest.raises(ConfigError, match=r"hardware=multinode: runs in a SLURM allocation.*hydra/launcher=slurm"):
        node_of(Multinode())
    given = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_RESTART_COUNT": "3"}
    for name, value in (given | {"MASTER_ADDR": "node1", "MASTER_PORT": "20007"}).items():
        monkeypatch.setenv(name, value)
    assert node_of(Multinode(train_nodes=2)) == Node(1, 2, "7.3", "node1", 20007)
    with pytest.raises(ConfigError, match=r"hardware\.train_nodes=4: the job step has 2"):
        node_of(Multinode(train_nodes=4))


def test_a_stop_is_not_an_error_on_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --kill-on-bad-exit` would kill the first machine, which may still be at work."""

    def stopped(*_: object) -> None:
        raise Stopped("asked to stop after step 3")

    monkeypatch.setattr(launch_run, "wait_for_job", lambda *_: None)
    monkeypatch.setattr(trainer_launcher, "train_in_processes", stopped)
    run = build_run(compose(["hardware=multinode", "hardware.device=cpu", "hardware.rollout_nodes=0"]))
    assert launch_run.train_on_other_machine(run, RunDir(tmp_path), Node(1, 2, "7.0", "node1", 20007)) is None
    assert trainer_launcher.resume_marker(tmp_path).exists()


@pytest.mark.parametrize(
    ("serve", "shared", "share"), [(("0",), True, 0.4), (("1", "2"), True, 0.4), (("2",), False, 0.9)]
)
def test_a_server_and_the_opening_know_whether_its_gpus_also_train(
    serve: tuple[str, ...], shared: bool, share: float, tmp_path: Path
) -> None:
    run, here = build_run(compose(["engine=vllm", "model.warm_start_steps=1"])), Devices(2, ("0", "1"), serve)
    assert any(f"{share} of the memory for vLLM" in line for line in plan_lines(run, here))
    assert launch_run.prepare(run, RunDir(tmp_path), View(), here).engine.shares_gpus == shared
