"""`grpocli rollouts`: completions are shown, filtered and exported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from grpocli.runs.rollouts import evaluation_records, read_rollouts, write_rollouts
from grpocli.types import Completion, Group, Prompt, Rollout, Row, Status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups, one of each task, whose completions have the rewards 0 and 1."""
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        groups = []
        for task in ("sums", "words"):
            prompt = Prompt(
                f"{step}",
                [1],
                [{"role": "user", "content": f"{task}?"}],
                {"task_name": task, "answer": f"{task[0]}\x1b[31m{step}", "level": step},
            )
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
        records = [
            dataclasses.replace(
                record, status=Status.TRAINED, row=Row.of(record.rollout, (-1.0, 1.0)[k % 2], record.group)
            )
            for k, record in enumerate(evaluation_records(groups))
        ]
        records[-1] = dataclasses.replace(records[-1], status=Status.FILTERED, row=None)
        write_rollouts(tmp_path / "rollouts" / f"step_{step:06d}.parquet", records, step)
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
        (["--step", ":", "--where", "status=filtered"], ["words 1 1", "words 2 1", "words 3 1"]),
        (["--step", ":", "--where", "columns.level>2", "--n", "1"], ["sums 3 0"]),
        (["--step", ":2", "--where", "reward/other!=0.5", "--where", "right>=1"], ["sums 1 1", "sums 2 1"]),
    ],
)
def test_filters_choose_completions(grpocli, run: Path, options: list[str], expected: list[str]) -> None:
    code, out, _ = grpocli("rollouts", str(run), *options)
    assert code == 0
    assert shown(out) == [f"{text} [b]" for text in expected]
    assert "user: sums?" in out or "user: words?" in out


def test_completions_are_exported(grpocli, run: Path, tmp_path: Path) -> None:
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
        (["--n", "-1"], "--n"),
        (["--export", "out.csv"], "--export=out.csv"),
        (["--export", "/nowhere/out.jsonl"], "--export=/nowhere/out.jsonl"),
    ],
)
def test_what_is_wrong_is_named(grpocli, run: Path, options: list[str], named: str) -> None:
    code, _, err = grpocli("rollouts", str(run), *options)
    assert code == 2
    assert named in err


def test_a_run_without_rollouts_or_a_match_is_reported(grpocli, run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").touch()
    code, _, err = grpocli("rollouts", f"{run}s")
    assert (code, f'RUN {run}s: there is no such folder; did you mean "{run}"?\n' in err) == (2, True)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").touch()
    code, _, err = grpocli("rollouts", str(tmp_path / "begun"))
    assert (code, "the run has sampled nothing yet" in err) == (2, True)
    for options in (["--where", "right>1"], ["--where", "columns.nowhere>1", "--export", f"{run}/out.jsonl"]):
        assert grpocli("rollouts", str(run), *options)[::2] == (1, "no completion matches\n")
    code, _, err = grpocli("rollouts", str(run), "--step", ":", "--export", "hub:not//a name")
    assert (code, "--export=hub:not//a name" in err) == (1, True)


def problem_files(run: Path) -> None:
    """Two steps: row 7 of `sums` is solved half, then whole; a leftover group is in the files of both steps."""
    (run / "rollouts").mkdir(parents=True)
    asked = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "1+1=\x1b[2J\u202e?\n[b]now[/b]"}]
    sums = Prompt("0", [1], asked, {"task_name": "sums"}, 7)
    words = Prompt("1", [1], "spell it", {"task_name": "words"}, 3)

    def group(prompt: Prompt, *rewards: float) -> Group:
        done = Completion([5], [-1.0], "stop", 1)
        return Group(prompt, [Rollout(prompt, done, "t", {"right": one, "short": 1.0}) for one in rewards])

    def write(step: int, *groups: tuple[Group, int]) -> None:
        records = [
            dataclasses.replace(record, status=Status.FILTERED, sampled_step=groups[record.group][1])
            for record in evaluation_records([one for one, _ in groups])
        ]
        write_rollouts(run / "rollouts" / f"step_{step:06d}.parquet", records, step)

    write(1, (group(sums, 1.0, 0.0), 1), (group(words, 0.0, float("nan")), 1))
    write(2, (group(words, 0.0, float("nan")), 1), (group(sums, 1.0, 2.0), 2))


def cells(out: str) -> list[list[str]]:
    """The cells of the table's rows."""
    return [line.split() for line in out.splitlines() if "%" in line]


def test_problems_have_their_samples_and_pass_rates(grpocli, tmp_path: Path) -> None:
    problem_files(tmp_path)
    code, out, _ = grpocli("rollouts", str(tmp_path), "--problems")
    assert code == 0
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
    code, out, err = grpocli("rollouts", str(tmp_path), "--problems")
    assert code == 0
    assert len(cells(out)) == 2
    assert "config.yaml cannot be read: the first reward counts" in err
    assert "rollout files of steps 2 are gone: their samples are not counted" in err
