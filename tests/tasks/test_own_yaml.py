"""The page about data has a task in a YAML of one's own, which works as printed."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
from cli.running import run_here

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_yaml_of_the_page_is_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"`(mine/task/sums.yaml)`.*?\n\n((?:    .*\n)+)", PAGE.read_text())
    assert found
    file = tmp_path / found[1]
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(found[2]))
    rows = [{"a": a, "b": b, "sum": a + b} for a in range(10, 14) for b in range(10, 15)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert run_here("data", "--config-dir", "mine", "task=[sums,arithmetic]", "--json", "--rows", "20") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [(one["task"], one["examples"]) for one in splits[:2]] == [("sums", 16), ("sums", 4)]
    assert splits[0]["prompts"][0]["text"] == "<bos><user>10+10=<end><assistant>"
    assert splits[0]["prompts"][0]["columns"]["answer"] == 20
