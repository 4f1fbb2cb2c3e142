"""The sandbox backend of this machine, as a fixture."""

from __future__ import annotations

import pytest

from grpocli.sandbox.backends import backend_named, select_backend
from grpocli.sandbox.sandbox import Backend, Limits, SandboxError, Submission, SubmissionResult, run

LIMITS = Limits(timeout=3, memory_mb=256, processes=4, disk_mb=4)


@pytest.fixture(scope="session")
def backend() -> Backend:
    try:
        return backend_named(select_backend(None, LIMITS), None)
    except SandboxError as error:
        pytest.skip(f"no sandbox works here: {error}")


class Sandbox:
    def __init__(self, backend: Backend) -> None:
        self.backend, self.limits = backend, LIMITS

    def __call__(self, program: str, *tests: str, **rest: str) -> SubmissionResult:
        return run(Submission(program, tests, **rest), self.limits, self.backend)


@pytest.fixture
def sandbox(backend: Backend) -> Sandbox:
    return Sandbox(backend)
