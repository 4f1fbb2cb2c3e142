"""Tables from files, folders and addresses: unchanged values, splits by file names, errors with file and line."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.loading import load_table, looks_local, open_rows

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
    ("files", "split"), [([], "train"), (["train.jsonl"], "test"), (["train.jsonl", "train.csv"], "train")]
)
def test_a_folder_without_the_split_is_refused(files: list[str], split: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=", ".join(sorted(files)) or "none") as refused:
        load_table(str(tmp_path), None, split)
    assert refused.value.key == "task.path"


def test_looks_local_recognises_paths() -> None:
    paths = {"openai/gsm8k": False, "squad": False, "./x": True, "x.csv": True, "a/b/c": True}
    assert {path: looks_local(path) for path in paths} == paths


ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def content(kind: str) -> bytes:
    """ROWS as a file of a kind."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table, out = pa.Table.from_pylist(ROWS), io.BytesIO()
    if kind == "jsonl":
        return jsonl(ROWS)
    if kind in ("csv", "parquet"):
        {"csv": csv.write_csv, "parquet": parquet.write_table}[kind](table, out)
    elif kind == "arrow":
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    else:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for number, row in enumerate(ROWS):
                for suffix, text in (("json", json.dumps({"prompt": row["prompt"]})), ("answer", row["answer"])):
                    member = tarfile.TarInfo(f"{number:03}.{suffix}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def plain(rows: Any) -> list[dict[str, Any]]:
    return [{k: v.decode() if isinstance(v, bytes) else v for k, v in row.items()} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrow", "parquet", "tar"])
@READERS
def test_files_of_the_datasets_library_are_read(load: Any, kind: str, tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / f"train.{kind}").write_bytes(content(kind))
    table = load(str(tmp_path), None, "train", "task.path")
    assert plain(table.rows) == ROWS
    assert sorted(table.columns) == ["answer", "prompt"]


@pytest.mark.slow
@READERS
def test_folders_of_save_to_disk_are_read(load: Any, tmp_path: Path, cache_folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    DatasetDict(train=whole.select(range(8)), test=whole.select(range(8, 12))).save_to_disk(tmp_path / "two")
    assert list(load(str(tmp_path / "one"), None, "train", "task.path").rows) == ROWS
    assert list(load(str(tmp_path / "two"), None, "test", "task.path").rows) == ROWS[8:]
    with pytest.raises(ConfigError, match="has the splits test, train"):
        load(str(tmp_path / "two"), None, "tets", "task.path")


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A bucket of a server that answers as S3 does; `put(name, bytes)` writes into it."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        yield lambda name, body: client.put_object(Bucket="data", Key=name, Body=body)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "tar"])
def test_every_kind_of_file_is_read_from_s3(bucket: Any, kind: str, cache_folder: Path) -> None:
    bucket(f"{kind}/train.{kind}", content(kind))
    bucket(f"{kind}/test.{kind}", content(kind))
    assert plain(load_table(f"s3://data/{kind}/train.{kind}", None, "train").rows) == ROWS
    assert plain(load_table(f"s3://data/{kind}", None, "test").rows) == ROWS
    assert plain(load_streamed(f"s3://data/{kind}", None, "train", "task.path").rows) == ROWS
    if kind in ("jsonl", "parquet"):  # nothing is kept between starts, which are processes
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        bucket(f"{kind}/train.{kind}", content(kind).replace(b"11+11", b"00+00"))
        assert load_table(f"s3://data/{kind}/train.{kind}", None, "train").rows[11]["prompt"] == "00+00="


@pytest.mark.slow
def test_errors_name_the_address_and_the_line(bucket: Any, cache_folder: Path) -> None:
    bucket("bad/train.jsonl", b'{"a": 1}\n{"a": \n')
    with pytest.raises(ConfigError, match=r"task.path=s3://data/bad/train.jsonl: cannot be read: line 2 is not JSON"):
        load_table("s3://data/bad/train.jsonl", None, "train")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load_table("s3://data/absent.jsonl", None, "train")
    with pytest.raises(ConfigError, match=r"has no dev.jsonl or other file of that name; found train.jsonl"):
        load_table("s3://data/bad", None, "dev")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a server with the files of a folder."""
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@READERS
def test_files_are_read_over_http(load: Any, site: str, tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    assert list(load(f"{site}/a.jsonl", None, "train", "task.path").rows) == ROWS
    assert list(load(f"{site}/a.jsonl?signature=secret", None, "train", "task.path").rows) == ROWS
    with pytest.raises(ConfigError, match=r"absent.jsonl: there is no such file") as refused:
        load(f"{site}/absent.jsonl?signature=secret", None, "train", "task.path")
    assert "secret" not in str(refused.value)


def test_a_stream_begins_at_any_row(cache_folder: Path) -> None:
    import fsspec

    with fsspec.open("memory://folder/train-1.jsonl", "wb") as file:
        file.write(jsonl(ROWS[:5]))
    with fsspec.open("memory://folder/train-2.jsonl", "wb") as file:
        file.write(jsonl(ROWS[5:]))
    rows = open_rows("memory://folder", None, "train", "task.path")
    assert list(rows.read(3)) == ROWS[3:]


@pytest.mark.parametrize("path", ["nonsense://a/b.jsonl", "gs://bucket/b.jsonl"])
def test_an_address_that_nothing_opens_is_refused_at_once(path: str) -> None:
    with pytest.raises(ConfigError, match=r"nonsense|gcsfs") as refused:
        build_run(compose(["task=jsonl", f"task.path={path}"])).task.check_ready()
    assert refused.value.key == "task.path"


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        load_table("http://me:secret@127.0.0.1:9/a.jsonl", None, "train")
    assert "secret" not in str(refused.value)
