"""The parser of a command without overrides."""

from __future__ import annotations

import argparse


def plain_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser of `grpocli COMMAND`. examples: the end of its help."""
    return argparse.ArgumentParser(
        prog=f"grpocli {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
