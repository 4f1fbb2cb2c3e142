"""Updates of models of 0.5B and 1.5B parameters with random weights: the workloads of side_by_side."""

from __future__ import annotations

import cProfile
import fcntl
import importlib
import json
import os
import pstats
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from experiment import Measured, Setting, at_most, between, experiment
from kernels_experiments import little_policy, milliseconds, random_rows
from run import PEAK, WARM
from torch.profiler import ProfilerActivity, profile
from training_runs import SHORT, apart, metrics, output, train_here
from workloads import ALL, make_model

OF_ATTENTION = ("skewed", "prompts")
"""Workloads on which kinds of attention are compared."""
MEMORY = {
    "packed": (),
    "padded": ("train.packed=false",),
    "checkpointing": ("train.gradient_checkpointing=true",),
    "lora": ("model.lora.rank=16",),
}
"""Configs whose planned memory is compared with the measured one."""
COMPILED = {"half_a_billion": "0.5B, even", "tiny": "tiny"}
"""Workloads on which compiled layers are compared with eager ones."""
PROFILED, PROFILED_IN_PYTHON = 3, 5
"""Steps whose updates are profiled, each of which the profile makes slower."""


def workload(setting: Setting, name: str) -> str:
    """The name of a workload; on a CPU that of the smallest of its kind."""
    small = "smoke, vLLM" if name.endswith("vLLM") else "smoke"
    return small if setting.small else name


def model_folder(setting: Setting, name: str) -> Path:
    """The folder of the workload's model, made once for all experiments."""
    return made_model(ALL[workload(setting, name)].model, setting.folder.parent)


def made_model(model: str, work: Path) -> Path:
    """Make a model in a folder below `work`, unless it is there; only one process does."""
    folder = work / model.replace(" ", "-")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tokenizer.json").exists():  # written last
            make_model(model, folder)
    return folder


def update(setting: Setting, name: str, steps: int, *keys: str, script: str = "grpocli_side") -> dict[str, Any]:
    """Steps of a side of bench/side_by_side on a workload, in a fork: what it prints."""
    return dict(json.loads(output(lambda: update_here(setting, name, steps, *keys, script=script)).splitlines()[-1]))


def update_here(setting: Setting, name: str, steps: int, *keys: str, script: str = "grpocli_side") -> None:
    """The same in this process, whose functions an experiment may have replaced."""
    own = [*keys, f"hardware.device={setting.device}"]
    if script == "trl_side":
        sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL would import parts of it that are not carried
        own = list(keys)
    sys.argv = [f"{script}.py", workload(setting, name), str(model_folder(setting, name)), str(steps), *own]
    importlib.import_module(script).main()


def seconds(run: dict[str, Any]) -> float:
    return float(statistics.median(run["seconds"][WARM:]))


