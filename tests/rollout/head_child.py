"""Samples in bfloat16 with real vLLM, and writes how far its log-probs are from a policy's, as JSON.

Run as `python -m rollout.head_child HEAD_DTYPE MODEL RUN RESULTS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rollout.vllm_tiny import TOKENIZER, Alone
from transformers import LlamaForCausalLM

from grpocli.models.head import widen_head
from grpocli.processes.libraries import quiet_libraries
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm.engine_parts import VllmColocate
from grpocli.training.policy import Policy
from grpocli.types import Request, Sampling


def gap(policy: Policy, prompt: list[int], token_ids: list[int], logprobs: list[float]) -> list[float]:
    expected = policy.score([*prompt, *token_ids])[len(prompt) - 1 :]
    return [abs(a - b) for a, b in zip(expected, logprobs, strict=True)]


def main(head_dtype: str | None, model: Path, run: Path) -> dict[str, Any]:
    quiet_libraries()
    plain, wide = (LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
    policies = {"null": Policy(plain, plain, torch.bfloat16)}
    policies["float32"] = Policy(widen_head(wide), wide, torch.bfloat16)
    job = EngineJob(str(model), "bfloat16", 128, run, seed=0, head_dtype=head_dtype)
    options = VllmColocate()
    found: dict[str, Any] = {}
    prompts = [[5 + i, 6, 7 + i, 8] for i in range(16)]
    with options.launch(job):
        context = EngineContext(job, policies[head_dtype or "null"], TOKENIZER, Alone())  # type: ignore[arg-type]
        engine: Any = options.connect(context)
        engine.sync(1)
        groups = engine.generate([Request(prompt, 4, seed=i) for i, prompt in enumerate(prompts)], Sampling(24))
        engine.close()
    for one, policy in policies.items():
        gaps = [gap(policy, p, c.token_ids, c.logprobs) for p, g in zip(prompts, groups, strict=True) for c in g]
        flat = [value for values in gaps for value in values]
        found[one] = sum(flat) / len(flat)
    return found


if __name__ == "__main__":
    head, model, run, results = sys.argv[1:]
    answer = main(None if head == "null" else head, Path(model), Path(run))
    Path(results).write_text(json.dumps(answer))
