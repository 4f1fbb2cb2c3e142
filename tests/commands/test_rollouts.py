"""`grpocli rollouts`: reading what was sampled, filtered and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpocli.data import Completion, Group, Prompt, Rollout
from grpocli.tracking.rollouts import read_rollouts, write_rollouts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups, one of each task, whose completions have the rewards 0 and 1."""
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        groups = []
        for task in ("sums", "words"):
            prompt = Prompt(f"{step}", [1], [{"role": "user", "content": f"{task}?"}], {"task_name": task})
            done = [Completion([5] * (k + 1), [-1.0] * (k + 1), ("stop", "length")[k], step) for k in range(2)]
            other = None if task == "sums" else 0.5
            groups.append(
                Group(
                    prompt,
                    [
                        Rollout(prompt, c, f"{task} {step} {k} [b]", {"right": k, "other": other or float("nan")})
                        for k, c in enumerate(done)
                    ],
                )
            )
        write_rollouts(tmp_path / "rollouts" / f"step_{step:06d}.parquet", groups, [[-1.0, 1.0]] * 2, step)
    return tmp_path


def shown(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.endswith("[b]")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["sums 3 0", "sums 3 1", "words 3 0", "words 3 1"]),
        (["--step", "2", "--task", "words"], ["words 2 0", "words 2 1"]),
        (["--step", "2:", "--finish", "length", "--where", "other=0.5"], ["words 2 1", "words 3 1"]),
        (["--step", ":", "--where", "right<1", "--where", "advantage < 0", "--n", "2"], ["sums 1 0", "words 1 0"]),
        (["--step", ":2", "--where", "reward/other!=0.5", "--where", "right>=1"], ["sums 1 1", "sums 2 1"]),
    ],
)
def test_what_is_shown(grpocli, run: Path, options: list[str], expected: list[str]) -> None:
    code, out, _ = grpocli("rollouts", str(run), *options)
    assert code == 0
    assert shown(out) == [f"{text} [b]" for text in expected]
    assert "user: sums?" in out or "user: words?" in out


def test_what_is_exported(grpocli, run: Path, tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.parquet"):
        code, out, _ = grpocli(
            "rollouts", str(run), "--step", ":", "--where", "right=1", "--export", str(tmp_path / name)
        )
        assert (code, out) == (0, f"6 completions in {tmp_path / name}\n")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in lines] == [
        row["completion"] for row in read_rollouts(tmp_path / "out.parquet")
    ]
    assert lines[0]["completion_ids"] == [5, 5]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "7"], "the run has sampled nothing there; it has the steps 1 to 3"),
        (["--step", "x"], "--step 'x': write N, or FROM:TO"),
        (["--where", "rigth=1"], 'there is no such column; did you mean "right"'),
        (["--where", "right=one"], "'one' is no number"),
        (["--where", "right"], "write COLUMN<VALUE"),
        (["--n", "-1"], "--n -1: must be 0 (all) or more"),
        (["--export", "out.csv"], "must end in .jsonl or .parquet"),
        (["--export", "/nowhere/out.jsonl"], "--export /nowhere/out.jsonl: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(grpocli, run: Path, options: list[str], said: str) -> None:
    code, _, err = grpocli("rollouts", str(run), *options)
    assert code == 2
    assert said in err


def test_a_folder_that_is_no_run_and_filters_that_nothing_fits(grpocli, run: Path, tmp_path: Path) -> None:
    code, _, err = grpocli("rollouts", str(tmp_path / "rollouts"))
    assert (code, "there is no folder `rollouts` in it" in err) == (2, True)
    code, _, err = grpocli("rollouts", str(run), "--where", "right>1")
    assert (code, err) == (1, "nothing fits\n")


def test_a_hub_that_does_not_take_it(grpocli, run: Path) -> None:
    code, _, err = grpocli("rollouts", str(run), "--step", ":", "--export", "hub:not//a name")
    assert code == 1
    assert "--export hub:not//a name: the hub did not take it: " in err
