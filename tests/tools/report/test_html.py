"""The file of a page: no markup from data, no way for a script to parse any, nothing loaded."""

from __future__ import annotations

import re
from importlib.resources import files

from report.pages import page, run

from grpocli_tools.report.report_page import SCRIPTS, embedded_json, live_html, page_html


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
