"""`grpocli compare`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """A table of runs. Returns the exit code."""
    from grpocli.tracking.compare import main as compare

    return compare(argv)