def gradient_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The relative difference of the gradient norms of the first updates of two sides."""
    return apart(*(side["logs"][0]["grad_norm"] for side in (one, other)))


@contextmanager
def profiled_updates(found: Measured, word: str, tables: Path | None, device: str) -> Iterator[None]:
    """A block whose updates are timed; one goes through torch's profiler and one through Python's, into `tables`.

    tables: None: the GPU's kernels alone are profiled, which takes seconds.
    """
    from grpocli.training.trainer import Trainer

    update, took, began = Trainer.update, found.setdefault(f"update_ms_{word}", []), time.perf_counter()

    def watched(self: Any, *given: Any) -> None:
        call, step = partial(update, self, *given), self.state.step
        if step not in (PROFILED, PROFILED_IN_PYTHON) or (step == PROFILED_IN_PYTHON and tables is None):
            took.append(milliseconds(call, device))
            found.setdefault(f"first_update_s_{word}", time.perf_counter() - began)
            return
        with (tables or Path(os.devnull)).open("a") as file:
            if step == PROFILED:
                kinds = [ProfilerActivity.CUDA] if device == "cuda" else []
                kinds += [ProfilerActivity.CPU] if tables or not kinds else []
                with profile(activities=kinds, acc_events=True) as seen:
                    milliseconds(call, device)
                events = seen.key_averages()
                found.update({f"{name}_{word}": value for name, value in counted(events).items()})
                for order in ("self_cpu_time_total", "self_device_time_total"):
                    table = events.table(sort_by=order, row_limit=30, max_name_column_width=80)
                    print(f"{word}, by {order}\n{table}", file=file)
            else:
                watch = cProfile.Profile()
                watch.runcall(call)
                for order in ("cumulative", "tottime"):
                    print(f"{word}, Python by {order}", file=file)
                    pstats.Stats(watch, stream=file).sort_stats(order).print_stats(45)

    with patch.object(Trainer, "update", watched):
        yield


def counted(events: Any) -> Measured:
    """What a profile says: milliseconds of the GPU, kernels launched, operations, and waits for the GPU."""

    def count(*words: str, start: str = "") -> int:
        return sum(one.count for one in events if one.key.startswith(start) and all(w in one.key for w in words))

    kernels = [one.self_device_time_total for one in events if one.device_type.name == "CUDA"]
    found: Measured = {"gpu_ms": sum(kernels) / 1e3, "launches": count("LaunchKernel")}
    return found | {"operations": count(start="aten::"), "waits": count("Synchronize", start="cuda")}


@experiment(
    "updates",
    "where an update's time goes, the built-in model and 0.5B at lengths of 512: its profile in profile.txt",
    at_most("launches_tiny", 2000, "kernels launched in an update of the built-in model", gpu=True),
    at_most("waits_tiny", 10, "waits for the GPU in it", gpu=True),
    seconds=190,
)
def step_profile(setting: Setting) -> Measured:
    found: Measured = {}
    tables, steps = setting.folder / "profile.txt", PROFILED_IN_PYTHON + 2
    with profiled_updates(found, "tiny", tables, setting.device):
        short = SHORT if setting.small else []
        train_here(setting, "run", "engine=transformers", f"train.steps={steps}", *short)
    setting.save(found)
    with profiled_updates(found, "half_a_billion", tables, setting.device):
        update_here(setting, "0.5B, even", steps)
    return found


@experiment(
    "updates",
    "operations of an update's micro-batches that wait for the GPU, 0.5B, skewed lengths",
    at_most("waits_per_micro_batch", 0, "waits a micro-batch"),
    needs=("gpu",),
    seconds=60,
)
def host_synchronizations(setting: Setting) -> Measured:
    from grpocli.training.update import Updater

    accumulate, found = Updater.accumulate, Counter[str]()

    def watched(self: Any, window: Any, *more: Any) -> Any:
        found["micro-batches"] += len(window.micro_batches)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            done = accumulate(self, window, *more)
            torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in seen if "synchronizing CUDA operation" in str(one.message)]
        found.update(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in waits)
        return done

    with patch.object(Updater, "accumulate", watched):
        update_here(setting, "0.5B, skewed", 3)
    batches = found.pop("micro-batches")
    return {
        "micro_batches": batches,
        "waits_per_micro_batch": sum(found.values()) / batches,
        "where": [f"{place}: {count}" for place, count in found.most_common(20)],
    }


@experiment(
    "updates",
    "the share of the GPU's bfloat16 peak that an update of 1.5B needs",
    between("share_even", 0.15, 0.45, "lengths of 512", gpu=True),
    between("share_skewed", 0.1, 0.45, "skewed lengths up to 2,048", gpu=True),
    seconds=110,
)
def model_flops(setting: Setting) -> Measured:
    found: Measured = {}
    for kind in ("even", "skewed"):
        work, run = ALL[workload(setting, f"1.5B, {kind}")], update(setting, f"1.5B, {kind}", 5)
        steps, took = range(WARM, 5), sum(run["seconds"][WARM:])
        peak = next((most for name, most in PEAK.items() if name in run["device"]), None)
        share = sum(map(work.flops, steps)) / took / peak if peak else None
        tokens = sum(sum(work.lengths(step)) for step in steps)
        found |= {f"share_{kind}": share, f"seconds_{kind}": run["seconds"]}
        found |= {f"gib_{kind}": run["GiB"], f"tokens_per_second_{kind}": tokens / took}
        setting.save(found)
    return found


def planned_gib(setting: Setting, name: str, keys: tuple[str, ...]) -> float:
    """GiB that `grpocli plan` expects during the update, without libraries, which torch does not allocate."""
    from grpocli.cli import main

    work = ALL[workload(setting, name)]
    command = [
        *("plan", "--json", "--no-advice", "model=hf", f"hardware.device={setting.device}"),
        *(f"model.path={model_folder(setting, name)}", "model.dtype=bfloat16", "engine=transformers"),
        *("task=arithmetic", "algorithm=grpo", "algorithm.kl.beta=0", "algorithm/aggregate=token_mean"),
        *(f"rollout.prompts_per_step={work.groups}", f"rollout.group_size={work.rows}", *keys),
        *(f"rollout.max_prompt_tokens={work.prompt}", f"rollout.max_completion_tokens={work.longest}"),
    ]
    said = output(lambda: main(command), allowed=(0, 1))  # 1: it does not fit
    items = json.loads(said)["devices"][0]["items"]
    return sum(float(item["update"]) for item in items if item["name"] != "libraries") / 2**30


@experiment(
    "updates",
    "memory of an update, planned over measured, 0.5B, prompts of 128 and 512 new",
    *(between(f"ratio_{kind}", 0.85, 1.15, kind, gpu=True) for kind in MEMORY),
    seconds=110,
)
def memory_against_plan(setting: Setting) -> Measured:
    name, found = "0.5B, even", dict[str, Any]()
    for kind, keys in MEMORY.items():
        planned, measured = planned_gib(setting, name, keys), update(setting, name, 3, *keys)["GiB"]
        found |= {f"planned_{kind}": planned, f"measured_{kind}": measured, f"ratio_{kind}": planned / measured}
        setting.save(found)
    return found


@experiment(
    "updates",
    "packed rows by flex attention, the default on a GPU, beside sdpa, 0.5B",
    *(at_most(f"time_{kind}", 1, f"{kind}: time over that of sdpa", gpu=True) for kind in OF_ATTENTION),
    *(at_most(f"gradient_apart_{kind}", 0.03, f"{kind}: difference of the gradient norms") for kind in OF_ATTENTION),
    seconds=120,
)
def attention_choices(setting: Setting) -> Measured:
    found: Measured = {}
    for kind in OF_ATTENTION:
        flex, sdpa = (
            update(setting, f"0.5B, {kind}", 6, f"model.attention={name}") for name in ("flex_attention", "sdpa")
        )
        found |= {f"time_{kind}": seconds(flex) / seconds(sdpa), f"gradient_apart_{kind}": gradient_apart(flex, sdpa)}
        found |= {f"seconds_{kind}": [flex["seconds"], sdpa["seconds"]], f"gib_{kind}": [flex["GiB"], sdpa["GiB"]]}
        setting.save(found)
    return found


def of_layers(setting: Setting, name: str, *keys: str) -> Measured:
    """Figures of the updates of a workload or of the built-in model, in a fork."""
    steps = f"train.steps={PROFILED + 3}"

    def here() -> None:
        found: Measured = {}
        with profiled_updates(found, "", None, setting.device):
            if name == "tiny":
                short = SHORT if setting.small else []
                train_here(setting, "-".join(keys), "engine=transformers", steps, *short, *keys)
            else:
                update_here(setting, name, PROFILED + 3, *keys)
        found["gib_"] = torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else 0.0
        print(json.dumps(found))

    lines = output(here).splitlines()
    logs = metrics(setting.folder / "-".join(keys)) if name == "tiny" else json.loads(lines[-2])["logs"]
    return dict(json.loads(lines[-1])) | {"grad_norm_": logs[0]["grad_norm"]}


@experiment(
    "updates",
    "compiled layers beside eager ones, 0.5B at lengths of 512 and the built-in model",
    *(at_most(f"time_{of}", 1, f"{of}: time of an update over that of eager layers", gpu=True) for of in COMPILED),
    *(at_most(f"gradient_apart_{of}", 0.03, f"{of}: difference of the first gradient norm") for of in COMPILED),
    seconds=120,
)
def compiled_layers(setting: Setting) -> Measured:
    found: Measured = {}
    for of, name in COMPILED.items():
        eager, compiled = (of_layers(setting, name, f"model.compile={on}") for on in ("false", "true"))
        walls = [statistics.median(one["update_ms_"][WARM:]) for one in (eager, compiled)]
        found |= {
            f"time_{of}": walls[1] / walls[0],
            f"gradient_apart_{of}": apart(compiled["grad_norm_"], eager["grad_norm_"]),
        }
        found |= {f"{key}{of}": [eager[key], compiled[key]] for key in eager}
        setting.save(found)
    return found


@experiment(
    "updates",
    "float16 beside bfloat16, an update of 0.5B at lengths of 512",
    between("time", 0.9, 1.1, "time of an update over that in bfloat16", gpu=True),
    at_most("gradient_apart", 0.03, "difference of the first gradient norm"),
    at_most("skipped", 3, "updates that overflowed, of 5"),
    seconds=60,
)
def float16_update(setting: Setting) -> Measured:
    one, other = (update(setting, "0.5B, even", 5, f"model.dtype={dtype}") for dtype in ("bfloat16", "float16"))
    found: Measured = {"seconds": [one["seconds"], other["seconds"]], "time": seconds(other) / seconds(one)}
    found["skipped"] = sum(log["optim/skipped_updates"] for log in other["logs"])
    norms = [
        (a["grad_norm"], b["grad_norm"]) for a, b in zip(one["logs"], other["logs"], strict=True) if "grad_norm" in b
    ]
    return found | {"gradient_apart": apart(*norms[0])}


@experiment(
    "updates",
    "FSDP2 on one process beside plain torch: gradient norms and seconds of an update, float32 and bfloat16",
    at_most("apart_float32", 1e-4, "float32: relative difference of the gradient norms"),
    at_most("apart_bfloat16", 0.03, "bfloat16: the same"),
    seconds=60,
)
def fsdp2_on_one_process(setting: Setting) -> Measured:
    from grpocli.rollout.vllm.server import free_port

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place | {"MASTER_PORT": str(free_port())})
    found: Measured = {}
    for dtype in ("float32", "bfloat16"):
        norms = [gradient_norm(setting, parallel, dtype) for parallel in ("plain", "fsdp2")]
        found |= {f"norms_{dtype}": norms, f"apart_{dtype}": apart(*norms)}
    return found


def gradient_norm(setting: Setting, parallel: str, dtype: str) -> float:
    """The gradient norm of an update of a little model on packed rows."""
    from grpocli.distributed.fsdp2 import Fsdp2
    from grpocli.distributed.parallel import Parallel
    from grpocli.distributed.world import World
    from grpocli.hardware import Single
    from grpocli.training.packing import MicroBatch, Packed
    from grpocli.training.policy import Policy
    from grpocli.training.trials import pack
    from grpocli.types import Sampling

    world = World(Single(device=setting.device))
    own: Any = Fsdp2(world.accelerator) if parallel == "fsdp2" else Parallel(world.device)
    compute = getattr(torch, dtype)
    model = little_policy("cpu", dtype).model
    wrapped, optimizer = own.prepare(model, compute, lambda of: torch.optim.SGD(of.parameters(), lr=0.0))
    policy = Policy(model, wrapped, compute, own)
    assert pack(policy, None)
    batch = MicroBatch.build(random_rows(setting.small), world.device, Packed)
    logp_BT = policy.scores(batch, Sampling(1)).logp
    own.backward(wrapped, (logp_BT.where(batch.mask.bool(), 0.0) * batch.advantages.unsqueeze(1)).sum())
    return float(own.update(wrapped, optimizer, 0.0, 0.0))


PEER_KINDS = ("even", "skewed")
PEERS = {"plain": (), "liger": ("liger",)}
"""TRL's layers: as they are, and with Liger's kernels."""


@experiment(
    "peer",
    "updates beside TRL's, 0.5B: the time and the memory of grpocli over TRL's",
    *(
        at_most(f"{of}_{kind}_{peer}", 1, f"{kind}, TRL's {peer} layers: {of}", gpu=True)
        for kind in PEER_KINDS
        for peer in PEERS
        for of in ("time", "memory")
    ),
    *(at_most(f"gradient_apart_{kind}", 0.03, f"{kind}: difference of the gradient norms") for kind in PEER_KINDS),
    needs=("trl",),
    seconds=240,
)
def beside_trl(setting: Setting) -> Measured:
    found: Measured = {}
    for kind in PEER_KINDS:
        name = f"0.5B, {kind}"
        ours = update(setting, name, 5)
        found |= {f"seconds_{kind}": ours["seconds"], f"gib_{kind}": ours["GiB"]}
        for peer, flags in PEERS.items():
            setting.save(found)
            theirs = update(setting, name, 5, *flags, script="trl_side")
            found |= {
                f"time_{kind}_{peer}": seconds(ours) / seconds(theirs),
                f"memory_{kind}_{peer}": ours["GiB"] / theirs["GiB"],
                f"seconds_{kind}_{peer}": theirs["seconds"],
                f"gib_{kind}_{peer}": theirs["GiB"],
            }
            found.setdefault(f"gradient_apart_{kind}", gradient_apart(ours, theirs))
    return found
