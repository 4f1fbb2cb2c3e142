"""The bare model on the tokens of a workload: forward and backward over each distinct token once, without a trainer.

`python limit.py WORKLOAD MODEL_FOLDER STEPS [teacher]` prints one JSON line. With `teacher`, a second model runs
forward over the same tokens, as in distillation. The tokens (prompts once, no padding) form plain
rows of a length for which about as many pairs of tokens attend to each other as in the workload.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from workloads import ALL

from grpocli.models.shared_prompt_attention import rounded
from grpocli.processes.libraries import keep_freed_memory, use_large_pages

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
        batches = [torch.arange(n * m, device=device).view(n, m) % 300 for n, m in shapes(total, work.pairs(step))]
        began = time.perf_counter()
        for ids in batches:
            scored = min(completions, ids.numel())
            completions -= scored
            if teacher:
                with torch.no_grad():
                    hidden = teacher.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[:scored]
                    cross_entropy(teacher.lm_head(hidden).float(), ids.flatten()[:scored])
            with torch.autocast(device.type, torch.bfloat16):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[:scored]
                loss = cross_entropy(model.lm_head(hidden).float(), ids.flatten()[:scored], reduction="sum")
            loss.backward()
            loss.item()
        seconds.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    print(json.dumps({"seconds": seconds}))


def shapes(tokens: int, pairs: float) -> list[tuple[int, int]]:
    """Rows and length of plain batches with about so many tokens and pairs of tokens of a row.

    Equal rows, unless their pairs would be over 20 % off: then all but one are equal.
    """
    rows = max(1, round(tokens**2 / (2 * pairs)))
    if abs(tokens**2 / (2 * rows) - pairs) <= 0.2 * pairs:
        return [(rows, rounded(-(-tokens // rows)))]  # few sizes, as in grpocli: each new one compiles kernels
    n = math.ceil(tokens**2 / (2 * pairs)) - 1
    length = (n * tokens + math.sqrt((n * tokens) ** 2 - n * (n + 1) * (tokens**2 - 2 * pairs))) / (n * (n + 1))
    return [(n, rounded(round(length))), (1, rounded(max(1, tokens - n * round(length))))]


if __name__ == "__main__":
    main()
