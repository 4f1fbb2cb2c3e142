"""Two real processes with prefetchers behave alike when their engine is lost or raises an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from training import prefetch_processes
from training.test_processes import launched

pytestmark = [pytest.mark.processes, pytest.mark.survival]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two processes, by scenario."""
    folder = tmp_path_factory.mktemp("ahead")
    launched(prefetch_processes.__file__, 2, folder / "logs", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("scenario", ["lost", "lost, late"])
def test_a_lost_engine_is_recovered_together(both: list[dict[str, Any]], scenario: str) -> None:
    """The engine is lost while the trainers wait before a sync, and while one of them is late."""
    for process in both:
        assert process[scenario] == {"done": 4, "error": None, "recovered": [[0, 1]], "drawn": [4, 0]}


@pytest.mark.parametrize(("scenario", "done"), [("gone", 1), ("gone, late", 2)])
def test_an_engine_lost_for_good_ends_both_after_the_same_step(
    both: list[dict[str, Any]], scenario: str, done: int
) -> None:
    """Both train on the ready batches first, including a process that is late."""
    for process in both:
        assert process[scenario].pop("error")[1] == "stays away"
        assert process[scenario] == {"done": done, "recovered": [], "drawn": [done, 0]}


def test_an_error_in_one_process_ends_both(both: list[dict[str, Any]]) -> None:
    """The thread of the other process still waits for it."""
    first, second = (process["alone"] for process in both)
    assert first["error"] == ["RunError", "only here"]
    assert second["error"] == ["EngineError", "only here"]
    assert first["done"] == second["done"] == 1
