"""Tables from local files: unchanged values, splits by file names, errors with file and line."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.loading import load_table, looks_local, need_columns

load_streamed = functools.partial(load_table, streaming=True)


def test_json_values_are_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"a": "2024-01-01", "b": 1}\n\n{"a": 12345678901234567890, "c": null}\n', encoding="utf-8")
    table = load_table(str(file), None, "train")
    assert table.columns == ["a", "b", "c"]
    assert list(table.rows) == [
        {"a": "2024-01-01", "b": 1, "c": None},
        {"a": 12345678901234567890, "b": None, "c": None},
    ]


@pytest.mark.slow
def test_csv_and_parquet_are_read(tmp_path: Path, cache_folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"q": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('q,n\n"a, or b",1\nb,2\n')
    assert load_table(str(tmp_path / "a.parquet"), None, "train").rows[1] == {"q": "b", "n": 2}
    assert load_table(str(tmp_path / "a.csv"), None, "train").rows[0] == {"q": "a, or b", "n": "1"}


def test_cells_of_a_csv_stay_text(tmp_path: Path, cache_folder: Path) -> None:
    answers = ["007", "1.50", "12345678901234567890123", "NA", "None", "null", "1e3", "True", ""]
    (tmp_path / "a.csv").write_text("q,a\n" + "".join(f"b,{answer}\n" for answer in answers))
    for load in (load_table, load_streamed):
        rows = load(str(tmp_path / "a.csv"), None, "train", "task.path").rows
        assert [row["a"] for row in rows] == [*answers[:-1], None]


@pytest.mark.parametrize("load", [load_table, load_streamed])
def test_compressed_files_are_read(load: Any, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(b'{"q": "1"}\n'))
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(b"q\n2\n"))
    for split, value in (("train", "1"), ("test", "2")):
        file = next(tmp_path.glob(f"{split}*"))
        assert list(load(str(file), None, split, "task.path").rows) == [{"q": value}]


@pytest.mark.parametrize("load", [load_table, load_streamed])
def test_answers_keep_their_types(load: Any, tmp_path: Path) -> None:
    answers = [["1", "2"], "3", 4, 5.0, {"x": 1}, {"y": None}, True, 12345678901234567890, "2024-01-01"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"a": answer}) + "\n" for answer in answers))
    (tmp_path / "a.json").write_text(json.dumps([{"a": answer} for answer in answers], indent=1))
    for name in ("a.jsonl", "a.json"):
        rows = load(str(tmp_path / name), None, "train", "task.path").rows
        assert json.dumps([row["a"] for row in rows]) == json.dumps(answers)


@pytest.mark.parametrize(
    ("files", "split", "rows"),
    [
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl"], "train", [0, 1]),
        (["part1.jsonl", "part2.jsonl", "test.jsonl"], "train", ["part1.jsonl", "part2.jsonl"]),
        (["trains.jsonl", "test.json"], "test", ["test.json"]),
    ],
)
def test_a_folders_files_are_chosen_by_split(
    files: list[str], split: str, rows: list[str | int], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text(f'[{{"file": "{name}"}}]')
    (tmp_path / "README.md").write_text("not data")
    wanted = [files[r] if isinstance(r, int) else r for r in rows]
    assert [row["file"] for row in load_table(str(tmp_path), None, split).rows] == wanted


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ', "line 2 is not JSON"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', "line 2 is not JSON"),
        ("a.jsonl", '{"a": 1}\n3\n', "example 2 is not an object"),
        ("a.jsonl", "\n\n", "it is empty"),
        ("a.json", "[]", "it is empty"),
        ("a.parquet", "no parquet", "cannot be read"),
        ("a.csv", "", "it is empty"),
        ("a.csv", "q,a\n1,2\n1,2,3,4\n", "line 3 has 4 cells"),
        ("a.csv", "q,a,a\n1,2,3\n", "two columns called 'a'"),
        ("a.csv", 'q,a\n"1,2\n', r"line 2 is not CSV \(unexpected end of data\); repair or remove it"),
    ],
)
def test_unreadable_data_gives_a_one_sentence_error(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_table(str(tmp_path / name), None, "train", "task.eval_path")
    assert str(error.value).startswith("task.eval_path=")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_utf16_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"a": 1}\n', encoding="utf-16")
    for load in (load_table, load_streamed):
        with pytest.raises(ConfigError, match="it must be UTF-8: save it as UTF-8"):
            load(str(tmp_path / name), None, "train", "task.path")


@pytest.mark.parametrize("load", [load_table, load_streamed])
def test_the_error_names_the_file_and_the_line(load: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"a": 1}}\n\n{{"a": {"9" * 5000}}}\n')
    with pytest.raises(ConfigError, match=r"line 3 is not JSON \(Exceeds the limit") as caught:
        load(str(file), None, "train", "task.path")
    assert (caught.value.key, caught.value.value) == ("task.path", str(file))


@pytest.mark.parametrize(
    ("text", "line"), [('[{"a": 1},\n]', 2), ('[{"a": 1}\n{"a": 2}]', 2), ('[{"a": 1}]\n]', 2), ("[", 1)]
)
def test_lists_that_are_not_json_are_refused(text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=f"line {line} is not JSON"):
        load_table(str(tmp_path / "a.json"), None, "train")


def test_a_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"a": "\ud83d\ude00"}')
    assert load_table(str(tmp_path / "a.jsonl"), None, "train").rows == [{"a": "\U0001f600"}]


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (load_table, "a.jsonl"),
        (load_table, "a.json"),
        (load_table, "a.csv"),
        (load_streamed, "a.jsonl"),
        (load_streamed, "a.csv"),
    ],
)
def test_text_that_is_not_utf8_is_refused(load: Any, name: str, tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / name).write_bytes({"a.json": b'[{"a": 1},\n', "a.csv": b"a,b\n"}.get(name, b"\n") + b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"cannot be read: .*it must be UTF-8: save it as UTF-8"):
        load(str(tmp_path / name), None, "train", "task.path")


@pytest.mark.parametrize("load", [load_table, load_streamed])
def test_a_parquet_with_text_that_is_not_utf8_is_refused(load: Any, tmp_path: Path, cache_folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    _, offsets, data = pa.array([b"fine", b"\xff\xfe"]).buffers()
    parquet.write_table(pa.table({"a": pa.StringArray.from_buffers(2, offsets, data)}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read: .*(UTF8|utf-8)"):
        load(str(tmp_path / "a.parquet"), None, "train", "task.path")


def test_the_error_quotes_the_beginning_of_a_wrong_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'"{"x" * 10_000}"')
    with pytest.raises(ConfigError, match=r"example 1 is not an object with columns: 'xxx.*\.\.\.$") as caught:
        load_table(str(tmp_path / "a.jsonl"), None, "train")
    assert len(str(caught.value)) < 400


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found none"):
        load_table(str(tmp_path), None, "train")
    (tmp_path / "train.jsonl").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"has no test\.jsonl .*found train\.jsonl"):
        load_table(str(tmp_path), None, "test")
    (tmp_path / "train.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match="files of one kind"):
        load_table(str(tmp_path), None, "train")


@pytest.mark.parametrize(
    ("path", "local"), [("openai/gsm8k", False), ("squad", False), ("./x", True), ("x.csv", True), ("a/b/c", True)]
)
def test_looks_local_recognises_paths(path: str, local: bool) -> None:
    assert looks_local(path) is local


def test_a_csv_with_semicolons_is_told_to_have_commas(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "rows.csv").write_text("question;answer\n1+1;2\n")
    with pytest.raises(ConfigError, match=r"has one column, 'question;answer'; save it with commas"):
        need_columns(["question;answer"], {"task.prompt_column": "question"}, str(tmp_path / "rows.csv"))


def test_csv_files_of_a_folder_have_the_same_columns(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1,2\n")
    (tmp_path / "b.csv").write_text("prompt,solution\n1+2,3\n")
    with pytest.raises(ConfigError, match=r"not those of .*a\.csv: they differ in answer, solution"):
        load_table(str(tmp_path), None, "train")


def test_a_list_among_the_lines_of_a_file_is_no_row(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n[{"a": 2}]\n')
    with pytest.raises(ConfigError, match="not an object"):
        load_table(str(tmp_path / "rows.jsonl"), None, "train")


def test_unnamed_columns_of_a_csv_are_ignored(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a,,\n1,2,,\n")  # spreadsheets write such files
    assert load_table(str(tmp_path / "a.csv"), None, "train").columns[:2] == ["q", "a"]


def test_csv_files_may_have_their_columns_in_another_order(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "train-1.csv").write_text("\nq,a\n1,2\n")
    (tmp_path / "train-2.csv").write_text("a,q\n4,3\n")
    for load in (load_table, load_streamed):
        rows = load(str(tmp_path), None, "train", "task.path").rows
        assert list(rows) == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]
