"""Tables from local files: unchanged values, splits by file names, errors with file and line."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.loading import load_table, looks_local

load_streamed = functools.partial(load_table, streaming=True)
READERS = pytest.mark.parametrize("load", [load_table, load_streamed])
LARGE = 12345678901234567890
ANSWERS = [["1", "2"], "3", 4, 5.0, {"x": 1}, {"y": None}, True, LARGE, "2024-01-01"]
CELLS = ["007", "1.50", "12345678901234567890123", "NA", "None", "null", "1e3", "True", ""]
LINES = "".join(json.dumps({"a": answer}) + "\n" for answer in ANSWERS)


@pytest.mark.parametrize(
    ("name", "written", "rows"),
    [
        ("a.jsonl", '\ufeff{"a": "x", "b": 1}\n\n{"a": 2, "c": null}\n', [("x", 1, None), (2, None, None)]),
        ("a.jsonl", LINES, [(answer,) for answer in ANSWERS]),
        ("a.json", json.dumps([{"a": answer} for answer in ANSWERS], indent=1), [(answer,) for answer in ANSWERS]),
        ("a.jsonl", r'{"a": "\ud83d\ude00"}', [("\U0001f600",)]),
        ("a.csv", "q,a\n" + "".join(f"b,{cell}\n" for cell in CELLS), [("b", cell or None) for cell in CELLS]),
        ("a.csv", 'q,n\n"a, or b",1\n"two\nlines",2\n', [("a, or b", "1"), ("two\nlines", "2")]),
        ("a.csv", "q,a,,\n1,2,,\n", [("1", "2")]),  # spreadsheets write unnamed columns
        ("a.jsonl.gz", gzip.compress(b'{"q": "1"}\n', mtime=0), [("1",)]),
        ("a.csv.gz", gzip.compress(b"q\n2\n", mtime=0), [("2",)]),
    ],
)
@READERS
def test_values_stay_as_they_are_written(load: Any, name: str, written: str | bytes, rows: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    table = load(str(file), None, "train")
    assert json.dumps([tuple(row.values()) for row in table.rows]) == json.dumps(rows)
    assert list(table.rows[0]) == table.columns


def test_files_of_a_folder_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "train-1.csv").write_text("q,a\n1,2\n")
    (tmp_path / "train-2.csv").write_text("a,q\n4,3\n")
    assert load_table(str(tmp_path), None, "train").rows == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


@pytest.mark.slow
def test_parquet_is_read(tmp_path: Path, cache_folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"q": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert load_table(str(tmp_path / "a.parquet"), None, "train").rows[1] == {"q": "b", "n": 2}


@pytest.mark.parametrize(
    ("files", "split", "chosen"),
    [
        (["train.jsonl", "test.jsonl"], "train", [0]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl"], "train", [0, 1]),
        (["part1.jsonl", "part2.jsonl", "test.jsonl"], "train", [0, 1]),
        (["trains.jsonl", "test.json"], "test", [1]),
    ],
)
def test_a_folders_files_are_chosen_by_split(
    files: list[str], split: str, chosen: Sequence[int], tmp_path: Path
) -> None:
    for folder in ("blobs", "links"):
        (tmp_path / folder).mkdir()
    for name in files:
        (tmp_path / "blobs" / name).write_text(f'[{{"file": "{name}"}}]')
        (tmp_path / "links" / name).symlink_to(tmp_path / "blobs" / name)  # as in the cache of the hub
    (tmp_path / "links" / "README.md").write_text("not data")
    rows = load_table(str(tmp_path / "links"), None, split).rows
    assert [row["file"] for row in rows] == [files[i] for i in chosen]


@pytest.mark.parametrize(
    ("name", "written", "said"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ', "line 2 is not JSON"),
        ("a.jsonl", f'{{"a": 1}}\n\n{{"a": {"9" * 5000}}}\n', r"line 3 is not JSON \(Exceeds the limit"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', "the list is not JSON .*line 2"),
        ("a.json", '[{"a": 1}]\n]', "the list is not JSON .*line 2"),
        ("a.jsonl", '{"a": 1}\n3\n', "example 2 is not an object"),
        ("a.jsonl", '{"a": 1}\n[{"a": 2}]\n', "example 2 is not an object"),
        ("a.json", '["{}"]', "example 1 is not an object"),
        ("a.jsonl", f'"{"x" * 10_000}"', "example 1 is not an object with columns: 'xxx"),
        ("a.jsonl", "\n\n", "it is empty"),
        ("a.json", "[]", "it is empty"),
        ("a.csv", "", "it is empty"),
        ("a.csv", "q,a\n1,2\n1,2,3,4\n", "line 3 is not CSV .*more cells"),
        ("a.csv", 'q,a\n"1,2\n', r"line 1 is not CSV \(unexpected end of data\)"),
        ("a.jsonl", b'\n{"a": "\xff"}', "cannot be read: 'utf-8'"),
        ("a.csv", '{"a": 1}\n'.encode("utf-16"), "cannot be read: 'utf-8'"),
        ("a.parquet", "no parquet", "cannot be read"),
    ],
)
@READERS
def test_unreadable_data_is_refused(
    load: Any, name: str, written: str | bytes, said: str, tmp_path: Path, cache_folder: Path
) -> None:
    (tmp_path / name).write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(ConfigError, match=said) as refused:
        load(str(tmp_path / name), None, "train", "task.eval_path")
    assert (refused.value.key, refused.value.value) == ("task.eval_path", str(tmp_path / name))
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("files", "split", "said"),
    [
        ([], "train", "found none"),
        (["train.jsonl"], "test", r"has no test\.jsonl .*found train\.jsonl"),
        (["train.jsonl", "train.csv"], "train", "files of one kind"),
    ],
)
def test_a_folder_without_the_split_is_refused(files: list[str], split: str, said: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=said):
        load_table(str(tmp_path), None, split)


@pytest.mark.parametrize(
    ("path", "local"), [("openai/gsm8k", False), ("squad", False), ("./x", True), ("x.csv", True), ("a/b/c", True)]
)
def test_looks_local_recognises_paths(path: str, local: bool) -> None:
    assert looks_local(path) is local
