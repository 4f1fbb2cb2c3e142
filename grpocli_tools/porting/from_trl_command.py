"""`grpocli from-trl`: print the overrides for a script or config of TRL or NeMo RL, which is never run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.files import write_atomic

if TYPE_CHECKING:
    from grpocli_tools.porting.translation import Port

EXAMPLES = """\
examples
  grpocli from-trl train_grpo.py --processes 8       a script with GRPOConfig(...) and GRPOTrainer(...)
  grpocli from-trl train_grpo.py --out recipe/mine.yaml       a recipe, and a file with the script's functions
  grpocli from-trl gspo.py -- --learning_rate 1e-5 --beta 0   a script that reads its settings from the command line
  grpocli from-trl dapo.py --accelerate zero3.yaml -- --config dapo.yaml     as TrlParser reads them from a file
  grpocli from-trl grpo.yaml --prompts 7473          a config of `trl grpo --config`
  grpocli from-trl grpo_math_1B.yaml                 a config of NeMo RL
"""


def main(argv: Sequence[str]) -> int:
    """Print a shell script with the command. Returns the exit code. Raises ConfigError for an unreadable file."""
    parser = argparse.ArgumentParser(
        prog="grpocli from-trl",
        description="Print the overrides for a config or script of TRL or NeMo RL, which is read and never run.",
        epilog=EXAMPLES,
        usage="grpocli from-trl FILE [OPTION ...] [-- --ARGUMENT VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    config = "a Python script or notebook, or a YAML or JSON of `trl grpo` or NeMo RL"
    parser.add_argument("file", type=Path, metavar="FILE", help=config)
    parser.add_argument("--processes", type=int, metavar="N", help="processes that TRL ran in (1)")
    parser.add_argument("--accelerate", type=Path, metavar="FILE", help="the config that `accelerate launch` gets")
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of the dataset, for num_train_epochs")
    parser.add_argument("--rewards", type=Path, metavar="FILE.py", help="write the script's reward functions there")
    parser.add_argument("--overwrite", action="store_true", help="replace files that from-trl wrote")
    parser.add_argument("--out", type=Path, metavar="recipe/NAME.yaml", help="also write a recipe for --config-dir")
    own, given = list(argv), []
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    for name in ("processes", "prompts"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ConfigError("must be at least 1", key=f"--{name}", value=number)
    if args.out is not None:
        _check_recipe(args.out, args.overwrite)
    rewards = args.rewards or (args.out and args.out.with_name(f"{args.out.stem}_rewards.py"))
    if rewards is not None:
        if rewards.suffix != ".py":
            raise ConfigError("is not a .py file", key="--rewards", value=rewards, hint="choose another name")
        _check_absent("--rewards", rewards, args.overwrite)
    port, functions = ported(args.file, args.processes, args.prompts, rewards, given, args.accelerate)
    text = shell_script(port)
    if rewards is not None and functions:
        _write("--rewards" if args.rewards else "--out", rewards, functions)
    if args.out is not None:
        _write_recipe(port, args.file, args.out)
    print(text, end="")
    return 0


def ported(
    file: Path,
    processes: int | None = None,
    prompts: int | None = None,
    rewards: Path | None = None,
    given: Sequence[str] = (),
    accelerate: Path | None = None,
) -> tuple[Port, str]:
    """The translation of a script or config, and the text of the file with its functions; "" without any.

    rewards: where that file will be written; None if it will not be. given: the script's own arguments. accelerate: the
    config of accelerate.
    """
    from grpocli_tools.porting.accelerate import is_accelerate, read_accelerate
    from grpocli_tools.porting.nemo_rl import NemoRl, is_nemo_rl
    from grpocli_tools.porting.script import functions_file, of_script
    from grpocli_tools.porting.source import of_mapping, read_mapping
    from grpocli_tools.porting.trl import Translation

    launch = read_accelerate(accelerate) if accelerate is not None else None
    processes = processes or (launch.processes if launch else None)
    if file.suffix not in (".py", ".ipynb"):
        values = read_mapping(file)
        if is_accelerate(values):
            hint = f"give the script, and --accelerate {file} beside it"
            raise ConfigError("is a config of accelerate", key=str(file), hint=hint)
        if is_nemo_rl(values):
            return NemoRl(values, prompts).translate(), ""
        port = Translation(of_mapping(file, values), processes, prompts).translate()
        if launch:
            launch.add(port)
        return port, ""
    source = of_script(file, given)
    text, left = functions_file(source)
    place = rewards or Path(f"{file.stem}_rewards.py")
    port = Translation(source, processes, prompts, str(place)).translate()
    if launch:
        launch.add(port)
    port.notes += [f"{place} lacks {one}; define it there" for one in left]
    if text and rewards is None:
        port.notes.append(
            f"{place} is not written: --rewards {shlex.quote(str(place))} moves the functions of {file.name} there"
        )
    return port, text


def _write(key: str, file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key=key, value=file) from error


def _check_absent(key: str, file: Path, overwrite: bool) -> None:
    """Raise ConfigError if a file exists, unless it may be replaced and from-trl wrote it."""
    if not file.exists():
        return
    if not overwrite:
        raise ConfigError("exists already", key=key, value=file, hint="choose another name, or add --overwrite")
    if "by grpocli from-trl" not in file.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ConfigError("is not a file that from-trl wrote", key=key, value=file, hint="choose another name")


def _check_recipe(out: Path, overwrite: bool) -> None:
    if out.suffix != ".yaml" or out.absolute().parent.name != "recipe":
        hint = f"write --out {Path('recipe', out.stem)}.yaml"
        raise ConfigError("a recipe is a .yaml in a folder named recipe", key="--out", value=out, hint=hint)
    _check_absent("--out", out, overwrite)


def _write_recipe(port: Port, file: Path, out: Path) -> None:
    """Write the overrides as a recipe, and print how it is used."""
    from grpocli_tools.porting.translation import recipe

    _write("--out", out, recipe(port, file.name))
    print(f"# {shlex.join(['grpocli', 'train', '--config-dir', str(out.parent.parent), f'recipe={out.stem}'])}")


def shell_script(port: Port) -> str:
    """The command as a script for bash: an override and a comment a line, then what to check."""
    from grpocli.text import clean, one_line

    rows = [(shlex.quote(line.override), one_line(line.comment)) for line in port.lines]
    width = min(max(len(override) for override, _ in rows), 60)
    body = [f"  {override:<{width}}{f'  # {comment}' if comment else ''}".rstrip() for override, comment in rows]
    remarks = {"no counterpart": port.missing, "nothing to set": port.nothing, "check": port.notes}
    comments = [f"# {kind}: {one_line(text)}" for kind, texts in remarks.items() for text in texts]
    lines = ["overrides=(", *body, ")", 'grpocli train "${overrides[@]}"', *comments]
    return clean("\n".join([*lines, *_trial(port)]) + "\n")


def _trial(port: Port) -> list[str]:
    """A comment with a command that tries the data and the rewards, without the model and without sampling."""
    from grpocli_tools.porting.translation import MISSING

    own = [line.override for line in port.lines if line.key.split(".")[0] in ("task", "reward")]
    if MISSING in (port.value("task"), port.value("reward")):
        return []
    words = [*own, "engine=fake", "train.steps=2", "eval.problems=0", "rollout.max_prompt_tokens=4096"]
    return [f"# try the data and rewards first: grpocli train {shlex.join(words)}"]
