"""Tokens per second of `engine=vllm` and of vLLM called directly: `python bench/generation.py --model FOLDER`.

Both receive the same requests (token ids, seeds, sampling parameters) and use the same vLLM options. Both are loaded
at the same time and alternate, so that other load on the machine affects both. Prints medians as JSON. The direct
side is `LLM.generate` in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LINE = "answer: "


def requests(prompts: int, group: int, prompt_tokens: int) -> list[Any]:
    from grpocli.types import Request

    return [Request([(37 * i + 11 * j) % 1000 + 100 for j in range(prompt_tokens)], group, i) for i in range(prompts)]


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    from grpocli.rollout.vllm.client import body
    from grpocli.types import Sampling

    wanted = requests(args.prompts, args.group, args.prompt_tokens)
    return [body(request, Sampling(args.tokens), ()) for request in wanted]


def direct(settings: dict[str, Any]) -> None:
    """The child process: for each line on stdin, sample once and print the number of tokens and seconds."""
    from vllm import LLM, SamplingParams

    llm = LLM(**settings["llm"])
    asked = [
        ({"prompt_token_ids": one["token_ids"]}, SamplingParams(**one["sampling_params"])) for one in settings["bodies"]
    ]
    print(LINE + "ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        llm.reset_prefix_cache()
        print(LINE + json.dumps([tokens, time.perf_counter() - start]), flush=True)


def answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(LINE):
            return line.removeprefix(LINE).strip()
    raise SystemExit(f"vLLM ended with {child.wait()}: see above")


def through_engine(engine: Any, args: argparse.Namespace) -> tuple[int, float]:
    from grpocli.types import Sampling

    start = time.perf_counter()
    groups = engine.generate(requests(args.prompts, args.group, args.prompt_tokens), Sampling(args.tokens))
    seconds = time.perf_counter() - start
    return sum(len(one.token_ids) for group in groups for one in group), seconds


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", required=True, help="a Hugging Face folder")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--prompts", type=int, default=16)
    cli.add_argument("--group", type=int, default=8)
    cli.add_argument("--prompt-tokens", type=int, default=64)
    cli.add_argument("--tokens", type=int, default=64)
    cli.add_argument("--turns", type=int, default=5)
    cli.add_argument("--direct", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.direct:
        direct(json.loads(Path(args.direct).read_text()))
        return
    print(json.dumps(compare(args), indent=1))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.engine_parts import Vllm
    from grpocli.training.policy import Policy

    llm: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "enforce_eager": True,
        "max_model_len": args.prompt_tokens + args.tokens,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if not torch.cuda.is_available():
        # without the first vLLM wants nearly all memory; without the second a seeded prompt in pieces kills it
        llm |= {"kv_cache_memory_bytes": Vllm().cpu_kv_cache_gb * 2**30, "enable_chunked_prefill": False}
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings.json")
        settings.write_text(json.dumps({"llm": llm, "bodies": bodies(args)}))
        job = EngineJob(args.model, args.dtype, args.prompt_tokens + args.tokens, Path(folder, "run"), seed=0)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        policy = Policy(model, model, getattr(torch, args.dtype))
        options = Vllm()
        with options.launch(job):
            context = EngineContext(job, policy, AutoTokenizer.from_pretrained(args.model), Alone())  # type: ignore[arg-type]
            engine: Any = options.connect(context)
            engine.sync(1)
            child = subprocess.Popen(
                [sys.executable, __file__, "--model", args.model, "--direct", str(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            try:
                answer(child)
                ours, theirs = take_turns(engine, child, args)
                child.communicate()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with vLLM's own processes
                engine.close()
    a, b = statistics.median(ours), statistics.median(theirs)
    return {
        "sequences": args.prompts * args.group,
        "tokens_each": args.tokens,
        "engine_tokens_per_second": round(a, 1),
        "direct_tokens_per_second": round(b, 1),
        "ratio": round(a / b, 3),
    }


def take_turns(engine: Any, child: subprocess.Popen[str], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, without the warm-up round of each side."""
    ours, theirs = [], []
    assert child.stdin is not None
    for _ in range(args.turns + 1):
        tokens, seconds = through_engine(engine, args)
        ours.append(tokens / seconds)
        for server in engine.pool.clients:
            server.reset_prefix_cache()
        child.stdin.write("go\n")
        child.stdin.flush()
        tokens, seconds = json.loads(answer(child))
        theirs.append(tokens / seconds)
    return ours[1:], theirs[1:]


class Alone:
    """A world of one process."""

    rank, size, is_main = 0, 1, True

    def gather_objects(self, items: Any) -> Any:
        return list(items)

    def broadcast_object(self, item: Any) -> Any:
        return item


if __name__ == "__main__":
    main()
