"""Reward functions in every form that TRL accepts: `reward=[python]`, from a file of rows to scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.rewards.scorer import Scorer
from grpocli.training.collector import rewards_of
from grpocli.types import Completion, Group, Prompt, Rollout

SOURCE = """
import asyncio

class Judge:
    pass

def by_place(completions, /):
    return [1.0] * len(completions)

def brevity(completions, **rest):
    return [1 / len(text) for text in completions]

def polite(prompts, completions, **rest):
    assert all(turns[-1]["role"] == "user" for turns in prompts)
    return ["please" in turns[-1]["content"] for turns in completions]

def names_capital(completions, capital, **rest):
    return [2.0 * (wanted in text) for text, wanted in zip(completions, capital)]

def of_verses(completions, kind, **rest):
    return [text.count("/") if one == "verse" else None for text, one in zip(completions, kind)]

async def slowly(completions, **rest):
    async def count(text):
        await asyncio.sleep(0)
        return len(text)
    return await asyncio.gather(*map(count, completions))

def by_step(completions, trainer_state):
    return [trainer_state.global_step for _ in completions]

def maybe_logs(completions, log_metric=None, log_extra=None, **rest):
    assert log_metric is None is log_extra and "trainer_state" not in rest
    return [0.5 for _ in completions]
"""

PLAIN = [
    {"prompt": "France?", "capital": "Paris", "kind": "fact"},
    {"prompt": "Peru?", "capital": "Lima", "kind": "verse"},
]
CHAT = [{"prompt": [{"role": "user", "content": "A seat?"}]}, {"prompt": [{"role": "user", "content": "Tea?"}]}]


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """scores(rows, texts, overrides): the scores of completions of the first row, and warnings."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)

    def score(rows: Sequence[dict[str, Any]], texts: Sequence[str], *overrides: str) -> tuple[list[float], list[str]]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "held out"}]))
        task = ["task=jsonl", "task.path=rows.jsonl", "task.answer_column=null"]
        run = build_run(compose([*task, *overrides]))
        columns = {k: v for k, v in rows[0].items() if k != "prompt"} | {"task_name": "jsonl"}
        for reward in run.reward.values():
            reward.check(sorted(columns))
        prompt = Prompt("0", [1], rows[0]["prompt"], columns)
        rollouts = [Rollout(prompt, Completion([2, 3], [0.0, 0.0], "stop", 1), text) for text in texts]
        scorer = Scorer(run.reward, 0.0)
        scored, stats = scorer.score(rollouts, 8)
        scorer.check_errors(stats)
        group = Group(prompt, scored)
        weights = {name: reward.weight for name, reward in run.reward.items()}
        summed = run.algorithm.scores(rewards_of([group], list(weights)), weights)
        return summed[0].tolist(), list(scorer.warnings(stats).values())

    return score


def python(name: str) -> list[str]:
    return ["reward=[python]", f"reward.python.function=mine.py:{name}"]


@pytest.mark.parametrize(
    ("rows", "texts", "name", "expected"),
    [
        (PLAIN, ["a", "ab"], "brevity", [1.0, 0.5]),
        (CHAT, ["Yes, please", "No"], "polite", [1.0, 0.0]),
        (PLAIN, ["Paris", "Rome"], "names_capital", [2.0, 0.0]),
        (PLAIN[1:], ["a / b", "a"], "of_verses", [1.0, 0.0]),
        (PLAIN, ["abc", "a"], "slowly", [3.0, 1.0]),
        (PLAIN, ["abc", "a"], "maybe_logs", [0.5, 0.5]),
    ],
)
def test_every_form_of_function_gives_scores(
    scores, rows: Any, texts: list[str], name: str, expected: list[float]
) -> None:
    assert scores(rows, texts, *python(name)) == (expected, [])


@pytest.mark.processes
def test_a_reward_that_does_not_apply_is_not_part_of_the_sum(scores) -> None:
    more = [
        "+reward@reward.capital=python",
        "reward.capital.function=mine.py:names_capital",
        "reward.capital.weight=0.5",
    ]
    verses = ["+reward@reward.verses=python", "reward.verses.function=mine.py:of_verses", "reward.verses.weight=9"]
    found, said = scores(PLAIN, ["Paris", "Rome/"], *python("brevity"), *more, *verses)
    assert found == pytest.approx([1 / 5 + 0.5 * 2, 1 / 5])
    cause = "reward.verses (mine.py:of_verses) returned None for all 2 samples of task jsonl"
    assert said == [f"{cause}: it does not affect their score"]


def test_samples_without_any_reward_give_a_warning(scores) -> None:
    found, said = scores(PLAIN, ["a", "b"], *python("of_verses"))
    assert all(math.isnan(score) for score in found)
    assert said == ["no reward applies to 2 of 2 samples of task jsonl: they give no training signal"]


def test_an_argument_that_only_trl_passes_is_named(scores) -> None:
    said = "needs TRL's argument 'trainer_state', which grpocli does not pass: give it a default, trainer_state=None"
    with pytest.raises(ConfigError, match=said):
        scores(PLAIN, ["a"], *python("by_step"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("by_step", "^reward.by_step.function=.*mine.py:by_step: needs TRL's argument"),
        (
            "by_place",
            "^reward.by_place.function=.*is called with keyword arguments, but 'completions' before `/` is",
        ),
    ],
)
def test_the_error_names_the_key_of_the_function(scores, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scores(PLAIN, ["a"], f"reward=[mine.py:{name}]")


def test_a_class_instead_of_a_function_is_refused(scores) -> None:
    with pytest.raises(
        ConfigError, match=r"is a class; one derived from BaseReward is chosen as reward=\[mine.py:Judge"
    ):
        scores(PLAIN, ["a"], *python("Judge"))
