"""The `grpocli` command: a subcommand with Hydra overrides."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from grpocli.config.user_code import from_user_code, raised, too_little_memory
from grpocli.errors import ConfigError, GrpoError
from grpocli.plugins import load, plugins
from grpocli.processes.libraries import quiet_libraries, shorten_spinning, use_large_pages
from grpocli.processes.node import leave_group
from grpocli.processes.signals import StopSignal, handle_stops, restore
from grpocli.processes.threads import end_process
from grpocli.text import escape_unprintable, masked
from grpocli.version import __version__

COMMANDS = {
    "train": ("train:main", "train a model; `-m` runs a sweep, `resume=RUN_DIR` continues a run"),
    "sft": ("train:sft", "teach a model the answers of a task, for example before `train`"),
    "vllm-serve": ("vllm_serve:main", "start a vLLM server for several runs"),
    "push": ("push:main", "push a run to the Hugging Face hub: model, card, report, completions"),
}
"""{command: (module:function, what it does)}. Those of installed packages are entry points of `grpocli.commands`."""

HELP = """\
grpocli {version}: train language models with reinforcement learning from verifiable rewards

usage: grpocli COMMAND [KEY=VALUE ...]

commands that train
{commands}

commands that look at runs, configs and machines
{tools}

examples
  grpocli train                                       teach a tiny model to add, on a CPU, in minutes
  grpocli train algorithm=dapo train.steps=20         another algorithm, fewer steps
  grpocli train model=qwen2.5-0.5b task=gsm8k 'reward=[math]' engine=vllm
  grpocli train -m algorithm=grpo,dapo,drgrpo,dgpo seed=0,1
  grpocli train resume=runs/DATE/TIME                 continue exactly where the run stopped
  grpocli train --cfg job                             print the composed config
  grpocli from-trl train_grpo.py                      the command for a script of TRL
  grpocli doctor recipe=dapo-small                    is this machine ready for it?
  grpocli plan recipe=qwen2.5-72b-slurm               does it fit its five machines?
  grpocli explain algorithm=dgpo vs algorithm=grpo    compare two objectives
  grpocli explain rollout.group_size                  what a key does, and its name in TRL
  grpocli watch runs                                  a live page about all runs, also those that begin later
  grpocli report runs/DATE/TIME                       a page with curves and completions, as one HTML file
  grpocli replay runs/DATE/TIME --step 12             is the record of this step right?

`grpocli COMMAND --help` lists the config groups and options of a command.
GRPOCLI_TRACEBACK=1 prints the traceback of an error. GRPOCLI_CACHE is the folder for built models.
"""


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand and exit with its code: 0 done, 2 bad config, 3 stopped after a checkpoint, 1 anything else."""
    args = sys.argv[1:] if argv is None else argv
    shorten_spinning(os.environ)
    use_large_pages()
    quiet_libraries()
    open_closed()
    escape_unprintable()
    before = handle_stops(StopSignal(immediate=True).handle)  # until training handles them: clean up and exit
    try:
        try:
            leave_group()
            code = run(args)
        finally:
            handle_stops(lambda *_: None)  # it is ending already, with its own code
    except GrpoError as error:
        code = _report(str(error), error.exit_code, traced=from_user_code(error))
    except KeyboardInterrupt as error:
        code = _report(str(error) or "interrupted", 1)
    except BrokenPipeError:
        # the reader closed the pipe: print nothing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        short, own = too_little_memory(error), from_user_code(error)
        if not (short or own or isinstance(error, OSError)):
            raise  # a bug: keep the traceback
        code = _report(str(short) if short else raised(error), 1, traced=own)
    finally:
        if argv is not None:
            restore(before)
    if argv is None:  # the process ends now
        end_process(code)
    sys.exit(code)


def open_closed() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets descriptors 0 to 2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def run(args: list[str]) -> int:
    """Run the subcommand. Returns the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if args[0] in ("-V", "--version"):
        print(f"grpocli {__version__}")
        return 0
    if args[0] in ("-sc", "--shell-completion"):
        from grpocli.cli.hydra_app import complete

        return complete(args, [*COMMANDS, *plugins("grpocli.commands")])
    return int(_main_of(args[0])(args[1:]))


def _main_of(command: str) -> Callable[[list[str]], int]:
    """The function that runs a command. Raises ConfigError if there is none."""
    main: Callable[[list[str]], int]
    if command in COMMANDS:
        module, _, name = COMMANDS[command][0].partition(":")
        main = getattr(importlib.import_module(f"grpocli.cli.{module}"), name)
        return main
    tools = plugins("grpocli.commands")
    if command not in tools:
        from grpocli.config.parts import nearest

        advice = nearest(command, [*COMMANDS, *tools])
        if not tools:
            advice = "; the entry points of grpocli are not installed: run `make setup`, or `pip install -e .` again"
        raise ConfigError(f"there is no command {command}{advice}; see grpocli --help")
    main = load(tools[command])
    return main


def help_text() -> str:
    """The output of `grpocli --help`."""
    own = {name: about for name, (_, about) in COMMANDS.items()}
    tools = {name: _about(tool.module) for name, tool in sorted(plugins("grpocli.commands").items())}
    return HELP.format(version=__version__, commands=_lines(own), tools=_lines(tools))


def plain_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser of `grpocli COMMAND`. examples: the end of its help."""
    return argparse.ArgumentParser(
        prog=f"grpocli {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _lines(commands: dict[str, str]) -> str:
    return "\n".join(f"  {name:<14}{about}" for name, about in commands.items())


def _about(module: str) -> str:
    """What the first line of a command's file says of it, which is read without importing the file."""
    try:
        spec = importlib.util.find_spec(module)
        text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    except (ImportError, SyntaxError, UnicodeDecodeError) as error:
        return f"cannot be loaded: {error}"
    return about.partition(": ")[2].rstrip(".")


def _report(message: str, code: int, traced: bool = False) -> int:
    """Print an error and return its code. traced: whether the message includes the traceback already."""
    if os.environ.get("GRPOCLI_TRACEBACK") and not traced:
        import traceback

        traceback.print_exc()
    from grpocli.text import clean

    print(f"grpocli: {'stopped' if code == 3 else 'error'}: {clean(masked(message))}", file=sys.stderr)
    return code
