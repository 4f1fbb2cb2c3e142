"""Whole runs with engine=transformers: the default run, a pretrained model, a kill and a resume."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial

from experiment import Measured, Setting, at_least, at_most, between, experiment
from forks import child
from training_runs import SHORT, apart, differences, mean, median, metrics, model_keys, output, train, train_here

EIGHT = ["engine=transformers", "eval.problems=0", "rollout.prompts_per_step=8", "rollout.group_size=8"]


@experiment(
    "runs",
    "the default run, warm start included",
    at_least("accuracy", 0.8, "greedy accuracy at the end", gpu=True),
    at_most("seconds_per_step", 0.5, "seconds a step", gpu=True),
    seconds=60,
)
def default_run(setting: Setting) -> Measured:
    keys = [*SHORT, "train.steps=2"] if setting.small else []
    began = time.monotonic()
    folder = train(setting, "run", "engine=transformers", *keys)
    rows = [row for row in metrics(folder) if "time/step" in row]
    summary = json.loads((folder / "summary.json").read_text())
    found: Measured = {"seconds": time.monotonic() - began, "seconds_per_step": median(rows, "time/step")}
    found |= {"seconds_sampling": median(rows, "time/rollout"), "peak_gib": rows[-1]["memory/peak_gib"]}
    return found | {"accuracy": summary["eval/accuracy"]}


@experiment(
    "runs",
    "SmolLM2-135M with engine=transformers: recipe=multiplication, 40 steps",
    at_least("last", 0.6, "mean reward of the last ten steps (0.83 on a CPU)", gpu=True),
    at_most("first", 0.5, "mean reward of the first ten (0.25 on a CPU)"),
    needs=("model",),
    seconds=180,
)
def pretrained_model(setting: Setting) -> Measured:
    steps = 3 if setting.small else 40
    rows = metrics(train(setting, "run", "engine=transformers", *model_keys(setting), f"train.steps={steps}"))
    first, last = mean(rows[:10], "reward"), mean(rows[-10:], "reward")
    return {"first": first, "last": last, "seconds_per_step": median(rows, "time/step")}


@experiment(
    "runs",
    "a run killed with SIGKILL after two steps and resumed, beside an undisturbed one",
    at_most("beyond_a_repeat", 3, "difference of the final weights, in those of two undisturbed runs (0 of 0 is 0)"),
    at_most("weights", 1e-3, "largest difference of the final weights"),
    at_most("steps_before_the_kill", 4, "steps before the kill, of 5"),
    between("steps", 5, 5, "steps of both together"),
    seconds=120,
)
def kill_and_resume(setting: Setting) -> Measured:
    from grpocli.cli import main

    keys = [*EIGHT, "checkpoint.every=1", "train.steps=5", *(SHORT[:1] if setting.small else [])]
    calm = train(setting, "calm", *keys)
    again = train(setting, "again", *keys)
    repeated = differences(again, calm)
    setting.save({"weights_of_a_repeat": repeated["weights"]})
    folder = setting.folder / "killed"
    run = child(partial(train_here, setting, "killed", *keys), 1, 2)
    while len(metrics(folder)) < 2 and os.waitpid(run, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    os.killpg(run, signal.SIGKILL)
    os.waitpid(run, 0)
    steps = len(metrics(folder))
    output(lambda: main(["train", f"resume={folder}"]))
    found = differences(folder, calm)
    own, usual = found["weights"], repeated["weights"]
    return {
        "steps_before_the_kill": steps,
        "steps": len(metrics(folder)),
        "other_metrics": found["metrics"],
        "weights": own,
        "weights_of_a_repeat": usual,
        "beyond_a_repeat": own / usual if usual else 1e9 * (own > 0),
    }


PROCESSES = {
    "ddp": ("hardware.processes=2",),
    "fsdp2": ("hardware.processes=2", "hardware.parallel=fsdp2"),
    "context": ("hardware.processes=2", "hardware.context_parallel=2"),
}
"""Two processes, by how they share the model or a micro-batch."""


@experiment(
    "runs",
    "two processes over NCCL beside one: the first step of the built-in model, the same completions",
    *(at_most(f"apart_{name}", 0.03, f"{name}: relative difference of the gradient norms") for name in PROCESSES),
    needs=("two gpus",),
    seconds=300,
)
def two_processes(setting: Setting) -> Measured:
    keys = [*EIGHT, "checkpoint.every=0", "train.steps=2"]
    alone = metrics(train(setting, "alone", *keys, "hardware.processes=1"))[0]
    found: Measured = {"norm": alone["grad_norm"]}
    for name, chosen in PROCESSES.items():
        row = metrics(train(setting, name, *keys, *chosen))[0]
        found |= {f"apart_{name}": apart(row["grad_norm"], alone["grad_norm"]), f"reward_{name}": row["reward"]}
        setting.save(found)
    return found | {"reward": alone["reward"]}
