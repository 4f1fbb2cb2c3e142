"""The data of `grpocli report`: what the run folders say, broken and half-written ones included."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from grpocli.composition.compose import compose
from grpocli.config.yaml_text import flat
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import Session, add_session
from grpocli_tools.evaluation.significance import interval, wilson
from grpocli_tools.report.build_page import Builder, charts
from grpocli_tools.report.diagnosis import BLOCKS, NOISE, RULES, WINDOW, texts, verdict, warnings
from grpocli_tools.report.page_data import Curves, PageData, thinned, with_intervals
from grpocli_tools.report.report_page import page_json
from grpocli_tools.report.rollout_sample import BUDGET, Prompts, RolloutSample


def run_folder(path: Path, lines: list[str], config: str = "seed: 0\ntrain:\n  steps: 4\n") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def row(step: int, **metrics: Any) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def write_large_run(run: Path, steps: int = 2000, groups: int = 25, size: int = 10, tokens: int = 40) -> Path:
    """A run folder with metrics and rollouts; a step's prompts are drawn from 5,000."""
    (run / "rollouts").mkdir(parents=True)
    draw, rows = random.Random(0), groups * size
    floats = pa.list_(pa.float32())
    ids = pa.array(np.ones((rows, tokens), np.int32).tolist(), pa.list_(pa.int32()))
    values = pa.array(np.full((rows, tokens), -0.123456, np.float32).tolist(), floats)
    lines = []
    for step in range(1, steps + 1):
        prompts = [draw.randrange(5000) for _ in range(groups)]
        metrics = {"reward": draw.random(), "entropy": 1.0} | {f"mine/{i}": draw.random() for i in range(60)}
        lines.append(row(step, **metrics))
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
    return run_folder(run, lines, f"train: {{steps: {steps}}}\n")


def read_curves(run: Path) -> Curves:
    return Curves.of(SavedRun(run).metrics)


def built(*folders: Path) -> PageData:
    return Builder(formula=lambda run: ["L"]).page(folders)


def test_thinning_keeps_rows_as_they_are_and_the_extremes(tmp_path: Path) -> None:
    lines = [row(step, reward=math.sin(step), odd=float(step == 777)) for step in range(1, 5001)]
    curves = read_curves(run_folder(tmp_path / "run", lines))
    shorter = Curves(curves.steps[:3000], {name: values[:3000] for name, values in curves.metrics.items()})
    (drawn, other), rule = thinned([curves, shorter], 200, [4321])
    assert [step for step in drawn.steps if step <= 3000] == other.steps, "a mean over seeds is over all of them"
    assert len(drawn.steps) < 400
    assert {1, 777, 4321, 5000} <= set(drawn.steps)
    assert drawn.metrics["reward"] == [math.sin(step) for step in drawn.steps]
    assert "of 5,000 steps" in rule


def test_every_metric_stands_in_a_chart() -> None:
    names = {"reward", "rewards/math/mean", "eval/accuracy", "eval/accuracy (low)", "mine", "time/rollout"}
    shown = {line.metric for chart in charts(names) for line in chart.lines}
    assert shown == names - {"eval/accuracy (low)"}


def test_the_interval_is_that_of_grpocli_eval() -> None:
    shares = {str(i): count / 4 for i, count in enumerate([0, 1, 4, 4, 2, 3, 0, 4, 1, 1])}
    series = {"eval/accuracy": [0.5, 0.5], "eval/problems": [10, 10]}
    found = with_intervals(Curves([1, 2], series, by_problem={"eval/accuracy": {1: shares}})).metrics
    ends = zip(found["eval/accuracy (low)"], found["eval/accuracy (high)"], strict=True)
    assert list(ends) == [interval([*shares.values()]), wilson(0.5, 10)]


