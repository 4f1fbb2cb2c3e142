"""Whole runs with vLLM: a server that shares the GPU, vLLM in the trainer's process, compiled vLLM."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from experiment import Law, Measured, Setting, at_least, at_most, experiment, true
from training_runs import mean, median, metrics, model_keys, train, train_here
from updates_experiments import update_here

SERVER, EAGER = "engine=vllm", "engine.enforce_eager=true"


@contextmanager
def watched_syncs(found: dict[str, list[float]]) -> Iterator[None]:
    """A block in which differences of probes and of canaries are kept, in nats, transfers and requests timed."""
    from grpocli.rollout.vllm import lora, weight_sync
    from grpocli.rollout.vllm.client import ServerClient
    from grpocli.rollout.vllm.transports import IpcTransport

    send, ask = IpcTransport.send, ServerClient.request
    found["by_ipc"] = []

    def measure(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def measured(server: Any, trainer: Any, *more: Any) -> Any:
            found.setdefault(name, []).append(weight_sync.mean(lora.gaps(server, trainer)))
            return check(server, trainer, *more)

        return measured

    def sent(self: IpcTransport, *given: Any) -> None:
        began = time.perf_counter()
        send(self, *given)
        found["by_ipc"].append(time.perf_counter() - began)

    async def asked(self: ServerClient, method: str, path: str, *more: Any) -> Any:
        began = time.perf_counter()
        try:
            return await ask(self, method, path, *more)
        finally:
            found.setdefault(f"seconds of {path.partition('?')[0]}", []).append(time.perf_counter() - began)

    with (
        patch.object(ServerClient, "request", asked),
        patch.object(weight_sync, "require_close", measure("gaps", weight_sync.require_close)),
        patch.object(lora, "not_followed", measure("canary_gaps", lora.not_followed)),
        patch.object(IpcTransport, "send", sent),
    ):
        yield


def served(setting: Setting, *keys: str) -> Measured:
    """A run of five steps in this process, and what its syncs took."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    with watched_syncs(found):
        folder = train_here(setting, "run", *model_keys(setting), "train.steps=5", *keys)
    rows = metrics(folder)
    probes = found.get("gaps", [])
    found |= {"steps": len(rows), "seconds": time.monotonic() - began, "gap": max(probes, default=None)}
    found["transfers_by_ipc"] = len(found["by_ipc"])
    for key in ("update", "probe"):
        if any(f"sync/seconds/{key}" in row for row in rows):
            found[f"sync_{key}_seconds"] = median(rows[1:], f"sync/seconds/{key}")
    found["megabytes"] = mean(rows, "sync/bytes") / 1e6
    return found | {"step_seconds": median(rows[1:], "time/step"), "reward": [row["reward"] for row in rows]}


SERVED_LAWS = (
    at_least("steps", 5, "steps"),
    at_most("gap", 0.25, "largest mean difference of a probe in bfloat16, nats"),
)


def of_a_run(
    name: str, stage: str, question: str, *laws: Law, keys: list[str], needs: Sequence[str] = ("vllm",), seconds: float
) -> None:
    """Register an experiment that is `served` with some keys."""

    def run(setting: Setting) -> Measured:
        return served(setting, *keys)

    run.__name__ = name
    experiment(stage, question, *SERVED_LAWS, *laws, needs=tuple(needs), seconds=seconds)(run)


BY_IPC = at_least("transfers_by_ipc", 5, "transfers by CUDA IPC")
UPDATED = at_most("sync_update_seconds", 0.5, "seconds of an update of the server's weights")
of_a_run(
    "sync_by_ipc",
    "serving",
    "a server on the trainer's GPU that starts with dummy weights, sync=auto, which takes ipc: five steps",
    *(BY_IPC, UPDATED),
    keys=[SERVER, EAGER, "sync=auto"],
    needs=("gpu", "vllm"),
    seconds=150,
)


@experiment(
    "serving",
    "the difference between sampler and trainer in float16 and in bfloat16, five steps of a server each",
    at_most("error", 1.02, "float16: token_mult_prob_error"),
    at_most("gap", 0.03, "float16: largest mean difference of a probe, nats"),
    at_most("of_bfloat16", 0.3, "gen_kl_error in float16 over that in bfloat16"),
    needs=("vllm",),
    seconds=200,
)
def gap_in_16_bits(setting: Setting) -> Measured:
    found: dict[str, Any] = {}
    few = ["rollout.prompts_per_step=2", "rollout.group_size=4"] if setting.small else []
    for dtype in ("bfloat16", "float16"):
        probes: dict[str, list[float]] = {}
        with watched_syncs(probes):
            keys = [*model_keys(setting), *few, "train.steps=5", SERVER, EAGER, f"model.dtype={dtype}"]
            rows = metrics(train_here(setting, dtype, *keys))
        found[f"gap_{dtype}"] = max(probes.get("gaps", [0.0]))
        found |= {f"{name}_{dtype}": mean(rows, name) for name in ("token_mult_prob_error", "gen_kl_error")}
        setting.save(found)
    found |= {"error": found["token_mult_prob_error_float16"], "gap": found["gap_float16"]}
    return found | {"of_bfloat16": found["gen_kl_error_float16"] / found["gen_kl_error_bfloat16"]}


