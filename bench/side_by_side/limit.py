"""The bare model on the tokens of a workload: forward and backward over each distinct token once, without a trainer.

`python limit.py WORKLOAD MODEL_FOLDER STEPS [teacher]` prints one JSON line. With `teacher`, a second model runs
forward over the same tokens, as in distillation. The tokens (prompts once, no padding) form plain
rows of a length for which about as many pairs of tokens attend to each other as in the workload.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from workloads import ALL

from grpocli.processes.cpu_tuning import keep_freed_memory, use_large_pages
from grpocli.training.packing import rounded

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def main() -> None:
    folder, steps, work = sys.argv[2], int(sys.argv[3]), ALL[sys.argv[1]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_large_pages()
    keep_freed_memory()
    model = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device))
    teacher = None
    if "teacher" in sys.argv[4:]:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        teacher = cast("LlamaForCausalLM", loaded)
    seconds = []
    for step in range(steps):
        total, completions = work.needed(step)
        rows = max(1, round(total**2 / (2 * work.pairs(step))))
        length = rounded(-(-total // rows))  # few sizes, as in grpocli: each new one compiles kernels
        ids = torch.arange(length * rows, device=device).view(rows, -1) % 300
        began = time.perf_counter()
        if teacher:
            with torch.no_grad():
                hidden = teacher.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[:completions]
                cross_entropy(teacher.lm_head(hidden).float(), ids.flatten()[:completions])
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[:completions]
            loss = cross_entropy(model.lm_head(hidden).float(), ids.flatten()[:completions])
        loss.backward()
        loss.item()
        seconds.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
