"""The page of `grpocli report`: where it is written, what is refused, and a file without markup from data."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from report.pages import page, run
from report.test_report_data import run_folder

from grpocli_tools.report.report_page import SCRIPTS, embedded_json, live_html, page_html


def test_the_page_is_in_the_run_or_elsewhere_and_replaced_as_a_whole(tmp_path: Path, grpocli) -> None:
    run = run_folder(tmp_path / "run", [])
    grpocli("report", str(run), "--out", str(tmp_path / "page.html"), code=0)
    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()
    for _ in range(2):
        assert grpocli("report", str(run), code=0)[1] == f"{run}/report.html\n"
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
def test_what_cannot_be_read_or_written_is_one_sentence(words: list[str], said: str, tmp_path: Path, grpocli) -> None:
    if "run" in words:
        run_folder(tmp_path / "run", [])
    _, _, message = grpocli("report", *words, code=2)
    assert (said in message, message.count("\n")) == (True, 1)


def test_a_hostile_name_of_a_folder_stays_text(tmp_path: Path, grpocli) -> None:
    folder = run_folder(tmp_path / "a<img src=x onerror=alert(1)>&\x1b[31m\n\u202eb", [])
    for more in (["--out", str(tmp_path / "page.html")], []):
        assert "\x1b" not in grpocli("report", str(folder), *more, code=0)[1]
    assert "<img" not in (tmp_path / "page.html").read_text()


def test_text_from_data_cannot_end_the_element_that_holds_it() -> None:
    title = "</script></title><b>&\u2028"
    html = page_html(page(run(), title=title))
    assert "<b>" not in html
    assert html.count("</script>") == 3
    assert embedded_json(title) == '"\\u003c/script\\u003e\\u003c/title\\u003e\\u003cb\\u003e\\u0026\\u2028"'


def test_our_scripts_parse_no_markup_and_run_no_text() -> None:
    folder = files("grpocli_tools.report").joinpath("page")
    assert {path.name for path in folder.iterdir() if path.name.endswith(".js")} == set(SCRIPTS)
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser")
    assert [name for name in SCRIPTS if forbidden.search(folder.joinpath(name).read_text(encoding="utf-8"))] == []


def test_only_the_live_page_may_ask_its_server() -> None:
    assert "connect-src" not in page_html(page())
    assert "connect-src &#39;self&#39;" in live_html("runs", "0.1.0")
    assert "default-src &#39;none&#39;" in page_html(page())
