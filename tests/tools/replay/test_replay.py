"""A replay agrees with the record of a run, and finds and names one changed cell of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli.test_environment_run import TWO
from replay.conftest import trained

from grpocli.errors import ConfigError

pytestmark = pytest.mark.processes

STEP = "step_000002.parquet"
Grpocli = Callable[..., tuple[int, str, str]]


def replayed(grpocli: Grpocli, run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a replay."""
    code, out, err = grpocli("replay", str(run), "--json", *options)
    assert '{\n  "run"' in out, err
    return code, json.loads(out[out.index('{\n  "run"') :])  # a run made before has printed, too


def differing(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """{check: differences} of the checks that found some."""
    checks = [check for step in report["steps"] for check in step["checks"] if check["differ"]]
    return {check["name"]: check["differences"] for check in checks}


Cell = tuple[int, str, Callable[[Any], Any]]


def changed(run: Path, folder: Path, *cells: Cell) -> Path:
    """A copy of the run with changed cells in its second rollout file. cells: (row, column, change)."""
    copy = folder / "changed"
    shutil.copytree(run, copy)
    path = copy / "rollouts" / STEP
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row, column, change in cells:
        rows[row][column] = change(rows[row][column])
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return copy


def rows_with(run: Path, status: str) -> list[int]:
    rows = pq.read_table(run / "rollouts" / STEP).to_pylist()
    return [i for i, row in enumerate(rows) if row["status"] == status]


def first_row(run: Path, status: str) -> int:
    return rows_with(run, status)[0]


def test_every_step_of_a_run_with_dynamic_sampling_agrees_to_the_bit(grpocli: Grpocli, dapo: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in dapo.rglob("*")}
    code, report = replayed(grpocli, dapo, "--step", ":")
    assert (code, differing(report)) == (0, {})
    assert [step["step"] for step in report["steps"]] == [1, 2]
    assert all(step["exact"] for step in report["steps"])
    statuses = {row["status"] for row in pq.read_table(dapo / "rollouts" / STEP).to_pylist()}
    assert {"trained", "masked", "filtered"} <= statuses
    assert {path: path.stat().st_mtime_ns for path in dapo.rglob("*")} == before, "nothing is written"


def moved(by: float) -> Callable[[Any], Any]:
    return lambda value: value + by


def first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: [change(values[0]), *values[1:]]


CELLS: dict[str, Callable[[Any], Any]] = {
    "completion_ids": first(lambda token: token + 1),
    "reward/exact_match": lambda value: 1 - value,
    "status": lambda value: "surplus" if value == "filtered" else "zero_advantage",
    "trainer_logprobs": first(moved(1e-3)),
    "entropies": first(moved(1e-3)),
    "advantage": moved(1e-3),
    "prompt": lambda text: f"{text}1",
    "uid": lambda text: f"{text}1",
    "version": moved(-1),
    "finish_reason": lambda reason: {"stop": "length", "length": "stop"}[reason],
}


@pytest.mark.parametrize(
    ("status", "columns"),
    [
        ("filtered", list(CELLS)[:3]),
        pytest.param("trained", list(CELLS)[3:], marks=pytest.mark.survival),
        pytest.param("masked", list(CELLS)[:3], marks=pytest.mark.survival),
    ],
)
def test_each_changed_cell_is_found_and_named(
    status: str, columns: list[str], grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    rows = cycle(rows_with(dapo, status))
    cells = [(next(rows), column, CELLS[column]) for column in columns]
    code, report = replayed(grpocli, changed(dapo, tmp_path, *cells), "--step", "2")
    assert code == 1
    found = [one for differences in differing(report).values() for one in differences]
    places = {(one["what"], one["group"], one["completion"]) for one in found}
    for row, column, _ in cells:
        names = {column, "logprobs", "completion"} if column == "completion_ids" else {column}
        assert any((name, row // 4, row % 4) in places for name in names), (column, found)


def test_a_tiny_change_of_a_samplers_log_prob_shows_in_the_metrics(
    grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    copy = changed(dapo, tmp_path, (first_row(dapo, "trained"), "logprobs", first(moved(1e-5))))
    code, report = replayed(grpocli, copy, "--step", "2")
    assert code == 1
    assert {one["what"] for one in differing(report)["metrics of the update"]} >= {"gen_kl_error"}


def test_a_changed_metric_and_a_changed_weight_are_named(grpocli: Grpocli, dapo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dapo, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[1]["grad_norm"] += 1e-3
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, report = replayed(grpocli, copy, "--step", "2")
    assert code == 1
    assert [one["what"] for one in differing(report)["metrics of the update"]] == ["grad_norm"]


def test_without_weights_the_rest_is_checked(
    grpocli: Grpocli, dapo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpocli.models.tiny import Tiny

    def gone(part: Tiny, progress: object) -> str:
        raise ConfigError("was removed", key="model.path")

    monkeypatch.setattr(Tiny, "prepare", gone)
    copy = tmp_path / "copy"
    shutil.copytree(dapo, copy)
    shutil.rmtree(copy / "checkpoints")
    code, out, _ = grpocli("replay", str(copy), "--step", "2")
    assert code == 0
    assert "cannot be checked: trainer log-probs" in out
    assert "everything that can be checked agrees" in out


def test_an_environment_is_stepped_again(grpocli: Grpocli, tmp_path: Path) -> None:
    run = trained(tmp_path, *TWO[1:], "train.steps=2")
    code, report = replayed(grpocli, run, "--step", ":")
    assert (code, differing(report)) == (0, {})
    turns = [row["turns"] for row in pq.read_table(run / "rollouts" / STEP).to_pylist()]
    assert max(turn or 0 for turn in turns) > 1


@pytest.mark.survival
def test_another_reward_and_algorithm_are_compared(grpocli: Grpocli, dapo: Path, tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def none(completions, **_):\n    return [0.0] * len(completions)\n")
    options = ["--reward", f"{reward}:none", "--algorithm", "drgrpo"]
    code, report = replayed(grpocli, dapo, "--step", "2", *options)
    assert code == 0
    other_reward, other_algorithm = report["what_if"]
    rows = pq.read_table(dapo / "rollouts" / STEP).to_pylist()
    assert other_reward["equal"] == sum(row["reward"] == 0 for row in rows)
    assert other_reward["higher"] == sum(row["reward"] < 0 for row in rows)
    line = json.loads((dapo / "metrics.jsonl").read_text().splitlines()[1])
    assert other_algorithm["run"]["loss"] == line["loss"]
    assert other_algorithm["run"]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)
    assert other_algorithm["other"]["grad_norm"] != other_algorithm["run"]["grad_norm"]
    assert 0 < other_algorithm["cosine of the gradients"] < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no such folder"),
        ([], "give the folder of one run"),
        (["{run}", "--step", "9"], "--step=9"),
        (["{run}", "resume=x"], "RUN names the run"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], said: str, grpocli: Grpocli, dapo: Path) -> None:
    code, _, err = grpocli("replay", *[word.format(run=dapo) for word in words])
    assert code == 2
    assert said in err


@pytest.mark.survival
def test_an_algorithm_brings_its_rewards_and_its_reference(grpocli: Grpocli, dapo: Path, tmp_path: Path) -> None:
    code, report = replayed(grpocli, dapo, "--step", "2", "--algorithm", "algorithm/kl=k3")
    assert code == 0
    assert 0.9 < report["what_if"][0]["cosine of the gradients"] < 1, "the initial model is the reference"
    run = trained(tmp_path, "train.steps=1")
    code, report = replayed(grpocli, run, "--algorithm", "dapo")
    assert code == 0
    assert "overlong" not in report["what_if"][0]["run"]["rewards"]
    assert "overlong" in report["what_if"][0]["other"]["rewards"]


def without_status(table: pa.Table) -> pa.Table:
    rows = table.to_pylist()
    rows[5]["status"] = None
    return pa.Table.from_pylist(rows, schema=table.schema)


def rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is broken or no parquet file"),
        (rewritten(without_status), "step 2, row 5: the column status is null"),
        (rewritten(lambda table: table.drop_columns(["uid"])), "step 2: the column uid is missing"),
        (rewritten(lambda table: table.slice(1)), "step 2: "),
    ],
    ids=["torn", "a null", "a missing column", "a missing row"],
)
def test_damage_that_no_comparison_can_show_is_named(
    damage: Callable[[Path], object], said: str, grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(dapo, run)
    path = run / "rollouts" / STEP
    damage(path)
    code, _, err = grpocli("replay", str(run), "--step", "2")
    assert code == 2
    assert f"{path}: {said}" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--algorithm", "nonsense"], "nonsense"),
        (["--reward", "{mine}:none"], "has no function or class none"),
        (["--reward", "{mine}x:f"], "mine.pyx"),
        (["--reward", "{mine}:level"], "needs 'level', but the task has no such column"),
    ],
)
def test_a_reward_or_algorithm_that_is_wrong_is_refused_before_the_replay(
    options: list[str], said: str, grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def level(completions, level):\n    return [0.0] * len(completions)\n")
    code, out, err = grpocli("replay", str(dapo), "--step", "2", *[word.format(mine=mine) for word in options])
    assert (code, said in err) == (2, True), err
    assert "loading the model" not in out + err


def test_a_reward_that_scores_nothing_ends_with_its_first_error_after_the_table(
    grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def closed(completions, **_):\n    raise ValueError('the grader is closed')\n")
    code, out, err = grpocli("replay", str(dapo), "--step", "2", "--reward", f"{mine}:closed")
    assert code == 1
    assert "everything that can be checked agrees" in out
    assert "step 2: closed cannot score any completion; the first error: " in err
