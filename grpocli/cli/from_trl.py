"""`grpocli from-trl`: print the overrides for a config or script of TRL, which is read and never run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.porting.trl import Port

EXAMPLES = """\
examples
  grpocli from-trl train_grpo.py --processes 8       a script with GRPOConfig(...) and GRPOTrainer(...)
  grpocli from-trl grpo.yaml --prompts 7473          a config of `trl grpo --config`
"""


def main(argv: Sequence[str]) -> int:
    """Print a shell script with the command. Returns the exit code. Raises ConfigError for an unreadable file."""
    parser = argparse.ArgumentParser(
        prog="grpocli from-trl",
        description="Print the overrides for a config or script of TRL, which is read and never run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a Python script, or a YAML or JSON of `trl grpo`")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes that TRL ran in (1)")
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of the dataset, for num_train_epochs")
    parser.add_argument("--out", type=Path, metavar="recipe/NAME.yaml", help="also write a recipe for --config-dir")
    args = parser.parse_args(argv)
    if args.processes < 1 or (args.prompts is not None and args.prompts < 1):
        raise ConfigError("must be at least 1", key="--processes" if args.processes < 1 else "--prompts")
    port = ported(args.file, args.processes, args.prompts)
    if args.out is not None:
        _write_recipe(port, args.file, args.out)
    print(shell_script(port), end="")
    return 0


def ported(file: Path, processes: int = 1, prompts: int | None = None) -> Port:
    """The translation of a script or config."""
    from grpocli.porting.script import of_script
    from grpocli.porting.source import of_mapping, read_mapping
    from grpocli.porting.trl import Translation

    source = of_script(file) if file.suffix == ".py" else of_mapping(file, read_mapping(file))
    return Translation(source, processes, prompts).translate()


def _write_recipe(port: Port, file: Path, out: Path) -> None:
    """Write the overrides as a recipe, and print how it is used."""
    from grpocli.files import write_atomic
    from grpocli.porting.trl import recipe

    if out.suffix != ".yaml" or out.absolute().parent.name != "recipe":
        hint = f"write --out {Path('recipe', out.stem)}.yaml"
        raise ConfigError("a recipe is a .yaml in a folder named recipe", key="--out", value=out, hint=hint)
    if out.exists():
        raise ConfigError("exists already", key="--out", value=out, hint="choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, recipe(port, file.name))
    print(f"# grpocli train --config-dir {out.parent.parent} recipe={out.stem}")


def shell_script(port: Port) -> str:
    """The command as a script for bash: an override and a comment a line, then what to check."""
    import shlex

    from grpocli.tracking.text import one_line

    rows = [(shlex.quote(line.override), one_line(line.comment)) for line in port.lines]
    width = min(max(len(override) for override, _ in rows), 60)
    body = [f"  {override:<{width}}{f'  # {comment}' if comment else ''}".rstrip() for override, comment in rows]
    missing = [f"# no counterpart: {one_line(text)}" for text in port.missing]
    notes = [f"# check: {one_line(text)}" for text in port.notes]
    lines = ["overrides=(", *body, ")", 'grpocli train "${overrides[@]}"', *missing, *notes]
    return "\n".join(lines) + "\n"
