"""Which runs and files a page reads: those inside a run's folder. A link out of it may lead to other users' data, and
opening a pipe hangs."""

from __future__ import annotations

from pathlib import Path

OWN_FILES = (".lock", "config.yaml", "metrics.jsonl", "summary.json", "sessions.jsonl", ".hydra", "rollouts")
HYDRA_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")


def leads_out(run: Path) -> bool:
    """Whether a file of a run is a link to a place outside of its folder, or a pipe or device."""
    files = [run / name for name in OWN_FILES] + [run / ".hydra" / name for name in HYDRA_FILES]
    return not all(is_own(file, run) for file in files)


def is_own(file: Path, run: Path) -> bool:
    """Whether a file of a run is inside its folder, and is a plain file, a folder or missing."""
    try:
        found = file.resolve()
        plain = found.is_file() or found.is_dir() or not found.exists()
        return plain and found.is_relative_to(run.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def left_out(run: Path) -> str:
    """The note about a run that `leads_out`."""
    return f"{run.name} is not shown: one of its files is a link out of its folder, or a pipe"
