"""`grpocli compare`: print a table of runs."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Print the table. Returns the exit code."""
    from grpocli.tracking.compare import main as compare

    return compare(argv)
