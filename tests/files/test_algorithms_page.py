"""docs/algorithms.md has an example that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The Python of the page, executed."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 1
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(found[0], str(PAGE), "exec"), scope)
    return scope


def test_the_example_learns(example: dict[str, Any]) -> None:
    history = example["train"]()
    assert sum(history[:5]) / 5 < 0.25
    assert sum(history[-5:]) / 5 > 0.5


def test_the_example_does_not_depend_on_its_micro_batches(example: dict[str, Any]) -> None:
    assert example["train"](10, micro_batches=1) == pytest.approx(example["train"](10, micro_batches=5), abs=1e-5)