@experiment(
    "serving",
    "sync_by_ipc for 0.5B, 1 GB in buckets: three steps",
    at_least("transfers", 3, "transfers by CUDA IPC", gpu=True),
    SERVED_LAWS[1],
    at_most("seconds_of_a_transfer", 1, "seconds of a transfer", gpu=True),
    needs=("vllm",),
    seconds=150,
)
def ipc_of_half_a_billion(setting: Setting) -> Measured:
    found: dict[str, Any] = {}
    with watched_syncs(found):
        update_here(setting, "0.5B, vLLM", 3, EAGER)
    took = found["by_ipc"]
    found |= {"transfers": len(took), "gap": max(found["gaps"])}
    return found | {"seconds_of_a_transfer": statistics.median(took) if took else None}


of_a_run("sync_by_shm", "serving", "the same by shared memory", keys=[SERVER, EAGER, "sync=shm"], seconds=90)
of_a_run(
    *("sync_by_nccl", "serving", "the same by NCCL, to a server on another GPU"),
    UPDATED,
    keys=[SERVER, EAGER, "hardware.train_devices=1", "hardware.rollout_devices=1", "sync=nccl"],
    needs=("two gpus", "vllm"),
    seconds=240,
)
LORA = ("model.lora.rank=16", "optim.lr=2e-4", "model.dtype=bfloat16")
question = "LoRA: adapters in the server, each kind of layer by a canary"
of_a_run("lora_adapters", "serving", question, keys=[SERVER, EAGER, *LORA], seconds=150)


@experiment(
    "serving",
    "the server is killed in the middle of a run",
    at_least("steps", 6, "steps of the run"),
    at_least("killed", 1, "processes of the server that were killed"),
    needs=("vllm",),
    seconds=150,
)
def killed_server(setting: Setting) -> Measured:
    killed: list[int] = []

    def kill() -> None:
        while len(metrics(setting.folder / "run")) < 2:
            time.sleep(0.05)
        for pid in server_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    threading.Thread(target=kill, daemon=True).start()
    rows = metrics(train(setting, "run", *model_keys(setting), "train.steps=6", SERVER, EAGER))
    return {"steps": len(rows), "killed": len(killed), "seconds": [row["time/step"] for row in rows]}


def server_processes() -> list[int]:
    """The processes of vLLM's servers below this process, without their guards."""
    from grpocli.processes.reaper import descendants

    found = []
    for pid in descendants():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            guard = b"reaper.py" in words
            if not guard and (b"grpocli.rollout.vllm.api_server" in words or b"VLLM::EngineCore" in words):
                found.append(pid)
    return found


COLOCATED_LAWS = (*SERVED_LAWS, at_most("cuda_errors", 0, "errors of CUDA in vLLM's log, when it ends too"))


def colocated(setting: Setting, *keys: str) -> Measured:
    """`served` with vLLM in the trainer's process, where the memory of a vLLM that sleeps must not be freed."""
    found = served(setting, "engine=vllm_colocate", EAGER, *keys)
    log = (setting.folder / "run" / "logs" / "vllm.log").read_text(errors="replace")
    return found | {"cuda_errors": log.count("CUDA Error")}


@experiment(
    "colocated",
    "vLLM in the trainer's process: weights, sleep, load",
    *COLOCATED_LAWS,
    at_least("freed_share", 0.9, "share of vLLM's memory that sleep gives back", gpu=True),
    at_most("load_seconds", 1, "seconds to wake and load", gpu=True),
    true("stream_kept", "the trainer's stream is the one from before vLLM's start", gpu=True),
    needs=("vllm",),
    seconds=110,
)
def colocated_run(setting: Setting) -> Measured:
    found: dict[str, Any] = {"loads": []}
    with watched_colocation(found, setting.device):
        served_run = colocated(setting)
    return found | served_run | {"load_seconds": statistics.median(found["loads"])}


