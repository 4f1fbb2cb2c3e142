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
from cli.running import SMALL, run_here
from cli.test_environment_run import TWO

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


def rows_of(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(run / "rollouts" / STEP).to_pylist()


def rows_with(run: Path, status: str) -> list[int]:
    return [i for i, row in enumerate(rows_of(run)) if row["status"] == status]


def trained(folder: Path, *options: str) -> Path:
    """A small run with these options."""
    run = folder / "run"
    assert run_here("train", *SMALL, "eval.problems=0", *options, f"hydra.run.dir={run}") == 0
    return run


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with groups that are filtered, and completions that are cut off and masked."""
    cut_off = ["algorithm=dapo", "algorithm.keep.mask_truncated=true", "rollout.max_completion_tokens=3"]
    more = ["rollout.prompts_per_step=8", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=0"]
    return trained(tmp_path_factory.mktemp("dapo"), *cut_off, *more)


def test_every_step_of_a_run_with_dynamic_sampling_agrees_to_the_bit(grpocli: Grpocli, dapo: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in dapo.rglob("*")}
    code, report = replayed(grpocli, dapo, "--step", ":")
    assert (code, differing(report)) == (0, {})
    assert [step["step"] for step in report["steps"]] == [1, 2]
    assert all(step["exact"] for step in report["steps"])
    statuses = {row["status"] for row in rows_of(dapo)}
    assert {"trained", "masked", "filtered"} <= statuses
    assert {path: path.stat().st_mtime_ns for path in dapo.rglob("*")} == before, "nothing is written"
    code, _, err = grpocli("replay", str(dapo), "--step", "9")
    assert (code, "--step=9" in err) == (2, True)


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
    "columns",
    [
        {"filtered": list(CELLS)[:3]},
        pytest.param({"trained": list(CELLS)[3:], "masked": list(CELLS)[:3]}, marks=pytest.mark.survival),
    ],
    ids=" and ".join,
)
def test_each_changed_cell_is_found_and_named(columns: Any, grpocli: Grpocli, dapo: Path, tmp_path: Path) -> None:
    cells = [
        (row, column, CELLS[column])
        for status, names in columns.items()
        for row, column in zip(cycle(rows_with(dapo, status)), names)  # rows are repeated
    ]
    code, report = replayed(grpocli, changed(dapo, tmp_path, *cells), "--step", "2")
    assert code == 1
    found = [one for differences in differing(report).values() for one in differences]
    places = {(one["what"], one["group"], one["completion"]) for one in found}
    for row, column, _ in cells:
        names = {column, "logprobs", "completion"} if column == "completion_ids" else {column}
        assert any((name, row // 4, row % 4) in places for name in names), (column, found)


def test_a_tiny_change_of_a_log_prob_and_a_changed_metric_are_named(grpocli: Grpocli, dapo: Path, tmp_path) -> None:
    copy = changed(dapo, tmp_path, (rows_with(dapo, "trained")[0], "logprobs", first(moved(1e-5))))
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[1]["grad_norm"] += 1e-3
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, report = replayed(grpocli, copy, "--step", "2")
    assert code == 1
    assert {one["what"] for one in differing(report)["metrics of the update"]} >= {"gen_kl_error", "grad_norm"}


def test_without_weights_the_rest_is_checked(grpocli: Grpocli, dapo: Path, tmp_path: Path, monkeypatch) -> None:
    from grpocli.models.tiny import Tiny

    def gone(part: Tiny, progress: object) -> str:
        raise ConfigError("was removed", key="model.path")

    monkeypatch.setattr(Tiny, "prepare", gone)
    copy = changed(dapo, tmp_path)
    shutil.rmtree(copy / "checkpoints")
    _, out, _ = grpocli("replay", str(copy), "--step", "2", code=0)
    assert "cannot be checked: trainer log-probs" in out
    assert "everything that can be checked agrees" in out


def test_an_environment_is_stepped_again(grpocli: Grpocli, tmp_path: Path) -> None:
    run = trained(tmp_path, *TWO[1:], "train.steps=2")
    code, report = replayed(grpocli, run, "--step", ":")
    assert (code, differing(report)) == (0, {})
    turns = [row["turns"] or 0 for row in rows_of(run)]
    assert max(turns) > 1


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
def test_damage_that_no_comparison_can_show_is_named(damage, said: str, grpocli, dapo: Path, tmp_path: Path) -> None:
    run = changed(dapo, tmp_path)
    path = run / "rollouts" / STEP
    damage(path)
    _, _, err = grpocli("replay", str(run), "--step", "2", code=2)
    assert f"{path}: {said}" in err.splitlines()[-1]
