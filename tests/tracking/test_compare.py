"""Tables of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tracking.compare import main


def run(folder: Path, algorithm: str, seed: int, accuracy: float | None, lr: float = 0.1) -> None:
    (folder / ".hydra").mkdir(parents=True)
    choices = {"algorithm": algorithm, "task": "arithmetic"}
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


def test_what_differs_and_what_came_of_it(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["run"], r["algorithm"], r["seed"], r["accuracy"], r["exit"]) for r in rows] == [
        ("2", "dapo", 0, 0.9, "done"),
        ("1", "grpo", 1, 0.5, "done"),
        ("0", "grpo", 0, 0.3, "done"),
        ("3", "dapo", 1, None, "unfinished"),
    ]
    assert rows[0]["change"] == pytest.approx(0.8)
    assert rows[0]["reward"] == 0.25
    assert "optim.lr" not in rows[0]
    assert "algorithm.x" not in rows[0]


def test_means_over_seeds(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--format", "markdown"])
    assert "| grpo | 2 | 0.100 ± 0.000 | 0.400 ± 0.141 | 0.300 ± 0.141 |" in capsys.readouterr().out


@pytest.mark.parametrize("style", ["table", "csv"])
def test_other_formats(style: str, sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--format", style])
    assert "dapo" in capsys.readouterr().out


def test_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run below"):
        main([str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no such folder"):
        main([str(tmp_path / "missing")])
