"""`grpocli rollouts`: completions are shown, filtered and exported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from grpocli.runs.rollouts import Record, evaluation_records, read_rollouts, write_rollouts
from grpocli.types import Completion, Group, Prompt, Rollout, Row, Status


def rollouts(prompt: Prompt, *scores: dict[str, float], text: str = "t", version: int = 1) -> Group:
    """A group of completions of 1, 2, ... tokens; every second one is cut off."""
    done = [Completion([5] * k, [-1.0] * k, ("length", "stop")[k % 2], version) for k in range(1, len(scores) + 1)]
    named = zip(done, scores, strict=True)
    return Group(prompt, [Rollout(prompt, one, text.format(k), given) for k, (one, given) in enumerate(named)])


def write(run: Path, step: int, records: list[Record]) -> None:
    (run / "rollouts").mkdir(exist_ok=True)
    write_rollouts(run / "rollouts" / f"step_{step:06d}.parquet", records, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups, one of each task, whose completions have the rewards 0 and 1."""
    for step in (1, 2, 3):
        groups = []
        for task, other in (("sums", math.nan), ("words", 0.5)):
            columns = {"task_name": task, "answer": f"{task[0]}\x1b[31m{step}", "level": step}
            prompt = Prompt(f"{step}", [1], [{"role": "user", "content": f"{task}?"}], columns)
            scores = [{"right": right, "other": other} for right in (0.0, 1.0)]
            groups.append(rollouts(prompt, *scores, text=f"{task} {step} {{}} [b]", version=step))
        *trained, last = [
            replace(one, status=Status.TRAINED, row=Row.of(one.rollout, (-1.0, 1.0)[k % 2], one.group))
            for k, one in enumerate(evaluation_records(groups))
        ]
        write(tmp_path, step, [*trained, replace(last, status=Status.FILTERED, row=None)])
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["sums 3 0", "sums 3 1", "words 3 0", "words 3 1"]),
        (["--step", "2", "--task", "words"], ["words 2 0", "words 2 1"]),
        (["--step", "2:", "--finish", "length", "--where", "other=0.5"], ["words 2 1", "words 3 1"]),
        (["--step", ":", "--where", "right<1", "--where", "advantage < 0", "--n", "2"], ["sums 1 0", "words 1 0"]),
        (["--step", ":", "--where", "status=filtered"], ["words 1 1", "words 2 1", "words 3 1"]),
        (["--step", ":", "--where", "columns.level>2", "--n", "1"], ["sums 3 0"]),
        (["--step", ":2", "--where", "reward/other!=0.5", "--where", "right>=1"], ["sums 1 1", "sums 2 1"]),
    ],
)
def test_filters_choose_completions(grpocli, run: Path, options: list[str], expected: list[str]) -> None:
    _, out, _ = grpocli("rollouts", str(run), *options, code=0)
    assert [line for line in out.splitlines() if line.endswith("[b]")] == [f"{text} [b]" for text in expected]
    assert "user: sums?" in out or "user: words?" in out


def test_completions_are_exported(grpocli, run: Path, tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.parquet"):
        words = ["--step", ":", "--where", "right=1", "--export", str(tmp_path / name)]
        code, out, _ = grpocli("rollouts", str(run), *words)
        assert (code, out) == (0, f"6 completions in {tmp_path / name}\n")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [row["completion"] for row in read_rollouts(tmp_path / "out.parquet")]
    assert [row["completion"] for row in lines] == texts
    assert lines[0]["completion_ids"] == [5, 5]
    assert lines[0]["messages"] == [{"role": "user", "content": "sums?"}]
    files = [tmp_path / "out.parquet", run / "rollouts" / "step_000001.parquet"]
    one, other = map(pyarrow.parquet.read_schema, files)
    assert one.equals(other)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--step", "7"], "--step=7"),
        (["--step", "x"], "--step=x"),
        (["--where", "rigth=1"], '--where rigth: there is no such column; did you mean "right"'),
        (["--where", "right=one"], "--where right=one"),
        (["--where", "right"], "--where=right"),
        (["--status", "filtered"], "--where COLUMN=VALUE"),
        (["--export", "out.csv"], "--export=out.csv"),
        (["--export", "/nowhere/out.jsonl"], "--export=/nowhere/out.jsonl"),
    ],
)
def test_what_is_wrong_is_named(grpocli, run: Path, options: list[str], named: str) -> None:
    assert named in grpocli("rollouts", str(run), *options, code=2)[2]


