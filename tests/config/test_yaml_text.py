"""YAML that somebody sent is an error of one line."""

from __future__ import annotations

import pytest

from grpocli.config.yaml_text import load


@pytest.mark.parametrize(("text", "problem"), [("a: [1", "line 1: |line 2: "), ("a: !!timestamp abc", "abc|None")])
def test_a_yaml_that_cannot_be_loaded_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        load(text)
    assert "\n" not in str(raised.value)
