"""TRL's side of W8 (`multiplication.py`), in its own environment: `python multiplication_trl.py MODEL_FOLDER SEED`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from runpy import run_path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workloads import Multiplication as W8

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "multiplication"
PREFIX = "3*4=12\n9*5=45\n7*2=14\n6*6=36\n"
HELD_OUT = 12


class Recorder(TrainerCallback):
    """Records each step's end and log, and stops a run that has arrived."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[float] = []

    def on_step_end(self, *args: Any, **others: Any) -> None:
        self.stamps.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            self.tokens.append(W8.groups * W8.rows * float(logs["completions/mean_length"]))
            control.should_training_stop = W8.arrived(self.rewards) is not None


def main() -> None:
    model, seed = sys.argv[1], int(sys.argv[2])
    rows = [json.loads(line) for line in (EXAMPLE / "problems.jsonl").read_text().splitlines()]
    data = [{"prompt": PREFIX + row["prompt"], "answer": row["answer"]} for row in rows[:-HELD_OUT]]
    watch = Recorder()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=run_path(str(EXAMPLE / "reward.py"))["product"],
            train_dataset=Dataset.from_list(data),
            callbacks=[watch],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=W8.groups * W8.rows,
                num_generations=W8.rows,
                max_completion_length=W8.longest,
                max_steps=W8.steps,
                learning_rate=W8.rate,
                lr_scheduler_type="constant",
                loss_type="dr_grpo",
                scale_rewards="none",
                beta=0.0,
                seed=seed,
                bf16=True,
                gradient_checkpointing=False,
                use_cpu=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    print(json.dumps({"stamps": watch.stamps, "rewards": watch.rewards, "tokens": watch.tokens}))


if __name__ == "__main__":
    main()
