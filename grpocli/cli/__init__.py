"""The `grpocli` command: a subcommand, then Hydra's overrides."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import MutableMapping

from grpocli.errors import GrpoError
from grpocli.masking import masked
from grpocli.processes.cpu_tuning import use_large_pages
from grpocli.processes.threads import limit_exit_time
from grpocli.user_frames import from_user_code, raised
from grpocli.version import __version__

COMMANDS = {
    "train": ("grpocli.cli.train", "train a model; `-m` sweeps, `resume=RUN_DIR` goes on"),
    "vllm-serve": ("grpocli.cli.vllm_serve", "start a vLLM server that runs can use and sync"),
    "explain": ("grpocli.cli.explain", "the objective of a run as mathematics; `A vs B` shows what differs"),
    "plan": ("grpocli.cli.plan", "memory and work of a run, before it is started; exit code 1 if it does not fit"),
    "reward-check": ("grpocli.cli.reward_check", "hold rewards against a task's own answers, before training"),
    "eval": ("grpocli.cli.evaluate", "how good models and checkpoints are at tasks, with confidence intervals"),
    "rollouts": ("grpocli.cli.rollouts", "read what a run has sampled: filter, page through, export"),
    "compare": ("grpocli.cli.compare", "a table of the runs below one or more folders"),
}

HELP = """\
grpocli {version}: train language models with reinforcement learning from verifiable rewards

usage: grpocli COMMAND [KEY=VALUE ...]

commands
{commands}

examples
  grpocli train                                       a tiny model learns to add, on a CPU, in minutes
  grpocli train algorithm=dapo train.steps=20         another algorithm, fewer steps
  grpocli train model=qwen2.5-1.5b task=gsm8k reward=[math] engine=vllm
  grpocli train -m algorithm=grpo,dapo,drgrpo,dgpo seed=0,1
  grpocli train resume=runs/DATE/TIME                 go on exactly where it stopped
  grpocli train --cfg job                             print the config that would run
  grpocli explain algorithm=dgpo vs algorithm=grpo    what two objectives differ in, as mathematics
  grpocli plan model=qwen2.5-7b hardware.device=cuda --devices 8    whether it fits, and what to change

`grpocli COMMAND --help` lists a command's config groups and options.
GRPOCLI_TRACEBACK=1 shows the traceback of an error; GRPOCLI_CACHE is where built models are kept.
"""


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand and exit with its code: 0 done, 2 bad config, 3 stopped after a checkpoint, 1 anything else."""
    args = sys.argv[1:] if argv is None else argv
    shorten_spinning(os.environ)
    use_large_pages()
    open_closed()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # until training handles it: clean up and go
    try:
        code = run(args)
    except GrpoError as error:
        code = _report(str(error), error.exit_code, traced=from_user_code(error))
    except KeyboardInterrupt as error:
        code = _report(str(error) or "interrupted", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; say nothing at exit
        code = 1
    except Exception as error:
        if from_user_code(error):
            code = _report(raised(error), 1, traced=True)
        elif isinstance(error, OSError):  # such as of a name that is too long
            parts = (error.filename, error.strerror or str(error) or type(error).__name__)
            code = _report(": ".join(str(part) for part in parts if part), 1)
        else:
            raise  # a bug of ours, with its traceback
    finally:
        signal.signal(signal.SIGTERM, before)
    if argv is None:  # Python ends with this
        limit_exit_time(code)
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


def shorten_spinning(env: MutableMapping[str, str]) -> None:
    """Threads that wait for each other spin for a while before they sleep, by default too long by far.

    Where another program holds a core, the default makes a run on a CPU ten times slower. libgomp reads this when torch
    is loaded.
    """
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "5000")


def run(args: list[str]) -> int:
    """Dispatch; returns the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if args[0] in ("-V", "--version"):
        print(f"grpocli {__version__}")
        return 0
    if args[0] in ("-sc", "--shell-completion"):
        from grpocli.cli.completion import main as complete

        return complete(args, COMMANDS)
    if args[0] not in COMMANDS:
        from grpocli.config.parts import nearest

        raise_usage(f"there is no command {args[0]}{nearest(args[0], COMMANDS)}; see grpocli --help")
    module = importlib.import_module(COMMANDS[args[0]][0])
    from grpocli.tracking.text import clean_warnings

    clean_warnings()
    return int(module.main(args[1:]))


def raise_usage(problem: str) -> None:
    """Bad usage is bad config: exit code 2."""
    from grpocli.errors import ConfigError

    raise ConfigError(problem)


def help_text() -> str:
    """What `grpocli --help` prints."""
    lines = "\n".join(f"  {name:<14}{about}" for name, (_, about) in COMMANDS.items())
    return HELP.format(version=__version__, commands=lines)


def _report(message: str, code: int, traced: bool = False) -> int:
    """Print the message. traced: it has the traceback already, where that is asked for."""
    if os.environ.get("GRPOCLI_TRACEBACK") and not traced:
        import traceback

        traceback.print_exc()
    from grpocli.tracking.text import clean

    print(f"grpocli: {'stopped' if code == 3 else 'error'}: {clean(masked(message))}", file=sys.stderr)
    return code