NUMBERS: list[tuple[list[str], dict[str, list[float]], dict[str, str]]] = [
    (["entropy collapse"], {"entropy": [1.0] * 10 + [0.001] * 20}, {}),
    (["entropy explosion"], {"entropy": [1.0] * 10 + [5.0] * 20}, {}),
    (["no spread"], {"frac_reward_zero_std": [1.0] * 20}, {}),
    (["truncation"], {"completions/clipped_ratio": [0.9] * 20}, {}),
    (["mismatch"], {"token_mult_prob_error": [1.5] * 20}, {}),
    (["KL"], {"kl": [0.1] * 10 + [4.0] * 20}, {}),
    (["overflow"], {"optim/skipped_updates": [0.0] * 10 + [1.0] * 20}, {}),
    (["length growth"], {"completions/mean_length": [100.0] * 10 + [900.0] * 20}, {}),
    (["length collapse"], {"completions/mean_length": [100.0] * 10 + [5.0] * 20}, {}),
    (["gradient spike"], {"grad_norm": [1.0, 1.1] * 10 + [90.0]}, {}),
    (["reward errors"], {"rewards/math/errors": [0.0, 2.0]}, {}),
    (["reward falls"], {"reward": [1.0, 0.9] * 10 + [0.1, 0.0] * 10}, {}),
    # just inside of a limit
    ([], {"frac_reward_zero_std": [0.4] * 30, "entropy": [1.0] * 10 + [0.001] * 20}, {}),
    ([], {"entropy": [1.0] * 10 + [0.0201] * 20}, {}),
    ([], {"entropy": [0.1] * 10 + [0.0101] * 20}, {}),
    ([], {"entropy": [1.0] * 10 + [2.99] * 20}, {}),
    ([], {"entropy": [0.1] * 10 + [0.599] * 20}, {}),
    ([], {"frac_reward_zero_std": [0.9] * 20}, {}),
    ([], {"completions/clipped_ratio": [0.5] * 20}, {}),
    ([], {"token_mult_prob_error": [1.1] * 20}, {}),
    ([], {"token_mult_prob_error": [1.02] * 20}, {"model.dtype": "float32"}),
    ([], {"token_mult_prob_error": [1.0] * 6 + [1.5] * 3}, {}),
    ([], {"kl": [1.0] * 20}, {}),
    ([], {"kl": [4.0] * (WINDOW - 1)}, {}),
    ([], {"clip_ratio/region_mean": [0.3] * 20}, {}),
    ([], {"completions/mean_length": [100.0] * 10 + [300.0] * 20}, {}),
    ([], {"completions/mean_length": [10.0] * 10 + [74.0] * 20}, {}),
    ([], {"completions/mean_length": [30.0] * 10 + [10.01] * 20}, {}),
    ([], {"completions/mean_length": [15.9] * 10 + [1.0] * 20}, {}),
    ([], {"sampling/acceptance": [0.2] * 20}, {}),
    ([], {"grad_norm": [1.0] * 20 + [20.0]}, {}),
    ([], {"grad_norm": [1.0] * 18 + [90.0]}, {}),
    ([], {"rewards/math/errors": [0.0] * 20}, {}),
    ([], {"time/step": [2.0] * 10, "time/eval": [1.0] * 10}, {}),
]


@pytest.mark.parametrize(("kinds", "series", "config"), NUMBERS)
def test_numbers_outside_of_a_limit_are_warned_of(tmp_path: Path, kinds: list[str], series: Any, config: Any) -> None:
    assert [warning.kind for warning in warnings(lines_of(tmp_path, **series), config)] == kinds


@pytest.mark.parametrize(("last", "word"), [(NOISE * 1.01, "reward rose"), (NOISE * 0.99, "unclear")])
def test_the_reward_must_change_by_the_quantile_of_students_t(tmp_path: Path, last: float, word: str) -> None:
    """Blocks of two steps have the means -1, -0.5, 0, 0.5, 1, whose standard error is the square root of 0.125."""
    block = [value for mean in (-1.0, -0.5, 0.0, 0.5, 1.0) for value in (mean - 9, mean + 9)]
    error = math.sqrt(0.625 / BLOCKS)
    rewards = block + [0.0] * 80 + [last * error * math.sqrt(2) + value for value in block]
    found = verdict(lines_of(tmp_path, reward=rewards), "done", [])
    assert found.word == word
    assert f"± {error:.3f} in the first 10 steps" in found.text


LOSSES = {"token_accuracy": [0.1] * 40, "loss": [3.0 - step / 20 + 0.1 * math.sin(7 * step) for step in range(40)]}


