"""Damage that no cell-by-cell comparison can show is one sentence with the file, step, row and column."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay.test_replay import STEP, Grpocli

from grpocli.errors import ConfigError
from grpocli_tools.replay.record import RecordedStep

pytestmark = pytest.mark.processes


def at_row_5(column: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    def damaged(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[5][column] = change(rows[5][column])
        return pa.Table.from_pylist(rows, schema=table.schema)

    return damaged


def as_type(column: str, kind: pa.DataType, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    def damaged(table: pa.Table) -> pa.Table:
        values = pa.array([change(value) for value in table[column].to_pylist()], kind)
        return table.set_column(table.schema.get_field_index(column), column, values)

    return damaged


DAMAGES: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
    ("a shorter list", at_row_5("logprobs", lambda values: values[:-1]), "row 5: the column logprobs has "),
    ("a longer mask", at_row_5("loss_mask", lambda values: [*values, 1]), "row 5: the column loss_mask has "),
    ("no tokens", at_row_5("prompt_ids", lambda _: []), "row 5: the column prompt_ids is empty"),
    ("a negative token", at_row_5("prompt_ids", lambda ids: [-1, *ids]), "row 5: the column prompt_ids has a negative"),
    (
        "another model's token",
        at_row_5("completion_ids", lambda ids: [10**6, *ids[1:]]),
        "row 5: the column completion_ids has the token 1000000, and the model has ",
    ),
    ("a null", at_row_5("status", lambda _: None), "row 5: the column status is null"),
    (
        "a null token",
        at_row_5("completion_ids", lambda ids: [None, *ids[1:]]),
        "row 5: the column completion_ids has null",
    ),
    (
        "an unknown status",
        at_row_5("status", lambda _: "lost"),
        "row 5: the column status has the unknown value 'lost'",
    ),
    ("an infinity", at_row_5("logprobs", lambda v: [float("-inf"), *v[1:]]), "row 5: the column logprobs has a value"),
    ("no JSON", at_row_5("columns", lambda text: text[:-1]), "row 5: the column columns is not JSON ("),
    ("a JSON list", at_row_5("columns", lambda _: "[]"), "row 5: the column columns is not a JSON object"),
    ("a missing column", lambda table: table.drop_columns(["uid"]), "the column uid is missing"),
    ("text for a number", as_type("reward", pa.string(), str), "the column reward has the type string, not number"),
    (
        "text for lists",
        as_type("entropies", pa.string(), lambda _: "x"),
        "the column entropies has the type string, not list of number",
    ),
    ("a missing row", lambda table: table.slice(1), "completions, which are not whole groups of 4"),
]


@pytest.mark.parametrize(("damage", "said"), [pair[1:] for pair in DAMAGES], ids=[name for name, *_ in DAMAGES])
def test_a_damaged_file_is_located(
    damage: Callable[[pa.Table], pa.Table], said: str, dapo: Path, tmp_path: Path
) -> None:
    path = tmp_path / STEP
    pq.write_table(damage(pq.read_table(dapo / "rollouts" / STEP)), path)
    with pytest.raises(ConfigError) as caught:
        RecordedStep.read(path, 2, 4, None).check_tokens(100)
    assert f"{path}: step 2" in str(caught.value)
    assert said in str(caught.value)


DAMAGED_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is broken or no parquet file"),
    (
        lambda path: pq.write_table(
            at_row_5("completion_ids", lambda ids: [10**6, *ids[1:]])(pq.read_table(path)), path
        ),
        "step 2, row 5: the column completion_ids has the token 1000000, and the model has ",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGED_FILES, ids=["torn", "another model's token"])
def test_the_command_says_one_sentence(
    damage: Callable[[Path], object], said: str, grpocli: Grpocli, dapo: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(dapo, run)
    path = run / "rollouts" / STEP
    damage(path)
    code, _, err = grpocli("replay", str(run), "--step", "2")
    assert code == 2
    assert f"{path}: {said}" in err.splitlines()[-1]
