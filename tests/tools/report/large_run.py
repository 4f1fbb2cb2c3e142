"""A large run made quickly."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_large_run(run: Path, steps: int = 2000, groups: int = 25, size: int = 10, tokens: int = 40) -> Path:
    """A run folder with metrics and rollouts; a step's prompts are drawn from 5,000."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(f"seed: 0\ntrain:\n  steps: {steps}\n")
    draw, rows = random.Random(0), groups * size
    floats = pa.list_(pa.float32())
    ids = pa.array(np.ones((rows, tokens), np.int32).tolist(), pa.list_(pa.int32()))
    values = pa.array(np.full((rows, tokens), -0.123456, np.float32).tolist(), floats)
    lines = []
    for step in range(1, steps + 1):
        prompts = [draw.randrange(5000) for _ in range(groups)]
        metrics = {"reward": draw.random(), "entropy": 1.0} | {f"mine/{i}": draw.random() for i in range(60)}
        lines.append(json.dumps({"step": step, **metrics}) + "\n")
        numbers = [prompt for prompt in prompts for _ in range(size)]
        columns = {
            "step": pa.array([step] * rows, pa.int32()),
            "group": pa.array([i for i in range(groups) for _ in range(size)], pa.int32()),
            "task": ["math"] * rows,
            "prompt": [f"What is {number} + {number}? Think first." for number in numbers],
            "answer": [str(2 * number) for number in numbers],
            "completion": [f"I think it is {number}." for number in numbers],
            "completion_ids": ids,
            "loss_mask": pa.array([[1] * tokens] * rows, pa.list_(pa.int8())),
            **dict.fromkeys(("logprobs", "trainer_logprobs", "entropies"), values),
            "reward": [float(number % 2) for number in numbers],
            "advantage": pa.array([0.5] * rows, pa.float32()),
            "finish_reason": ["stop"] * rows,
        }
        pq.write_table(pa.table(columns), run / "rollouts" / f"step_{step:06d}.parquet", compression="zstd")
    (run / "metrics.jsonl").write_text("".join(lines))
    return run
