"""`grpocli from-trl`: print the overrides for a script or config of TRL, which is never run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from grpocli_tools.porting.port import Port


def main(argv: Sequence[str]) -> int:
    own, given = list(argv), []
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser_of("from-trl", __doc__).parse_args(own)
    out, rewards = args.out, args.rewards or (args.out and args.out.with_name(f"{args.out.stem}_rewards.py"))
    if out is not None and (out.suffix != ".yaml" or out.absolute().parent.name != "recipe"):
        hint = f"write --out {Path('recipe', out.stem)}.yaml"
        raise ConfigError("a recipe is a .yaml in a folder named recipe", key="--out", value=out, hint=hint)
    for key, file in (("--out", out), ("--rewards", rewards)):
        _check_absent(key, file, args.overwrite)
    port, functions = ported(args.file, args.processes, args.prompts, rewards, given, args.accelerate)
    _write(port, functions, args.file, out, rewards)
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
    from grpocli_tools.porting.port import add_accelerate, is_accelerate
    from grpocli_tools.porting.script import functions_file, of_mapping, of_script, read_mapping
    from grpocli_tools.porting.trl import Translation

    launch = read_mapping(accelerate) if accelerate is not None else {}
    if launch and not is_accelerate(launch):
        raise ConfigError("is not a config of accelerate", key="--accelerate", value=accelerate)
    place = rewards or Path(f"{file.stem}_rewards.py")
    text, left = "", list[str]()
    if file.suffix in (".py", ".ipynb"):
        source = of_script(file, given)
        text, left = functions_file(source)
    else:
        values = read_mapping(file)
        if is_accelerate(values):
            hint = f"give the script, and --accelerate {file} beside it"
            raise ConfigError("is a config of accelerate", key=str(file), hint=hint)
        source = of_mapping(file, values)
    port = Translation(source, processes or launch.get("num_processes"), prompts, str(place)).translate()
    add_accelerate(port, launch)
    port.notes += [f"{place} lacks {one}; define it there" for one in left]
    if text and rewards is None:
        command = f"--rewards {shlex.quote(str(place))}"
        port.notes.append(f"{place} is not written: {command} moves the functions of {file.name} there")
    return port, text


def _check_absent(key: str, file: Path | None, overwrite: bool) -> None:
    """Raise ConfigError if a file exists, unless it may be replaced and from-trl wrote it."""
    if file is None or not file.exists():
        return
    if not overwrite:
        raise ConfigError("exists already", key=key, value=file, hint="choose another name, or add --overwrite")
    if "by grpocli from-trl" not in file.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ConfigError("is not a file that from-trl wrote", key=key, value=file, hint="choose another name")


def _write(port: Port, functions: str, file: Path, out: Path | None, rewards: Path | None) -> None:
    from grpocli_tools.porting.port import recipe, shell_script

    written = [(rewards, functions), (out, recipe(port, file.name))]
    for target, text in [(target, text) for target, text in written if target is not None and text]:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, text)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", key=str(target)) from error
    if out is not None:
        print(f"# {shlex.join(['grpocli', 'train', '--config-dir', str(out.parent.parent), f'recipe={out.stem}'])}")
    print(shell_script(port), end="")
