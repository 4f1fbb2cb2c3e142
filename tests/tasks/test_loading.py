"""Tables from files, folders and addresses: unchanged values, splits by file names, errors with file and line."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.loading import load_table

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
def test_values_stay_as_they_are_written(name: str, written: str | bytes, rows: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    table = load_table(str(file), None, "train")
    assert json.dumps([tuple(row.values()) for row in table.rows]) == json.dumps(rows)
    assert list(table.rows[0]) == table.columns


def test_files_of_a_folder_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "train-1.csv").write_text("q,a\n1,2\n")
    (tmp_path / "train-2.csv").write_text("a,q\n4,3\n")
    assert load_table(str(tmp_path), None, "train").rows == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


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
        ("a.csv", "q,a\n1,2\n1,2,3,4\n", "line 3 has more cells"),
        ("a.csv", 'q,a\n"1,2\n', "unexpected end of data"),
        ("a.jsonl", b'\n{"a": "\xff"}', "line 2 is not JSON .'utf-8'"),
        ("a.csv", '{"a": 1}\n'.encode("utf-16"), "cannot be read: 'utf-8'"),
        ("a.parquet", "no parquet", "cannot be read"),
    ],
)
def test_unreadable_data_is_refused(
    name: str, written: str | bytes, said: str, tmp_path: Path, cache_folder: Path
) -> None:
    (tmp_path / name).write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(ConfigError, match=said) as refused:
        load_table(str(tmp_path / name), None, "train", "task.eval_path")
    assert (refused.value.key, refused.value.value) == ("task.eval_path", str(tmp_path / name))
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("files", "split"), [([], "train"), (["train.jsonl"], "test"), (["train.jsonl", "train.csv"], "train")]
)
def test_a_folder_without_the_split_is_refused(files: list[str], split: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=", ".join(sorted(files)) or "none") as refused:
        load_table(str(tmp_path), None, split)
    assert refused.value.key == "task.path"


ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)]


def content(kind: str) -> bytes:
    """ROWS as a file of a kind."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table, out = pa.Table.from_pylist(ROWS), io.BytesIO()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if kind == "arrow":
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    else:
        {"csv": csv.write_csv, "parquet": parquet.write_table}[kind](table, out)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_files_of_the_datasets_library_are_read(kind: str, tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / f"train.{kind}").write_bytes(content(kind))
    table = load_table(str(tmp_path), None, "train", "task.path")
    assert list(table.rows) == ROWS
    assert table.columns == ["prompt", "answer"]


@pytest.mark.slow
def test_folders_of_save_to_disk_are_read(tmp_path: Path, cache_folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    DatasetDict(train=whole.select(range(8)), test=whole.select(range(8, 12))).save_to_disk(tmp_path / "two")
    assert list(load_table(str(tmp_path / "one"), None, "train", "task.path").rows) == ROWS
    assert list(load_table(str(tmp_path / "two"), None, "test", "task.path").rows) == ROWS[8:]
    with pytest.raises(ConfigError, match="has the splits test, train"):
        load_table(str(tmp_path / "two"), None, "tets", "task.path")


def put(name: str, body: bytes) -> None:
    """Write a file of the file system memory://, which fsspec opens as it does s3:// and others."""
    import fsspec

    with fsspec.open(f"memory://{name}", "wb") as file:
        file.write(body)


@pytest.mark.parametrize("kind", ["jsonl", "csv", pytest.param("parquet", marks=pytest.mark.slow)])
def test_files_and_folders_at_an_address_are_read(kind: str, cache_folder: Path) -> None:
    for split in ("train", "test"):
        put(f"{kind}/{split}.{kind}", content(kind))
    assert list(load_table(f"memory://{kind}/train.{kind}", None, "train").rows) == ROWS
    assert list(load_table(f"memory://{kind}", None, "test").rows) == ROWS
    put(f"{kind}.{kind}?signature=secret", content(kind))
    assert list(load_table(f"memory://{kind}.{kind}?signature=secret", None, "train").rows) == ROWS


def test_errors_name_the_address_and_the_line() -> None:
    put("bad/train.jsonl", b'{"a": 1}\n{"a": \n')
    for path, split, said in (
        ("bad/train.jsonl", "train", r"=memory://bad/train.jsonl: cannot be read: line 2 is not JSON"),
        ("absent.jsonl?signature=secret", "train", r"absent.jsonl: there is no such file or folder"),
        ("bad", "dev", r"has no dev.jsonl or other file of that name; found train.jsonl"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            load_table(f"memory://{path}", None, split)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("path", ["nonsense://a/b.jsonl", "gs://bucket/b.jsonl"])
def test_an_address_that_nothing_opens_is_refused_at_once(path: str) -> None:
    with pytest.raises(ConfigError, match=r"nonsense|gcsfs") as refused:
        build_run(compose(["task=jsonl", f"task.path={path}"])).task.check_ready()
    assert refused.value.key == "task.path"


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        load_table("http://me:secret@127.0.0.1:9/a.jsonl", None, "train")
    assert "secret" not in str(refused.value)
