"""`grpocli compare`: tables of runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import check_is_run
from grpocli.runs.sessions import Session, add_session
from grpocli_tools.report.compare_command import main


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
    for i, (algorithm, seed, accuracy) in enumerate(
        [("grpo", 0, 0.3), ("grpo", 1, 0.5), ("dapo", 0, 0.9), ("dapo", 1, None)]
    ):
        run(tmp_path / str(i), algorithm, seed, accuracy)
    return tmp_path


def test_a_table_has_the_differing_keys_and_the_results(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
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
def test_accuracies_over_different_problems_have_no_change(
    key: str, values: tuple[Any, Any], comparable: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "one", "grpo", 0, 0.3)
    for step, changes in ((0, {}), (10, {key: values})):
        add_session(RunDir(tmp_path / "one"), Session(step, "day", {}, changes))
    main([str(tmp_path), "--format", "json"])
    row = json.loads(capsys.readouterr().out)[0]
    assert row["change"] == (pytest.approx(0.2) if comparable else None)
    assert (row["before"], row["accuracy"]) == (0.1, 0.3)
    main([str(tmp_path)])
    said = "one has no change: before and after are of different evaluations: "
    assert (f"{said}{key} " in capsys.readouterr().out) is not comparable


def test_repetitions_with_other_seeds_are_averaged(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--format", "markdown"])
    out = capsys.readouterr().out
    assert "| grpo | 2 | 0.100 ± 0.000 | 0.400 ± 1.271 | 0.300 ± 1.271 |" in out
    assert out.endswith("final reward: the mean over the last 10 steps\n")


def test_a_folder_without_runs_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run below"):
        main([str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no such folder"):
        main([str(tmp_path / "missing")])


def test_a_folder_that_is_not_a_run_gets_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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


def columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    main([str(folder), "--format", "csv"])
    header = capsys.readouterr().out.splitlines()[0].split(",")
    return header[1 : header.index("steps")]


def test_typed_keys_are_shown_beside_a_choice_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, (name, part) in enumerate([("grpo", "k3"), ("dapo", "none")]):
        for beta in (0.1, 0.2):
            folder, kl = tmp_path / f"{name}{beta}", {"beta": beta} | ({"sync_every": 0} if part == "k3" else {})
            run(folder, name, 0, 0.5, i, **{"algorithm/kl": part})
            config = json.loads((folder / "config.yaml").read_text())
            config["overrides"] = [f"algorithm={name}", f"+algorithm.kl.beta={beta}", f"optim.lr={i}"]
            (folder / "config.yaml").write_text(json.dumps(config | {"algorithm": {"kl": kl, "high": i}}))
    assert columns(tmp_path, capsys) == ["algorithm", "lr", "kl.beta"]


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
def test_a_broken_run_has_a_row_and_what_is_no_number_is_missing(
    file: str, text: str, said: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "0" / file).write_text(text)
    (sweep / "4" / ".hydra").mkdir(parents=True)
    (sweep / "4" / ".hydra" / "overrides.yaml").write_text("- algorithm=drgrpo")
    main([str(sweep), "--format", "json", "--sort", "path"])
    first, *others = json.loads(capsys.readouterr().out)
    assert first["exit"].startswith(said)
    assert [row["exit"] for row in others] == ["done", "done", "unfinished", "not started"]
    missing = {"metrics.jsonl": ("final reward",), "summary.json": ("accuracy", "change")}.get(file, ())
    assert [first[name] for name in missing] == [None] * len(missing)


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize("style", ["table", "markdown", "csv", "json"])
def test_escape_sequences_of_a_run_never_reach_the_terminal(
    style: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in (0, 1):
        file = sweep / str(i) / "config.yaml"
        config = json.loads(file.read_text()) | {f"{ESCAPE}key": f"{ESCAPE}{i}", "task": {"split": i}}
        file.write_text(json.dumps(config | {"overrides": [f"{ESCAPE}key={i}"]}))
    (sweep / "2" / "summary.json").write_text(json.dumps({"exit": f"RunError: {ESCAPE}"}))
    (sweep / "3").rename(sweep / f"{ESCAPE}3".replace("/", ""))
    changes = {f"task.{ESCAPE}": (f"{ESCAPE}0", ESCAPE)}
    add_session(RunDir(sweep / "1"), Session(0, "", {}, changes))
    main([str(sweep), "--format", style])
    out = capsys.readouterr().out
    assert "key" in out
    assert not set(out) & {"\x1b", "\x07"}