@pytest.mark.parametrize(
    ("metrics", "after", "word", "text"),
    [
        ({}, None, "loss fell", "The loss on the answers it learns fell from 2."),
        ({"loss": [2.0] * 40}, None, "unclear", "No clear change: the loss on the answers it learns went from 2.000"),
        ({"loss": [3.0, 2.0]}, None, "unclear", "2 steps are too few"),
        ({}, 2.5, "loss rose", "The loss on held-out answers rose from 2.000 at step 1 to 2.500 at step 40, p < 0.001"),
        ({}, 2.0, "unclear", "No clear change: the loss on held-out answers went from 2.000 at step 1 to 2.000"),
    ],
)
def test_held_out_answers_decide_on_supervised_runs(metrics: Any, after: float | None, word: str, text: str) -> None:
    values: Any = LOSSES | metrics
    steps = list(range(1, len(values["loss"]) + 1))
    paired = {}
    if after is not None:
        values["eval/loss"] = [2.0, *[None] * 38, after]
        paired["eval/loss"] = {step: dict.fromkeys(map(str, range(32)), loss) for step, loss in ((1, 2.0), (40, after))}
    values["token_accuracy"] = values["token_accuracy"][: len(steps)]
    found = verdict(Curves(steps, values, by_problem=paired), "done", [])
    assert found.word == word
    assert found.text.startswith(text)
    assert found.level == {"loss fell": "good", "loss rose": "bad", "unclear": "unclear"}[word]


@pytest.mark.parametrize(
    ("key", "learned"),
    [
        ("rollout.max_completion_tokens", False),
        ("model.chat_template", False),
        ("reward.math.right", False),
        ("reward", False),
        ("eval.reward", False),
        ("task.path", False),
        ("reward.format.right", True),
        ("reward.math.weight", True),
        ("task.order", True),
        ("optim.lr", True),
    ],
)
def test_an_evaluation_that_a_resume_changed_is_not_compared(tmp_path: Path, key: str, learned: bool) -> None:
    accuracies = {10: 0.1, 20: 0.2, 30: 0.2, 40: 0.9}
    lines = [row(i, reward=0.5, **{"eval/problems": 40, "eval/accuracy": share}) for i, share in accuracies.items()]
    run = run_folder(tmp_path / "run", lines, "reward: {math: {}, format: {}}\neval: {samples: 4}\n")
    for step, changes in ((0, {}), (30, {key: (1, 2)})):
        add_session(RunDir(run), Session.now(step, changes))
    text = built(run).runs[0].verdict.text
    assert text.startswith("It learned") == learned
    assert (f"changed {key} 1 -> 2" in text) == (not learned)


def test_a_clear_change_of_the_same_problems_is_found(tmp_path: Path) -> None:
    """The intervals of 0.45 and 0.65 overlap; each problem is solved once more of four times."""
    before = {f"{i}": (i % 4) / 4 for i in range(32)}
    after = {name: value + 0.2 for name, value in before.items()}
    lines = [
        row(step, **{"eval/problems": 32, "eval/accuracy": accuracy, "eval/accuracy_by_problem": by_problem})
        for step, accuracy, by_problem in ((1, 0.45, before), (2, 0.65, after))
    ]
    found = built(run_folder(tmp_path / "run", lines, "eval: {samples: 4}\n")).runs[0].verdict
    assert found.word == "learned"
    assert "p < 0.001, paired test over 32 problems" in found.text


def test_advice_names_keys_and_choices_that_exist() -> None:
    keys, conf = flat(OmegaConf.to_container(compose([]))), Path(__file__).parents[3] / "conf"
    advices = [text["advice"] for text in texts().values()]
    words = {word.rstrip(".,") for advice in advices for word in advice.split()}
    named = {word for word in words if "." in word or "/" in word or "=" in word}
    assert {"optim.lr", "algorithm/keep=dynamic", "sync=nccl", "model.dtype=float32"} <= named
    for word in named:
        group, _, choice = word.partition("=")
        assert group in keys or (conf / group / f"{choice}.yaml").is_file(), word
        if choice:
            compose([word])


@pytest.mark.survival
def test_a_large_run_stays_within_the_budget(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "large", steps=400)
    (view,) = built(run).runs
    shown = [len(group.completions) for group in view.rollouts.groups]
    assert view.rollouts.total == 100_000
    assert 1_000 < sum(shown) < 20_000
    assert len(page_json(view.rollouts)) < 1.2 * BUDGET
    steps = {group.step for group in view.rollouts.groups}
    assert {1, 400} <= steps
    assert len(steps) > 20
    assert f"{sum(shown):,} of 100,000 completions" in view.rollouts.rule


def lines_of(tmp_path: Path, **series: list[float]) -> Curves:
    count = max(map(len, series.values()))
    lines = [row(i + 1, **{name: values[i] for name, values in series.items()}) for i in range(count)]
    return read_curves(run_folder(tmp_path / "run", lines))


