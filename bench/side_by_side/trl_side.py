"""Run TRL's GRPOTrainer on one workload, in its own environment, and print one JSON line.

`python trl_side.py WORKLOAD MODEL_FOLDER STEPS [seed=NUMBER] [liger]`
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns that its rollout hook may change

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workloads import ALL, FIRST_WORD, Workload, own_tokenizer, peak, reward


class StepRecorder(TrainerCallback):
    """Records the time at which each step ends, and its log."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, *args: Any, **others: Any) -> None:
        self.stamps.append(time.perf_counter())

    on_step_end = on_train_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "grad_norm" in logs:
            self.logs.append({name: float(logs[name]) for name in ("grad_norm", "reward")})


def given(work: Workload, tokenizer: Any) -> Any:
    """Returns the workload's completions through TRL's rollout hook."""
    steps = iter(range(10**9))

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        each = [iter(rows) for rows in work.completions(next(steps))]
        ids = tokenizer(prompts).input_ids
        return {"prompt_ids": ids, "completion_ids": [next(each[p[0] - FIRST_WORD]) for p in ids], "logprobs": None}

    return rollout


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run(scratch)


def run(scratch: str) -> None:
    """Run the trainer. scratch: a folder for its files."""
    name, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed = next((int(one.removeprefix("seed=")) for one in sys.argv[4:] if one.startswith("seed=")), 42)
    work, watch = ALL[name], StepRecorder()
    cuda = torch.cuda.is_available()
    rows = work.groups * work.rows
    # on a GPU a forward has at least as many tokens as grpocli's; one piece is faster if it fits into memory
    filled = rows * (work.prompt + work.longest) / work.micro_batch
    pieces = min(rows, 2 ** max(0, round(math.log2(filled)))) if cuda else 1
    own_tokenizer()
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts()]),
        callbacks=[watch],
        rollout_func=None if work.sampled else given(work, AutoTokenizer.from_pretrained(folder)),
        args=GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=rows // pieces,
            gradient_accumulation_steps=pieces,
            num_generations=work.rows,
            max_completion_length=work.longest,
            max_steps=steps,
            learning_rate=work.rate,
            lr_scheduler_type="constant",
            seed=seed,
            bf16=True,
            gradient_checkpointing=False,
            use_liger_kernel="liger" in sys.argv[4:],
            use_cpu=not cuda,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    seconds = [b - a for a, b in zip(watch.stamps, watch.stamps[1:], strict=False)]
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(json.dumps({"seconds": seconds, "GiB": peak(), "logs": watch.logs, "device": device}))


if __name__ == "__main__":
    main()
