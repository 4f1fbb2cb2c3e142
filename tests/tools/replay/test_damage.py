"""Damage that no cell-by-cell comparison can show is one sentence with the file and the step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay.test_replay import STEP, Grpocli

pytestmark = pytest.mark.processes


def without_status(table: pa.Table) -> pa.Table:
    rows = table.to_pylist()
    rows[5]["status"] = None
    return pa.Table.from_pylist(rows, schema=table.schema)


def changed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is broken or no parquet file"),
        (changed(without_status), "step 2, row 5: the column status is null"),
        (changed(lambda table: table.drop_columns(["uid"])), "step 2: the column uid is missing"),
        (changed(lambda table: table.slice(1)), "step 2: "),
    ],
    ids=["torn", "a null", "a missing column", "a missing row"],
)
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
