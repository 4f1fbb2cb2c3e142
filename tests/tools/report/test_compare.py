"""`grpocli compare`: tables of runs, and pictures of their curves."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import check_is_run
from grpocli.runs.sessions import Session, add_session
from grpocli_tools.report.compare_command import main, mean_and_range, smoothed


def run(folder: Path, algorithm: str, seed: int, accuracy: float | None, lr: float = 0.1, **choices: str) -> None:
    (folder / ".hydra").mkdir(parents=True)
    choices |= {"algorithm": algorithm, "task": "arithmetic"}
    (folder / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    config: dict[str, Any] = {"seed": seed, "optim": {"lr": lr}, "algorithm": {"_target_": algorithm, "x": algorithm}}
    (folder / "config.yaml").write_text(json.dumps(config | {"reward": {"math": {"weight": 1}}}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25}\n{"step": 2, "rew')
    if accuracy is not None:
        summary = {"eval/accuracy_before": 0.1, "eval/accuracy": accuracy, "seconds": 3.0, "exit": "done"}
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    run(tmp_path / "0", "grpo", 0, 0.3)
    run(tmp_path / "1", "grpo", 1, 0.5)
    run(tmp_path / "2", "dapo", 0, 0.9)
    run(tmp_path / "3", "dapo", 1, None)
    return tmp_path


def test_a_table_has_the_differing_keys_and_the_results(sweep: Path, grpocli) -> None:
    rows = json.loads(grpocli("compare", str(sweep), "--format", "json", code=0)[1])
    assert [(r["run"], r["algorithm"], r["seed"], r["accuracy"], r["exit"]) for r in rows] == [
        ("2", "dapo", 0, 0.9, "done"),
        ("1", "grpo", 1, 0.5, "done"),
        ("0", "grpo", 0, 0.3, "done"),
        ("3", "dapo", 1, None, "unfinished"),
    ]
    assert rows[0]["change"] == pytest.approx(0.8)
    assert rows[0]["final reward"] == 0.25
    assert "optim.lr" not in rows[0]
    assert "algorithm.x" not in rows[0]


@pytest.mark.parametrize(
    ("key", "values", "comparable"),
    [
        ("eval.problems", (256, 512), False),
        ("task.second", (None, "letter_counting"), False),
        ("task.second.weight", (1, 2), True),
        ("optim.lr", (1, 2), True),
    ],
)
def test_accuracies_over_other_problems_have_no_change(key: str, values, comparable: bool, tmp_path, grpocli) -> None:
    run(tmp_path / "one", "grpo", 0, 0.3)
    for step, changes in ((0, {}), (10, {key: values})):
        add_session(RunDir(tmp_path / "one"), Session(step, "day", {}, changes))
    row = json.loads(grpocli("compare", str(tmp_path), "--format", "json")[1])[0]
    assert row["change"] == (pytest.approx(0.2) if comparable else None)
    assert (row["before"], row["accuracy"]) == (0.1, 0.3)
    said = "one has no change: before and after are of different evaluations: "
    assert (f"{said}{key} " in grpocli("compare", str(tmp_path))[1]) is not comparable


def test_repetitions_with_other_seeds_are_averaged(sweep: Path, grpocli) -> None:
    _, out, _ = grpocli("compare", str(sweep), "--format", "markdown")
    assert "| grpo | 2 | 0.100 ± 0.000 | 0.400 ± 1.271 | 0.300 ± 1.271 |" in out
    assert out.endswith("final reward: the mean over the last 10 steps\n")


def test_a_folder_that_is_not_a_run_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--run a: there is no such folder; give the folder of a run$"):
        check_is_run(Path("a"), "--run a")
    for age, name in enumerate(["day/late", "day/early", "other/one"]):
        folder = tmp_path / "runs" / name
        (folder / "model").mkdir(parents=True)
        (folder / "config.yaml").touch()
        (folder / "metrics.jsonl").touch()
        os.utime(folder, (0, 9 - age))
    check_is_run(Path("runs/day/late"), "")
    for given, said in {
        "runs/day/lat": 'there is no such folder; did you mean "runs/day/late"?',
        "late": 'there is no such folder; did you mean "runs/day/late"?',
        "xyz": "there is no such folder; the newest run is runs/day/late",
        "runs/other": 'there is no config.yaml in it; did you mean "runs/other/one"?',
        "runs/day/early/model": 'there is no config.yaml in it; did you mean "runs/day/early"?',
    }.items():
        with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
            check_is_run(Path(given), "")


def test_typed_keys_are_shown_beside_a_choice_that_differs(tmp_path: Path, grpocli) -> None:
    for i, (name, part) in enumerate([("grpo", "k3"), ("dapo", "none")]):
        for beta in (0.1, 0.2):
            folder, kl = tmp_path / f"{name}{beta}", {"beta": beta} | ({"sync_every": 0} if part == "k3" else {})
            run(folder, name, 0, 0.5, i, **{"algorithm/kl": part})
            config = json.loads((folder / "config.yaml").read_text())
            config["overrides"] = [f"algorithm={name}", f"+algorithm.kl.beta={beta}", f"optim.lr={i}"]
            (folder / "config.yaml").write_text(json.dumps(config | {"algorithm": {"kl": kl, "high": i}}))
    assert grpocli("compare", str(tmp_path), "--format", "csv")[1].startswith("run,algorithm,lr,kl.beta,steps,")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.yaml", "a: [1, 2", "unreadable: config.yaml is broken"),
        ("config.yaml", "a: !!timestamp x", "unreadable: config.yaml is broken"),
        ("config.yaml", "a: " + "9" * 5000, "unreadable: config.yaml is broken"),
        ("config.yaml", "- a list", "unreadable: config.yaml is broken"),
        ("summary.json", '{"exit": "do', "unreadable: RUN="),
        ("metrics.jsonl", '{"step": 1}\noops\n{"step": 3}\n', "unreadable: "),
        ("metrics.jsonl", '{"step": 1, "reward": "high"}\n', "done"),
        ("metrics.jsonl", '{"step": 1, "reward": NaN}\n', "done"),
        ("metrics.jsonl", f'{{"step": 1, "reward": {"9" * 4000}}}\n', "done"),
        ("summary.json", '{"exit": "done", "eval/accuracy_before": "low", "eval/accuracy": [1]}', "done"),
        ("summary.json", '{"exit": "done", "eval/accuracy": 1e999, "seconds": {"a": 1}}', "done"),
        ("summary.json", f'{{"exit": "done", "eval/accuracy": {"9" * 4000}}}', "done"),
    ],
    ids=range(12),
)
def test_a_broken_run_has_a_row_without_what_is_no_number(file: str, text: str, said: str, sweep, grpocli) -> None:
    (sweep / "0" / file).write_text(text)
    (sweep / "4" / ".hydra").mkdir(parents=True)
    (sweep / "4" / ".hydra" / "overrides.yaml").write_text("- algorithm=drgrpo")
    first, *others = json.loads(grpocli("compare", str(sweep), "--format", "json", "--sort", "path")[1])
    assert first["exit"].startswith(said)
    assert [row["exit"] for row in others] == ["done", "done", "unfinished", "not started"]
    missing = {"metrics.jsonl": ("final reward",), "summary.json": ("accuracy", "change")}.get(file, ())
    assert [first[name] for name in missing] == [None] * len(missing)


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize("style", ["table", "markdown", "csv", "json"])
def test_escape_sequences_of_a_run_never_reach_the_terminal(style: str, sweep: Path, grpocli) -> None:
    for i in (0, 1):
        file = sweep / str(i) / "config.yaml"
        config = json.loads(file.read_text()) | {f"{ESCAPE}key": f"{ESCAPE}{i}", "task": {"split": i}}
        file.write_text(json.dumps(config | {"overrides": [f"{ESCAPE}key={i}"]}))
    (sweep / "2" / "summary.json").write_text(json.dumps({"exit": f"RunError: {ESCAPE}"}))
    (sweep / "3").rename(sweep / f"{ESCAPE}3".replace("/", ""))
    changes = {f"task.{ESCAPE}": (f"{ESCAPE}0", ESCAPE)}
    add_session(RunDir(sweep / "1"), Session(0, "", {}, changes))
    _, out, _ = grpocli("compare", str(sweep), "--format", style)
    assert "key" in out
    assert not set(out) & {"\x1b", "\x07"}


SUFFIXES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def two_rates(tmp_path: Path) -> Path:
    """Two learning rates with two seeds; only the second learning rate has the metric `extra`."""
    for number, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]):
        folder = tmp_path / "sweep" / str(number)
        run(folder, "grpo", seed, 0.75, lr)
        extra = {"extra_$x$": 0.5} if lr > 0.1 else {}
        lines = [json.dumps({"step": step, "reward": lr * step + seed, **extra}) for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "sweep"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_curves_give_the_same_picture(two_rates: Path, tmp_path: Path, suffix: str) -> None:
    pictures = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for picture in pictures:
        assert main([str(two_rates), "--plot", str(picture), "--metric", "reward,eval/accuracy"]) == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first.startswith(SUFFIXES[suffix])
    assert first == second


def test_a_picture_names_runs_metrics_and_the_band(two_rates: Path, tmp_path: Path, capsys) -> None:
    assert main([str(two_rates), "--plot", str(tmp_path / "p.svg"), "--metric", "reward,extra_$x$"]) == 0
    found = ET.parse(tmp_path / "p.svg").iter("{http://www.w3.org/2000/svg}text")
    texts = {"".join(text.itertext()).strip() for text in found}
    assert {"step", "reward", "extra_$x$", "lr=0.1", "lr=0.2", "mean of 2 seeds; band: minimum to maximum"} <= texts
    assert "without extra_$x$: 0, 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--plot", "p.odt"], "--plot=p.odt: "),
        (["--plot", "p.png", "--metric", "rewad"], 'no run has this metric; did you mean "reward"?'),
        (["--plot", "p.png", "--smoothing", "1"], "--smoothing=1.0: must be 0 (none) to below 1"),
        (["--plot", "folder.png"], "--plot=folder.png: "),
    ],
)
def test_wrong_options_are_one_sentence(two_rates: Path, options, problem: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError) as error:
        main([str(two_rates), *options])
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_smoothing_has_no_bias_at_the_start() -> None:
    constant = [(step, 2.0) for step in range(1, 21)]
    assert smoothed(constant, 0.9) == [(step, pytest.approx(2)) for step, _ in constant]
    rising = [(step, float(step)) for step in range(1, 21)]
    assert smoothed(rising, 0.5)[:2] == [(1, 1.0), (2, pytest.approx((0.25 * 1 + 0.5 * 2) / 0.75))]


@pytest.mark.browser
def test_the_page_smooths_and_averages_as_the_picture(chromium: Any) -> None:
    """Two seeds, the second of which ends early and has a gap; and too few values to smooth."""
    page = files("grpocli_tools.report").joinpath("page")
    is_number = next(line for line in (page / "dom.js").read_text().splitlines() if line.startswith("const isNumber"))
    code = f"{is_number}\n{(page / 'series.js').read_text()}\nconst lines = arguments[0].map((one) => smooth(one, 0.6))"
    for steps in (40, 19):
        seeds = [
            [math.sin(step) for step in range(steps)],
            [None if step == 7 or step > steps - 5 else math.cos(step) for step in range(steps)],
        ]
        found = chromium.execute_script(f"{code};\nreturn meanAndBand(lines, 'range')", seeds)
        pairs = [[(step, value) for step, value in enumerate(seed) if value is not None] for seed in seeds]
        expected = mean_and_range([smoothed(pair, 0.6) for pair in pairs])
        shown = [(step, *(found[name][step] for name in ("mean", "low", "high"))) for step in range(steps)]
        assert shown == [pytest.approx(point) for point in expected]
