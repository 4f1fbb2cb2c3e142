"""The cost of tasks beside sampling: reward worker pools, sandboxes, and episodes of several turns.

`python bench/tasks.py --model FOLDER --gsm8k FOLDER`, with a chat model for the episodes, and a folder with GSM8K's
test.jsonl for the rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpocli.environments.environment import EnvironmentConfig
from grpocli.rewards.reward import Sample
from grpocli.rewards.rule_based import Math
from grpocli.rollout.engine import OnGroup, ignore_group
from grpocli.rollout.multi_turn import MultiTurnEngine
from grpocli.sandbox.backends import backend_named, interpreter, no_isolation, select_backend
from grpocli.sandbox.sandbox import Limits, Submission, run
from grpocli.types import Completion, Prompt, Request, Rollout, Sampling

COMPLETIONS, EPISODES, TURNS, TOKENS = 1024, 64, 4, 32
ENVIRONMENT = """
class Echo:
    def reset(self, metadata): return {"turn": 0}
    def step(self, messages, metadata):
        turn = metadata["turn"] + 1
        return [{"role": "user", "content": "Go on."}], 0.0, turn == %d, {"turn": turn}
"""


def rewards(folder: Path, rounds: int) -> None:
    """Seconds in which `math` scores `COMPLETIONS` completions, half of them correct, with started workers."""
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()][:COMPLETIONS]
    samples = []
    for i, row in enumerate(rows):
        solution, _, answer = row["answer"].partition("####")
        said = answer.strip() if i % 2 else f"{int(answer.replace(',', '')) + 1}"
        prompt = Prompt("0", [1], row["question"], {"answer": answer.strip()})
        text = f"{solution}The answer is \\boxed{{{said}}}."
        samples.append(Sample.of(Rollout(prompt, Completion([1], [0.0], "stop", 0), text), 999))
    reward = Math()
    reward(samples[:16])
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        scores = reward(samples)
        took.append(time.perf_counter() - start)
        assert sum(score == 1 for score in scores) == len(samples) // 2
    reward.close()
    print(f"math: {len(samples)} completions of GSM8K in {statistics.median(took):.2f} s (bound: 5)")


class Timed:
    """An engine that counts its seconds. keeps: reuse keys and values between turns."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.seconds, self.keeps = engine, 0.0, True

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        start = time.perf_counter()
        if not self.keeps:
            requests = [replace(request, reusable_kv=()) for request in requests]
        found: list[list[Completion]] = self.engine.generate(requests, sampling, on_group)
        self.seconds += time.perf_counter() - start
        return found


def episodes(folder: Path, rounds: int) -> None:
    """Seconds of episodes of several turns, and of the engine alone for as many tokens in one turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpocli.rollout.transformers_engine import TransformersEngine
    from grpocli.training.policy import Policy

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Timed(TransformersEngine(Policy(model, model, torch.bfloat16), [], 256, tokenizer))
    text = [{"role": "user", "content": "Count as far as you can."}]
    ids = tokenizer(tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)).input_ids
    prompts = [Prompt(str(i), ids, text, {"task_name": "talk"}) for i in range(EPISODES // 8)]
    requests = [Request(ids, 8, i) for i in range(len(prompts))]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "echo.py").write_text(ENVIRONMENT % TURNS)
        environment = EnvironmentConfig(name=f"{scratch}/echo.py:Echo", turn_tokens=TOKENS)
        whole = MultiTurnEngine(engine.generate, tokenizer, {"talk": environment}, bool)
        took: dict[str, list[tuple[float, float, float]]] = {"kept": [], "anew": [], "one turn": []}
        for _ in range(rounds + 1):  # the first one starts the workers
            for how, seconds in took.items():
                engine.seconds, engine.keeps = 0.0, how == "kept"
                start, used = time.perf_counter(), time.process_time()
                if how == "one turn":
                    engine.generate(requests, Sampling(TURNS * TOKENS))
                else:
                    found = whole.generate(prompts, requests, Sampling(2000))
                    assert all(done.episode and done.episode.turns == TURNS for group in found for done in group)
                seconds.append((time.perf_counter() - start, engine.seconds, time.process_time() - used))
        whole.close()
    wall, inside, busy = (
        {how: statistics.median(row[i] for row in rows[1:]) for how, rows in took.items()} for i in range(3)
    )
    print(f"{EPISODES} episodes of {TURNS} x {TOKENS} tokens; the same in one turn: {wall['one turn']:.2f} s")
    for how in ("kept", "anew"):
        print(
            f"what was said, {how}: {wall[how]:.2f} s, of them {inside[how]:.2f} s sampling; ratio "
            f"{wall[how] / wall['one turn']:.2f} (bound: 2), of processor time {busy[how] / busy['one turn']:.2f}"
        )


def sandboxes(rounds: int) -> None:
    """Milliseconds to run an empty program and its test, one program at a time."""
    limits, python = Limits(), interpreter(None)
    job = Submission("def add(a, b):\n    return a + b\n", ["assert add(1, 2) == 3"])
    for way in (backend_named(select_backend(None, limits), None), no_isolation(python)):
        took = []
        for _ in range(10 * rounds + 3):
            start = time.perf_counter()
            assert run(job, limits, way).passed == [True]
            took.append(time.perf_counter() - start)
        print(f"a program shut in by {way.name}: {1000 * statistics.median(took[3:]):.0f} ms (bound: 50)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sandboxes(args.rounds)
    if args.gsm8k:
        rewards(args.gsm8k, args.rounds)
    if args.model:
        episodes(args.model, args.rounds)


if __name__ == "__main__":
    main()
