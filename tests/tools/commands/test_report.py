"""`grpocli report` on the command line: where the page is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import run_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return folder


def test_the_page_is_in_the_run_and_replaced_as_a_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run_here("report", str(run)) == 0
        assert capsys.readouterr().out == f"{run}/report.html\n"
    assert (run / "report.html").read_text().rstrip().endswith("</html>")
    assert [path.name for path in run.iterdir() if path.name.startswith(".tmp")] == []


def test_out_names_another_file(run: Path, tmp_path: Path) -> None:
    assert run_here("report", str(run), "--out", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("out", "problem"),
    [("missing/page.html", "No such file"), ("run", "Is a directory"), ("/proc/page.html", "")],
)
def test_an_out_that_cannot_be_written_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, problem: str
) -> None:
    assert run_here("report", str(run), "--out", str(tmp_path / out)) == 2
    message = capsys.readouterr().err
    assert f"--out={tmp_path / out}: the page cannot be written: {problem}" in message
    assert "name another file with --out FILE.html" in message
    assert "Traceback" not in message


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("report", str(tmp_path)) == 2
    assert "there is no run below" in capsys.readouterr().err
    assert run_here("report", str(tmp_path / "missing")) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_hostile_name_of_a_folder_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a<img src=x onerror=alert(1)>&\x1b[31m\n\u202eb")
    assert run_here("report", str(folder), "--out", str(tmp_path / "page.html")) == 0
    assert run_here("report", str(folder)) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "<img" not in (tmp_path / "page.html").read_text()