EXACT = {"reward.exact_match.right": 1.0, "reward.exact_match.weight": 2.0, "reward.overlong.buffer_tokens": None}


def test_a_step_that_does_not_fit_shows_its_first_groups(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "large", steps=1, groups=12)
    sample = RolloutSample(SavedRun(run), Prompts(), None, most=30)
    assert [group.group for group in sample.step_groups(1)] == [0, 1, 2]


def test_a_solved_task_is_no_alarm(tmp_path: Path) -> None:
    solved = lines_of(tmp_path, frac_reward_zero_std=[1.0] * 20, reward=[1.96] * 20, entropy=[1.0] * 5 + [0.001] * 15)
    assert [warning.kind for warning in warnings(solved, EXACT)] == ["solved"]
    assert verdict(solved, "done", warnings(solved, EXACT)).look == "the completions of the last step."
    alarms = [warning.kind for warning in warnings(solved, {"reward.math.right": 3.0})]
    assert alarms == ["no spread", "entropy collapse"]


def test_a_hundred_runs_are_in_natural_order_groups_first(tmp_path: Path) -> None:
    for number in range(100):
        config = f"seed: {number % 2}\noptim:\n  lr: {1 + number // 2}\ntrain:\n  steps: 1\n"
        run_folder(tmp_path / f"run{number}", [row(1, reward=0.5)], config)
    page = built(tmp_path)
    assert [run.name for run in page.runs] == [f"run{number}" for number in range(100)]
    assert [line[0] for line in page.results.rows[:2]] == ["lr=1 (mean)", "lr=2 (mean)"]
    assert [line[0] for line in page.results.rows[50:52]] == ["lr=1, seed=0", "lr=1, seed=1"]
    assert page.differences.header == ["run", "optim.lr", "seed"]
    assert page.differences.rows[18] == ["run18", "10", "0"]


def test_a_damaged_run_and_one_without_a_step_have_a_page_that_names_what_is_broken(tmp_path: Path) -> None:
    run_folder(tmp_path / "empty", [])
    broken = run_folder(tmp_path / "broken", [row(1, reward=0.0)], "a: [")
    (broken / "summary.json").write_text("{")
    (broken / "rollouts").mkdir()
    (broken / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    page = built(tmp_path)
    assert [run.name for run in page.runs] == ["broken", "empty"]
    assert set(page.notes) == {
        "broken: config.yaml is broken",
        "broken: summary.json is broken",
        "broken: rollouts/step_000001.parquet is broken or not a rollout file, and is left out",
    }
    assert page.runs[1].verdict.text == "The run has no step yet."


def test_the_documented_limits_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    table = dict(re.findall(r"^\| ([\w ,()]+) \| (.*) \|$", text, re.MULTILINE))
    kinds = {name for kind in table for name in kind.removesuffix(" (no alarm)").split(", ")}
    assert {"slow stage" if kind.startswith("slow ") else kind for kind in texts()} <= kinds
    for rule in RULES:
        if rule.limit(1.0, {}) == rule.limit(100.0, {}):
            assert f"{'below' if rule.below else 'above'} {rule.limit(1.0, {}):g}" in table[rule.kind]
    assert f"more than {NOISE:g} standard errors" in text


def test_curves_are_the_numbers_of_metrics_jsonl_and_broken_lines_are_noted(tmp_path: Path) -> None:
    lines = [row(1, reward=0.1), "garbage\n", row(2, reward=0.30000000000000004, kl=None), '{"step": 3, "rew']
    curves = read_curves(run_folder(tmp_path / "run", lines))
    assert (curves.steps, curves.metrics["reward"]) == ([1, 2], [0.1, 0.30000000000000004])
    assert curves.not_finite == {"kl": [2]}


@pytest.mark.parametrize("keys", ["order: difficulty", "order: file"])
def test_rewards_of_easier_and_harder_problems_are_not_compared(tmp_path: Path, keys: str) -> None:
    lines = [row(step, reward=1 - step / 40) for step in range(1, 41)]
    harder = built(run_folder(tmp_path / "harder", lines, f"task: {{{keys}}}\n")).runs[0]
    assert (harder.verdict.word, harder.warnings) == ("unclear", [])
    assert keys.replace(": ", "=") in harder.verdict.text
    fell = built(run_folder(tmp_path / "fell", lines, "task: {order: shuffled}\n")).runs[0]
    assert (fell.verdict.word, fell.warnings[0].kind) == ("reward fell", "reward falls")
