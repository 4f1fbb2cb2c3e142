"""The side of grpocli: `grpocli train` on one workload. Prints one JSON line.

`python grpocli_side.py WORKLOAD MODEL_FOLDER STEPS [KEY=VALUE ...]`
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from workloads import ALL, FIRST_WORD, Workload, own_tokenizer, peak, write_prompts

from grpocli.cli import main as grpocli
from grpocli.rollout.engine import Engine, EnginePart, OnGroup, ignore_group
from grpocli.types import Completion, Request, Sampling

HERE = Path(__file__).parent
TRL = [  # the loss of TRL's defaults, so that both compute the same gradient
    *("algorithm=grpo", "algorithm.kl.beta=0", "algorithm/aggregate=token_mean"),
]


class Given(EnginePart):
    """An engine that returns the workload's completions. Trainer processes load it from this file."""

    workload: str = ""

    def connect(self, context: object) -> GivenEngine:
        return GivenEngine(ALL[self.workload])


class GivenEngine(Engine):
    def __init__(self, work: Workload) -> None:
        self.work, self.version = work, 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        groups = self.work.completions(self.version - 1)
        return [
            [
                Completion(ids, [-6.0] * len(ids), "length", self.version)
                for ids in groups[request.token_ids[0] - FIRST_WORD]
            ]
            for request in requests
        ]

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def close(self) -> None:
        """Nothing to stop."""


def overrides(name: str, folder: str, scratch: Path) -> list[str]:
    """Those of a workload's run, on the model and the prompts in two folders. A name may hold commas and spaces."""
    work = ALL[name]
    prompts, held_out, reward = scratch / "prompts.jsonl", scratch / "held_out.jsonl", HERE / "workloads.py"
    # the given completions have no log-probs of this model, so their gap to the trainer's says nothing
    given = [f"engine={__file__}:Given", f"engine.workload='{name}'", "rollout.max_prob_error=null"]
    return [
        *("model=hf", f"model.path={folder}", "model.dtype=bfloat16"),
        *([f"engine={work.engine}"] if work.sampled else given),
        *TRL,
        *("task=jsonl", f"task.path={prompts}", f"task.eval_path={held_out}", "task.answer_column=null"),
        *("reward=[python]", f"reward.python.function={reward}:reward"),
        *(f"rollout.prompts_per_step={work.groups}", f"rollout.group_size={work.rows}"),
        *(f"rollout.max_prompt_tokens={work.prompt}", f"rollout.max_completion_tokens={work.longest}"),
        *("eval.problems=0", "checkpoint.every=0", f"hydra.run.dir={scratch / 'run'}"),
        *(f"optim.lr={work.rate}", f"train.micro_batch_tokens={work.micro_batch}"),
    ]


def main() -> None:
    name, folder, steps, *more = sys.argv[1:]
    own_tokenizer()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        write_prompts(ALL[name].prompts(), scratch / "prompts.jsonl")
        write_prompts(["t5"], scratch / "held_out.jsonl")  # otherwise one of the other rows would be held out
        options = [*overrides(name, folder, scratch), f"train.steps={steps}", *more]
        with suppress_output(), suppress(SystemExit):
            grpocli(["train", *options])
        rows = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    if len(rows) != int(steps):
        raise SystemExit(f"{len(rows)} of {steps} steps: the run has failed")
    logs = [{key: row[key] for key in ("grad_norm", "reward", "optim/skipped_updates") if key in row} for row in rows]
    found: dict[str, Any] = {
        "seconds": [row["time/step"] for row in rows],
        "GiB": peak_gib(rows),
        "logs": logs,
        "device": device(),
    }
    kinds = ("time/", "tokens/", "memory/")
    found["parts"] = {key: [row[key] for row in rows] for key in rows[0] if key.startswith(kinds)}
    print(json.dumps(found))


def peak_gib(rows: list[dict[str, Any]]) -> float:
    """The peak memory of the run. On a GPU each step's metric begins to count anew."""
    import torch

    return max(row["memory/peak_gib"] for row in rows) if torch.cuda.is_available() else peak()


def suppress_output() -> AbstractContextManager[Any]:
    """Keep stdout for the JSON line."""
    return redirect_stdout(sys.stderr)


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PYTHONPATH"] = str(HERE)  # for trainer processes
    main()
