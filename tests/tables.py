"""Long tables of cases: `make test` runs all of them, `make test-fast` a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def table(cases: Iterable[Any], fast: int, other_tier: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """The cases for `parametrize`; all but `fast` of them, evenly spread, have the marker `other_tier`."""
    cases = list(cases)
    step = max(1, len(cases) // fast)
    return [case if i % step == 0 else _marked(case, other_tier) for i, case in enumerate(cases)]


def _marked(case: Any, marker: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marker)
