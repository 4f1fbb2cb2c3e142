"""The data of `grpocli report`: what the run folders say, broken and half-written ones included."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from report.large_run import write_large_run

from grpocli.errors import ConfigError
from grpocli.launch.compose import compose
from grpocli.report.build import Builder
from grpocli.report.charts import charts
from grpocli.report.curves import accuracy_interval, read_curves, thinned
from grpocli.report.diagnosis import RULES, verdict, warnings
from grpocli.report.html import page_json
from grpocli.report.rollout_sample import BUDGET, LONGEST, cut
from grpocli.tracking.runs import flatten
from grpocli.training.accuracy import interval, pass_at_k


def run_folder(path: Path, lines: list[str], config: str = "seed: 0\ntrain:\n  steps: 4\n") -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def row(step: int, **metrics: float | None) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def builder() -> Builder:
    return Builder(formula=lambda run: ["L"])


def test_curves_are_the_numbers_of_metrics_jsonl_and_broken_lines_are_noted(tmp_path: Path) -> None:
    lines = [row(1, reward=0.1), "garbage\n", row(2, reward=0.30000000000000004, kl=None), '{"step": 3, "rew']
    curves = read_curves(run_folder(tmp_path / "run", lines))
    assert (curves.steps, curves.metrics["reward"]) == ([1, 2], [0.1, 0.30000000000000004])
    assert curves.not_finite == {"kl": [2]}
    assert curves.notes == [
        "metrics.jsonl: line 4 is incomplete and left out",
        "metrics.jsonl: 1 broken lines are left out (2)",
    ]


def test_thinning_keeps_rows_as_they_are_and_the_extremes(tmp_path: Path) -> None:
    lines = [row(step, reward=math.sin(step), odd=float(step == 777)) for step in range(1, 5001)]
    curves = read_curves(run_folder(tmp_path / "run", lines))
    drawn, rule = thinned(curves, 200, [4321])
    assert len(drawn.steps) < 400
    assert {1, 777, 4321, 5000} <= set(drawn.steps)
    assert drawn.metrics["reward"] == [math.sin(step) for step in drawn.steps]
    assert "of 5,000 steps" in rule


def test_every_metric_stands_in_a_chart() -> None:
    names = {"reward", "rewards/math/mean", "eval/accuracy", "eval/accuracy (low)", "mine", "time/rollout"}
    shown = {line.metric for chart in charts(names) for line in chart.lines}
    assert shown == names - {"eval/accuracy (low)"}


def test_the_interval_is_that_of_grpocli_eval() -> None:
    right = [0, 1, 4, 4, 2, 3, 0, 4, 1, 1]
    accuracy = sum(right) / 40
    pass_2 = sum(pass_at_k(count, 4, 2) for count in right) / 10
    assert accuracy_interval(accuracy, 10, 4, pass_2) == pytest.approx(interval([count / 4 for count in right]))


def test_texts_say_how_much_is_missing() -> None:
    assert cut("a" * LONGEST) == "a" * LONGEST
    assert cut("a" * (LONGEST + 1234)).endswith("a … (1,234 more characters)")


def test_a_run_without_a_step_a_broken_one_and_a_torn_parquet_file_have_a_page(tmp_path: Path) -> None:
    run_folder(tmp_path / "empty", [])
    broken = run_folder(tmp_path / "broken", [row(1, reward=0.0)], "a: [")
    (broken / "summary.json").write_text("{")
    (broken / "rollouts").mkdir()
    (broken / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    page = builder().page([tmp_path])
    assert [run.name for run in page.runs] == ["broken", "empty"]
    assert {"broken: config.yaml is broken", "broken: summary.json is broken"} <= set(page.notes)
    assert "broken: rollouts/step_000001.parquet is broken or no rollout file, and left out" in page.notes
    assert page.runs[1].verdict.text == "The run has no step yet."


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run below"):
        builder().page([tmp_path])


@pytest.mark.parametrize(
    ("metric", "values", "kind"),
    [
        ("entropy", [1.0] * 10 + [0.001] * 20, "entropy collapse"),
        ("entropy", [1.0] * 10 + [5.0] * 20, "entropy explosion"),
        ("frac_reward_zero_std", [1.0] * 20, "no spread"),
        ("completions/clipped_ratio", [0.9] * 20, "truncation"),
        ("token_mult_prob_error", [1.5] * 20, "mismatch"),
        ("kl", [0.1] * 10 + [4.0] * 20, "KL"),
        ("completions/mean_length", [100.0] * 10 + [900.0] * 20, "length growth"),
        ("grad_norm", [1.0, 1.1] * 10 + [90.0], "gradient spike"),
        ("rewards/math/errors", [0.0, 2.0], "reward errors"),
        ("sampling/stale", [0.0, 2.0], "staleness"),
        ("reward", [1.0, 0.9] * 10 + [0.1, 0.0] * 10, "reward falls"),
        ("completions/mean_length", [100.0] * 10 + [5.0] * 20, "length collapse"),
    ],
)
def test_numbers_that_look_wrong_are_warned_of(tmp_path: Path, metric: str, values: list[float], kind: str) -> None:
    lines = [row(step, **{metric: value}) for step, value in enumerate(values, start=1)]
    assert [warning.kind for warning in warnings(read_curves(run_folder(tmp_path / "run", lines)), {})] == [kind]


def test_the_verdict_needs_a_change_beyond_the_noise(tmp_path: Path) -> None:
    def level(name: str, rewards: list[float]) -> str:
        lines = [row(step, reward=value) for step, value in enumerate(rewards, start=1)]
        return verdict(read_curves(run_folder(tmp_path / name, lines)), "done", []).level

    noise = [0.1 * math.sin(7 * step) for step in range(60)]
    assert level("flat", noise) == "unclear"
    assert level("up", [value + step / 60 for step, value in enumerate(noise)]) == "good"
    assert level("down", [value - step / 60 for step, value in enumerate(noise)]) == "bad"
    assert level("short", [0.0, 1.0, 2.0]) == "unclear"


def test_advice_names_keys_and_choices_that_exist() -> None:
    keys, conf = flatten(OmegaConf.to_container(compose([]))), Path("conf")
    named = {
        word.rstrip(".,") for rule in RULES for word in rule.advice.split() if "." in word.rstrip(".,") or "/" in word
    }
    assert {"optim.lr", "algorithm/keep=dynamic"} <= named
    for word in named:
        group, _, choice = word.partition("=")
        assert group in keys or (conf / group / f"{choice}.yaml").is_file(), word


@pytest.mark.slow
def test_a_large_run_stays_within_the_budget(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "large", steps=400)
    (view,) = builder().page([run]).runs
    shown = [len(group.completions) for group in view.rollouts.groups]
    assert view.rollouts.total == 100_000
    assert 1_000 < sum(shown) < 20_000
    assert len(page_json(view.rollouts)) < 1.2 * BUDGET
    steps = {group.step for group in view.rollouts.groups}
    assert {1, 400} <= steps
    assert len(steps) > 100
    prompts = Counter(group.prompt for group in view.rollouts.groups if 10 < group.step < 390)
    assert max(prompts.values()) >= 2, "no prompt is followed through the steps"
    assert f"{sum(shown):,} of 100,000 completions" in view.rollouts.rule
