"""`grpocli report` on the command line: where the page is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import run_here


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return folder


def test_the_page_is_in_the_run_or_elsewhere_and_replaced_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert run_here("report", str(run), "--out", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()
    capsys.readouterr()
    for _ in range(2):
        assert run_here("report", str(run)) == 0
        assert capsys.readouterr().out == f"{run}/report.html\n"
    assert (run / "report.html").read_text().rstrip().endswith("</html>")
    assert [path.name for path in run.iterdir() if path.name.startswith(".tmp")] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--out", "missing/page.html"], "the page cannot be written: No such file"),
        (["run", "--out", "run"], "the page cannot be written: Is a directory"),
        (["."], "there is no run below"),
        (["missing"], "there is no such folder"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "run" in words:
        write_run(tmp_path / "run")
    assert run_here("report", *words) == 2
    message = capsys.readouterr().err
    assert (said in message, message.count("\n")) == (True, 1)


def test_a_hostile_name_of_a_folder_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a<img src=x onerror=alert(1)>&\x1b[31m\n\u202eb")
    assert run_here("report", str(folder), "--out", str(tmp_path / "page.html")) == 0
    assert run_here("report", str(folder)) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "<img" not in (tmp_path / "page.html").read_text()
