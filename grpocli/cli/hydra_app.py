"""The command line of Hydra: its options, help, sweeps and completion, with one-sentence errors and our exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpocli.composition.compose import register_parts
from grpocli.composition.hydra_errors import hydra_errors
from grpocli.composition.hydra_sources import conf_dir
from grpocli.composition.overrides import from_command_line, in_quotes, rewrite
from grpocli.config.parts import nearest
from grpocli.config.schema import Run
from grpocli.errors import ConfigError, GrpoError, Stopped
from grpocli.plugins import hook
from grpocli.text import clean


def arguments(argv: list[str]) -> Any:
    """The command line as Hydra parses it: `.overrides`, `.multirun`, `.cfg`, `.config_dir` ..."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    refuse_options(argv, parser)
    return parser.parse_intermixed_args(argv)


def refuse_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise one ConfigError for all options that a command does not have, such as `--learning_rate 1e-6`."""
    known, unknown = parser._option_string_actions, []
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        option, _, value = word.partition("=")
        if len(option) > 2 and option.startswith("--") and not any(name.startswith(option) for name in known):
            follows = "" if after.startswith("-") or "=" in after else after
            unknown.append(f"there is no option {option}{_advice(option, value or follows or 'VALUE', known)}")
    if unknown:
        raise ConfigError("; ".join(unknown))


def _advice(option: str, value: str, options: Iterable[str]) -> str:
    """Advice for an unknown option: the override that it means, or one of the command's `options`."""
    key = option[2:].replace("-", "_")
    if (foreign := hook("foreign_names")) and (advice := foreign.advice_of_like(key, value)):
        return f": {advice}"
    if "." in key or key in {"recipe", *(field.name for field in dataclasses.fields(Run))}:
        return f": write {key}=[{value}]" if key == "reward" else f": write {key}={value}"
    return nearest(option, options) or ": settings are KEY=VALUE without dashes, such as train.steps=20"


def options_first(argv: list[str]) -> list[str]:
    """The command line with Hydra's options before the overrides, and the overrides as Hydra accepts them.

    Raises ConfigError for options that Hydra does not have.
    """
    register_parts()
    overrides = arguments(argv).overrides
    rest = list(argv)
    for override in overrides:
        rest.remove(override)
    return [*rest, *from_command_line(overrides)]


def only_prints(args: Any) -> bool:
    """Whether the command line asks Hydra for information instead of a run."""
    return bool(args.help or args.hydra_help or args.cfg or args.info is not None)


def search_path(config_dir: str | None) -> list[str]:
    """The override that adds `--config-dir` to a composition outside of Hydra's command line."""
    if config_dir is None:
        return []
    folder, ours = Path(config_dir), Path(conf_dir())
    if not folder.is_dir():
        raise ConfigError("there is no such folder", key="--config-dir", value=config_dir)
    for file in sorted(ours.rglob("*.yaml")):
        same = folder / file.relative_to(ours)
        if same.is_file() and not same.samefile(file):
            raise ConfigError("Hydra would use the file of this name in conf/", key=str(same), hint="rename yours")
    return [f"hydra.searchpath=[{in_quotes(f'file://{folder.resolve()}')}]"]


class _SweepEnded(BaseException):
    """Passes through Hydra, for which an Exception is the failure of one job."""


def hydra_app(task: Callable[[DictConfig], Any], config_name: str, argv: list[str]) -> None:
    """Run `task` as a Hydra app. A sweep continues after a job that failed, and the first error is raised at the end.

    Raises the errors of `task`, and ConfigError for errors of Hydra.
    """
    import hydra
    from hydra.errors import HydraException

    register_parts()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
    args = arguments(argv)
    program = "grpocli" if args.shell_completion else f"grpocli {config_name.replace('_', '-')}"
    sys.argv = [program, *argv]  # shells look up completions by the first word
    failures: list[GrpoError] = []

    def job(config: DictConfig) -> Any:
        try:
            return task(config)
        except GrpoError as error:
            failures.append(error)
            if isinstance(error, Stopped) and args.multirun:
                raise _SweepEnded from error  # by a signal or a lost service
            if args.multirun:
                print(f"grpocli: this job failed: {clean(str(error))}", file=sys.stderr)
            return None

    app = hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(job)
    with hydra_errors(args.overrides, config_name):
        try:
            app()
        except _SweepEnded:
            raise failures[-1] from None
        except OSError as error:  # from Hydra, which makes folders
            if isinstance(error, HydraException):  # a missing choice is an OSError too
                raise
            folder = error.filename or "the output folder"
            raise ConfigError(f"{folder} cannot be written: {error.strerror}", key="hydra.sweep.dir") from error
        finally:
            close_log()
    if failures:
        raise failures[0]


def close_log() -> None:
    """Close the log file that Hydra opened for the run."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, logging.FileHandler)]:
        root.removeHandler(handler)
        handler.close()


NO_OVERRIDES = ("compare", "rollouts")
"""Commands whose words are no overrides."""


def complete(argv: list[str], commands: Collection[str], env: Mapping[str, str] = os.environ) -> int:
    """Print the candidates for a command line, or Hydra's script for a shell (`install=bash`). Returns the exit code.

    The script calls `grpocli -sc query=SHELL` at each TAB.
    """
    line = env.get("COMP_LINE")
    if line is None or not any(word.startswith("query=") for word in argv):
        hydra_app(lambda config: None, "train", argv)
        return 0
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    if len(words) < 2 or line[-1:].isspace():
        words.append("")  # the word that is being typed
    if len(words) < 3:
        print(" ".join(name for name in commands if name.startswith(words[-1])))
    elif words[1] in commands and words[1] not in NO_OVERRIDES:
        before = rewrite([word for word in words[2:-1] if "=" in word and not word.startswith("-")])
        os.environ["COMP_LINE"] = " ".join(["grpocli", *before, words[-1]])
        with suppress(ConfigError):  # a wrong override: the command reports it when it runs
            hydra_app(lambda config: None, "vllm_serve" if words[1] == "vllm-serve" else "train", argv)
    return 0
