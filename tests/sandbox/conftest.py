"""A sandbox to break out of."""

from __future__ import annotations

import pytest

from grpocli.sandbox.backends import Way
from grpocli.sandbox.sandbox import Job, Limits, SandboxError, Verdict, run
from grpocli.sandbox.select_backend import best, way_of

LIMITS = Limits(timeout=3, memory_mb=256, processes=4, disk_mb=4)


@pytest.fixture(scope="session")
def way() -> Way:
    try:
        return way_of(best(None, LIMITS), None)
    except SandboxError as error:
        pytest.skip(f"programs cannot be shut in here: {error}")


class Sandbox:
    def __init__(self, way: Way) -> None:
        self.way, self.limits = way, LIMITS

    def __call__(self, program: str, *tests: str, **rest: str) -> Verdict:
        return run(Job(program, tests, **rest), self.limits, self.way)


@pytest.fixture
def sandbox(way: Way) -> Sandbox:
    return Sandbox(way)