@contextmanager
def watched_colocation(found: dict[str, Any], device: str) -> Iterator[None]:
    """A block in which vLLM's memory, sleeps and loads in this process are measured."""
    from grpocli.rollout.vllm import colocate

    start, sleep, load = colocate.start, colocate.InProcessLLM.sleep, colocate.InProcessLLM.load

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def started(*given: Any) -> Any:
        before, stream = free(), torch.cuda.current_stream()
        llm = start(*given)
        found["vllm_bytes"] = before - free()
        found["stream_kept"] = torch.cuda.current_stream() == stream
        return llm

    def slept(self: Any) -> None:
        before, asleep = free(), self.asleep
        sleep(self)
        if not asleep:
            found["freed_share"] = (free() - before) / found["vllm_bytes"]

    def loaded(self: Any, weights: Any, version: Any) -> None:
        began = time.perf_counter()
        load(self, weights, version)
        found["loads"].append(time.perf_counter() - began)

    started, slept = (started, slept) if device == "cuda" else (start, sleep)
    with patch.object(colocate, "start", started), patch.multiple(colocate.InProcessLLM, sleep=slept, load=loaded):
        yield


@experiment(
    "colocated", "LoRA with vLLM in the trainer's process: five steps", *COLOCATED_LAWS, needs=("vllm",), seconds=150
)
def lora_colocated(setting: Setting) -> Measured:
    return colocated(setting, *LORA)


@experiment(
    "colocated",
    "a weight that never arrives: vLLM's random one stays, which the first probe finds",
    true("refused", "the first sync fails"),
    needs=("vllm",),
    seconds=120,
)
def lost_weight(setting: Setting) -> Measured:
    from grpocli.rollout.vllm.weight_sync import PolicyWeights

    stream = PolicyWeights.stream

    def without_one(self: PolicyWeights) -> Iterator[tuple[str, Any]]:
        return (pair for pair in stream(self) if not pair[0].endswith("layers.0.mlp.down_proj.weight"))

    try:
        with patch.object(PolicyWeights, "stream", without_one):
            served(setting, "engine=vllm_colocate", EAGER)
    except RuntimeError as error:
        return {"refused": "the trainer's weights after the sync to version 1:" in str(error), "error": str(error)}
    return {"refused": False}


def repeated_sampling(setting: Setting, name: str, sequences: int) -> tuple[Path, Measured]:
    """Three steps of as many sequences with compiled vLLM: the run's folder and its speed."""
    keys = ["train.steps=3", f"rollout.prompts_per_step={sequences // 8}", "rollout.group_size=8", "optim.lr=0"]
    folder = train(setting, name, *model_keys(setting), SERVER, *keys)
    rows = metrics(folder)
    tokens = [row["tokens/generated"] for row in rows]
    rates = [count / row["time/rollout"] for count, row in zip(tokens, rows, strict=True)]
    error = max(row["token_mult_prob_error"] for row in rows)
    return folder, {f"tokens_per_second_{sequences}": rates[-1], f"error_{sequences}": error}


def completions(folder: Path) -> list[list[int]]:
    """The token ids of all completions of a run, step by step."""
    from pyarrow import parquet

    files = sorted((folder / "rollouts").glob("*.parquet"))
    tables = (parquet.read_table(file, columns=["completion_ids"]) for file in files)
    return [ids for table in tables for ids in table["completion_ids"].to_pylist()]


@experiment(
    "graphs",
    "compiled vLLM with CUDA graphs: three syncs each with 64, 256 and 1,024 sequences",
    *(at_most(f"error_{n}", 1.1, f"{n} sequences: mean exp of the gap between log-probs") for n in (64, 256, 1024)),
    at_least("gain", 2, "times as many tokens a second with 1,024 as with 64"),
    needs=("gpu", "vllm"),
    seconds=300,
)
def cuda_graphs(setting: Setting) -> Measured:
    found: Measured = {}
    for sequences in (64, 256, 1024):
        found |= repeated_sampling(setting, f"run_{sequences}", sequences)[1]
        setting.save(found)
    return found | {"gain": found["tokens_per_second_1024"] / found["tokens_per_second_64"]}


question = "engine=vllm, nothing else chosen: compiled vLLM beside the trainer, weights by ipc"
of_a_run("default_vllm", "graphs", question, BY_IPC, keys=["engine=vllm"], needs=("gpu", "vllm"), seconds=200)


@experiment(
    "graphs",
    "the same run twice with VLLM_BATCH_INVARIANT=1",
    at_least("equal", 1, "share of equal completions"),
    needs=("gpu", "vllm"),
    seconds=400,
)
def batch_invariance(setting: Setting) -> Measured:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    one, two = (completions(repeated_sampling(setting, f"run_{k}", 256)[0]) for k in (1, 2))
    return {"equal": statistics.mean(a == b for a, b in zip(one, two, strict=True)), "completions": len(one)}
