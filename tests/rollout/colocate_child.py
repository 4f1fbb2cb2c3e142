"""Runs colocated vLLM in a separate process and writes the results as JSON.

Run as `python -m rollout.colocate_child WHAT MODEL RUN RESULTS`: WHAT is `engine` or `heads`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollout.vllm_tiny import TOKENIZER, Alone, TinyPolicy, expected_logprobs, requests
from transformers import LlamaForCausalLM

import grpocli.rollout.vllm.colocate  # noqa: F401 (first: some library draws a random number when it is imported)
from grpocli.errors import ConfigError, EngineError
from grpocli.models.head import widen_head
from grpocli.processes.libraries import quiet_libraries
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm.engine_parts import VllmColocate
from grpocli.training.policy import Policy
from grpocli.types import Request, Sampling

SAMPLINGS = {"plain": Sampling(24), "truncated": Sampling(24, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02)}


def state() -> dict[str, str]:
    """The process state that vLLM must not change."""
    root = logging.getLogger()
    return {
        "threads": str((torch.get_num_threads(), torch.get_num_interop_threads(), torch.set_num_threads)),
        "precision": torch.get_float32_matmul_precision(),
        "torch generator": hashed(torch.get_rng_state().tolist()),
        "numpy generator": hashed(np.random.get_state()),
        "python generator": hashed(random.getstate()),
        "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
        "process group": str(torch.distributed.is_initialized()),
        "handlers": str((root.level, root.handlers)),
        "filters of warnings": str(warnings.filters),
    }


def hashed(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()


def changed(before: dict[str, str]) -> dict[str, list[str]]:
    now = state()
    return {name: [value, now[name]] for name, value in before.items() if now[name] != value}


def engine_results(model: Path, run: Path) -> dict[str, Any]:
    job = EngineJob(str(model), "float32", 128, run, seed=0)
    policy, options = TinyPolicy(model), VllmColocate()
    before, found = state(), dict[str, Any]()
    context = EngineContext(job, policy, TOKENIZER, Alone())  # type: ignore[arg-type]
    with options.launch(job):
        wrong = dataclasses.replace(options, vllm_args={"max_num_seq": 4})
        found["an unknown argument"] = refusal(lambda: wrong.connect(context))
        engine: Any = options.connect(context)
    # vLLM makes a default process group if the process has none
    found["changed by start"] = {k: v for k, v in changed(before).items() if k != "process group"}
    found["before the first sync"] = refusal(lambda: engine.generate(requests(), Sampling(4)))
    policy.sent = {name: p for name, p in policy.model.named_parameters() if "layers.0.self_attn.o_proj" not in name}
    never_arrives, policy.sent = refusal(lambda: engine.sync(1)), None
    found["synced"] = [engine.sync(1), 4.0 * sum(p.numel() for p in policy.model.parameters())]
    found["sampled"] = {name: sampled(engine, policy, sampling) for name, sampling in SAMPLINGS.items()}
    found["moved"] = moved(engine, policy)
    found["corrupted"] = corrupted(engine, policy) | {"never arrives": [never_arrives]}
    found["changed by use"] = {k: v for k, v in changed(before).items() if k != "process group"}
    engine.close()
    found["changed in the end"] = changed(before)
    return found


def sampled(engine: Any, policy: TinyPolicy, sampling: Sampling) -> list[dict[str, Any]]:
    asked = requests(n=8)
    groups = engine.generate(asked, sampling)
    assert [len(group) for group in groups] == [8] * len(asked)
    return [
        dataclasses.asdict(one) | {"expected": expected_logprobs(policy, request.token_ids, one.token_ids, sampling)}
        for request, group in zip(asked, groups, strict=True)
        for one in group
    ]


def moved(engine: Any, policy: TinyPolicy) -> dict[str, Any]:
    """Log-probs of both sides before, between and after a change of the weights and a sync."""
    probe = engine.verifier.token_ids
    scores = [engine.llm.score(probe), policy.score(probe)]
    policy.change(seed=2)
    scores += [engine.llm.score(probe), policy.score(probe)]
    engine.sync(2)
    scores += [engine.llm.score(probe), policy.score(probe)]
    versions = {one.version for group in engine.generate(requests(), Sampling(4)) for one in group}
    return {"scores": scores, "versions": sorted(versions), "weight version": engine.llm.llm.get_weight_version()}


def corrupted(engine: Any, policy: TinyPolicy) -> dict[str, list[Any]]:
    """Sends wrong weights; records the refusal and both means."""
    policy.change(seed=3)
    weights = dict(policy.model.named_parameters())
    policy.sent = weights | {"model.norm.weight": weights["model.norm.weight"] + 0.05}
    said, probe = refusal(lambda: engine.sync(3)), engine.verifier.token_ids
    means = [sum(scores) / len(scores) for scores in (engine.llm.score(probe), policy.score(probe))]
    found = {"wrong": [said, *means]}
    policy.sent = None
    engine.sync(8)
    policy.sent = weights | {"model.layers.0.new.weight": weights["model.norm.weight"]}
    found["unknown"] = [refusal(lambda: engine.sync(10))]
    policy.sent = None
    engine.sync(20)
    return found


def refusal(call: Any) -> str:
    try:
        call()
    except (ConfigError, EngineError) as error:
        return str(error)
    return "nothing was refused"


def head_gaps(head_dtype: str | None, model: Path, run: Path) -> dict[str, float]:
    """How far vLLM's log-probs in bfloat16 are from those of a policy with each head."""
    plain, wide = (LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
    policies = {"None": Policy(plain, plain, torch.bfloat16), "float32": Policy(widen_head(wide), wide, torch.bfloat16)}
    job = EngineJob(str(model), "bfloat16", 128, run, seed=0, head_dtype=head_dtype)
    options, prompts = VllmColocate(), [[5 + i, 6, 7 + i, 8] for i in range(16)]
    with options.launch(job):
        context = EngineContext(job, policies[str(head_dtype)], TOKENIZER, Alone())  # type: ignore[arg-type]
        engine: Any = options.connect(context)
        engine.sync(1)
        groups = engine.generate([Request(prompt, 4, seed=i) for i, prompt in enumerate(prompts)], Sampling(24))
        engine.close()
    done = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    found = {}
    for name, policy in policies.items():
        pairs = [(policy.score([*prompt, *one.token_ids])[len(prompt) - 1 :], one.logprobs) for prompt, one in done]
        gaps = [abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)]
        found[name] = sum(gaps) / len(gaps)
    return found


if __name__ == "__main__":
    what, model, run, results = sys.argv[1:]
    quiet_libraries()
    if what == "engine":
        found = engine_results(Path(model), Path(run))
    else:
        found = {str(head): head_gaps(head, Path(model), Path(run)) for head in ("float32", None)}
    Path(results).write_text(json.dumps(found))
