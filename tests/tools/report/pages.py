"""Pages made by hand: a run with every kind of number and text that a page can have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from grpocli_tools.report.page_data import (
    Chart,
    ChartLine,
    CompletionView,
    GroupView,
    PageData,
    PageTable,
    PromptText,
    RolloutSelection,
    RunView,
    RunWarning,
    Verdict,
)

REWARDS = [ChartLine("reward", "total"), ChartLine("rewards/math/mean", "math"), ChartLine("rewards/format/mean", "")]
ACCURACY = [ChartLine("eval/accuracy", "mean@k", "eval/accuracy_low", "eval/accuracy_high")]
TIMES = [ChartLine("time/rollout", "sampling"), ChartLine("time/train", "update")]
CHARTS = [
    Chart("reward", "Reward", "Learning", REWARDS, help="Mean over the completions of a step."),
    Chart("accuracy", "Accuracy", "Learning", ACCURACY),
    Chart("entropy", "Entropy", "Policy", [ChartLine("entropy", "entropy")], unit="nats"),
    Chart("mismatch", "Trainer and sampler", "Policy", [ChartLine("gen_kl_error", "KL of the sampler")]),
    Chart("time", "Time by stage", "Speed", TIMES, unit="s", stacked=True),
]


def metrics_of(steps: list[int], shift: float = 0.0) -> dict[str, list[float | None]]:
    rising = [1 / (1 + math.exp(4 - step / 8)) + shift for step in steps]
    evaluated = [value if step % 20 == 0 else None for step, value in zip(steps, rising, strict=True)]
    return {
        "reward": [value + 0.05 * math.sin(step * 7) for step, value in zip(steps, rising, strict=True)],
        "rewards/math/mean": [0.8 * value for value in rising],
        "rewards/format/mean": [0.2 * value + 0.3 for value in rising],
        "eval/accuracy": evaluated,
        "eval/accuracy_low": [None if value is None else value - 0.04 for value in evaluated],
        "eval/accuracy_high": [None if value is None else value + 0.04 for value in evaluated],
        "entropy": [0.9 * math.exp(-step / 60) for step in steps],
        "gen_kl_error": [3e-14 * (1 + step % 3) for step in steps],
        "time/rollout": [0.4 + 0.1 * math.cos(step) for step in steps],
        "time/train": [0.2 + 0.05 * math.sin(step) for step in steps],
    }


def completion(text: str = "The answer is 4.", reward: float = 1.0, **changes: Any) -> CompletionView:
    tokens = changes.pop("tokens", [part + " " for part in text.split(" ")])
    count = len(tokens or [])
    made = CompletionView(
        text=text,
        status="trained",
        finish="stop",
        length=count,
        version=1,
        reward=reward,
        rewards={"math": reward, "format": 0.5},
        advantage=round(reward - 0.5, 3),
        tokens=tokens,
        mask=[0 if at % 7 == 6 else 1 for at in range(count)],
        logp=[-(at % 5) * 0.9 for at in range(count)],
        trainer_logp=[-(at % 5) * 0.9 + 0.02 * (at % 3 - 1) for at in range(count)],
        entropy=[(at % 4) * 0.5 for at in range(count)],
        ratio=[1 + 0.1 * (at % 5 - 2) for at in range(count)],
        clipped=[1 if at % 11 == 10 else 0 for at in range(count)],
    )
    return replace(made, **changes)


def shown(*completions: CompletionView) -> RolloutSelection:
    """The rollouts of one step with one group."""
    return RolloutSelection("", len(completions), [1], [GroupView(1, 0, "0", 0, list(completions))])


def prompt(text: str = "What is 2 + 2?", answer: str | None = "4", task: str = "arithmetic") -> PromptText:
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}]
    return PromptText(task=task, text=f"user: {text}", messages=messages, answer=answer)


def run(name: str = "default", steps: int = 60, **changes: Any) -> RunView:
    numbers = list(range(1, steps + 1))
    groups = [
        GroupView(
            step, 0, str(step % 3), step % 2, [completion(reward=1.0 if (at + step) % 3 else 0.0) for at in range(4)]
        )
        for step in range(1, steps + 1, 5)
    ]
    fell = ("entropy", "The entropy fell below 0.1.", "The policy stopped exploring.", "Raise algorithm.entropy.")
    view = RunView(
        id=name,
        name=name,
        path=f"/runs/{name}",
        label=name,
        group=name,
        state="done",
        total_steps=steps,
        verdict=Verdict("good", "learned", "The reward rose from 0.02 to 0.97.", "the curve of the accuracy"),
        facts=[("model", "tiny"), ("task", "arithmetic"), ("algorithm", "grpo"), ("engine", "transformers")],
        formula=["J(θ) = E[ 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, 1-ε, 1+ε) A) ]", "A_i = (R_i - mean R) / std R"],
        overrides=["algorithm=dapo", "train.steps=60"],
        sessions=[
            ("1-30", "2026-11-24 16:43", "grpocli 0.1.0"),
            ("31-60", "2026-11-24 17:10", "optim.lr: 5e-4 -> 1e-4"),
        ],
        warnings=[RunWarning(31, *fell, "entropy")],
        steps=numbers,
        metrics=metrics_of(numbers),
        rollouts=RolloutSelection("Of 240 completions: every fifth step.", 240, numbers, groups),
    )
    return replace(view, **changes)


def page(*runs: RunView, **changes: Any) -> PageData:
    shown = list(runs) or [run()]
    several = len(shown) > 1
    results = [[one.name, one.metrics["reward"][-1], "0.9 ± 0.02"] for one in shown]
    seeds = ["seed", *map(str, range(len(shown)))]
    data = PageData(
        title="A sweep" if several else shown[0].name,
        made="2026-11-24 17:00",
        version="0.1.0",
        charts=CHARTS,
        runs=shown,
        prompts=[prompt(), prompt("What is 3 + 4?", "7")],
        results=PageTable(["run", "reward", "accuracy"], results) if several else None,
        differences=PageTable(["key", *(one.name for one in shown)], [seeds]) if several else None,
    )
    return replace(data, **changes)


def sweep(groups: int = 2, seeds: int = 3, steps: int = 60) -> PageData:
    numbers, runs = list(range(1, steps + 1)), []
    for name in ("grpo", "dapo", "dr_grpo", "dgpo")[:groups]:
        for seed in range(seeds):
            label, metrics = f"algorithm={name} seed={seed}", metrics_of(numbers, 0.03 * seed + 0.2 * (name == "dapo"))
            runs.append(run(f"run{len(runs)}", steps, label=label, group=f"algorithm={name}", metrics=metrics))
    return page(*runs)