def test_a_run_without_rollouts_or_a_match_is_reported(grpocli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    for folder in (run, tmp_path / "begun"):
        (folder / "config.yaml").touch()
    missing = f'RUN {run}s: there is no such folder; did you mean "{run}"?\n'
    for folder, said in ((f"{run}s", missing), (f"{run}/begun", "the run has sampled nothing yet")):
        code, _, err = grpocli("rollouts", folder)
        assert (code, said in err) == (2, True)
    for options in (["--where", "right>1"], ["--where", "columns.nowhere>1", "--export", f"{run}/out.jsonl"]):
        assert grpocli("rollouts", str(run), *options)[::2] == (1, "no completion matches\n")
    code, _, err = grpocli("rollouts", str(run), "--step", ":", "--export", "hub:not//a name")
    assert (code, "--export=hub:not//a name" in err) == (1, True)


def problem_files(run: Path) -> None:
    """Two steps: row 7 of `sums` is solved half, then whole; a leftover group is in the files of both steps."""
    asked = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "1+1=\x1b[2J\u202e?\n[b]now[/b]"}]
    sums = Prompt("0", [1], asked, {"task_name": "sums"}, 7)
    words = Prompt("1", [1], "spell it", {"task_name": "words"}, 3)
    half, whole, leftover = (
        rollouts(prompt, *({"right": one, "short": 1.0} for one in right))
        for prompt, right in ((sums, (1.0, 0.0)), (sums, (1.0, 2.0)), (words, (0.0, math.nan)))
    )
    for step, groups, sampled in ((1, [half, leftover], (1, 1)), (2, [leftover, whole], (1, 2))):
        records = evaluation_records(groups)
        write(run, step, [replace(r, status=Status.FILTERED, sampled_step=sampled[r.group]) for r in records])


def cells(out: str) -> list[list[str]]:
    """The cells of the table's rows."""
    return [line.split() for line in out.splitlines() if "%" in line]


def test_problems_have_their_samples_and_pass_rates(grpocli, tmp_path: Path) -> None:
    problem_files(tmp_path)
    _, out, _ = grpocli("rollouts", str(tmp_path), "--problems", code=0)
    assert cells(out) == [
        ["sums", "7", "4", "75.0%", "100.0%", "2", "1+1=?", "[b]now[/b]"],
        ["words", "3", "2", "0.0%", "0.0%", "1", "spell", "it"],
    ]
    assert out.splitlines()[-1] == "2 problems"
    assert not {"\x1b", "\u202e"} & set(out)
    _, out, _ = grpocli("rollouts", str(tmp_path), "--problems", "--sort", "pass_rate", "--limit", "1")
    assert [row[:2] for row in cells(out)] == [["words", "3"]]
    assert "the first 1 are shown" in out
    _, out, _ = grpocli("rollouts", str(tmp_path), "--problems", "--task", "sums", "--step", "1")
    assert cells(out) == [["7", "2", "50.0%", "50.0%", "1", "1+1=?", "[b]now[/b]"]]


def test_the_saved_config_names_the_accuracy_reward(grpocli, tmp_path: Path) -> None:
    problem_files(tmp_path)
    tasks = {"_target_": "task/mixture", "sums": {}, "words": {"rewards": ["short"]}}
    (tmp_path / "config.yaml").write_text(json.dumps({"task": tasks, "reward": {"right": {}, "short": {}}}))
    _, out, _ = grpocli("rollouts", str(tmp_path), "--problems")
    assert [row[:6] for row in cells(out)] == [
        ["sums", "7", "4", "75.0%", "100.0%", "2"],
        ["words", "3", "2", "100.0%", "100.0%", "1"],
    ]


def test_the_reference_answer_and_the_status_are_shown(grpocli, run: Path) -> None:
    _, out, _ = grpocli("rollouts", str(run), "--task", "words")
    blocks = out.split("── ")[1:]
    assert [block.splitlines()[-1] for block in blocks] == ["reference: w3"] * 2, "without escape codes"
    assert "advantage -1.000  1 tokens, stop\n" in blocks[0]
    assert "2 tokens, length  filtered\n" in blocks[1]
    assert "advantage" not in blocks[1]


def test_problems_of_a_damaged_run_say_what_is_unknown(grpocli, tmp_path: Path) -> None:
    problem_files(tmp_path)
    (tmp_path / "config.yaml").write_text("{")
    folder = tmp_path / "rollouts"
    (folder / "step_000002.parquet").rename(folder / "step_000003.parquet")
    _, out, err = grpocli("rollouts", str(tmp_path), "--problems", code=0)
    assert len(cells(out)) == 2
    assert "config.yaml cannot be read: the first reward counts" in err
    assert "rollout files of steps 2 are gone: their samples are not counted" in err
