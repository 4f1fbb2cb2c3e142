"""What a worker process computes for `code`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from grpocli.sandbox.sandbox import Job, Limits, run
from grpocli.sandbox.select_backend import way_of


def run_job(job: dict[str, Any], limits: dict[str, Any], way: str, python: str | None, every: bool) -> dict[str, Any]:
    """A Verdict. Raises SandboxError where the program could not be run."""
    return asdict(run(Job(**job), Limits(**limits), way_of(way, python), every))
