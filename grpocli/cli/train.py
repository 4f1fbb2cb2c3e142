"""`grpocli train`: train a model; `grpocli sft`: teach it the answers of a task."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from grpocli.cli.hydra_app import arguments, close_log, complete, hydra_app, only_prints, options_first, search_path
from grpocli.composition.checks import check_files
from grpocli.composition.compose import build_run, compose, run_job, sweep_folder, without_hydra
from grpocli.composition.resume import Resume
from grpocli.config.environment import raw_value
from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun, ended_early
from grpocli.text import clean

if TYPE_CHECKING:
    from grpocli.config.schema import Run


SFT_HELP = """\
grpocli sft: teach a model the answers of a task (supervised training), with the same keys as `grpocli train`

usage: grpocli sft [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]

It is `grpocli train algorithm=sft engine=transformers`; the engine only samples evaluations.

keys of its own
  task.target_template      the answer to teach, text with {column} fields; null: the assistant's last turn, or the
                            task's own answer
  train.data_epochs         passes over the data, instead of train.steps
  rollout.prompts_per_step  answers of an update

examples
  grpocli sft task=gsm8k model=smollm2-135m train.data_epochs=2
  grpocli sft task=jsonl task.path=chats.jsonl task.prompt_column=messages task.answer_column=null reward=none
  grpocli train task=gsm8k model=runs/DATE/TIME/model       reinforcement learning from there

`grpocli train --help` lists the groups and their choices.
"""
SFT_CHOICES = {"algorithm": "sft", "engine": "transformers"}


def main(argv: list[str]) -> int:
    """Check the config, then run. Returns the exit code."""
    if arguments(argv).shell_completion:
        return complete(argv, ())
    argv = options_first(argv)
    args = arguments(argv)
    searched = search_path(args.config_dir)
    if only_prints(args):
        if args.multirun and not args.help:
            raise ConfigError("a sweep has several configs", key="-m", hint="leave it out to print one")
        hydra_app(lambda config: None, "train", argv)
        return 0
    if sys.stdout.isatty():  # the next output overwrites it
        print("reading the config ...", end="\r", flush=True)
    if args.multirun:
        _sweep(argv, args.overrides, searched)
    else:
        _run(args.overrides, searched)
    return 0


def _run(overrides: list[str], searched: list[str]) -> None:
    """Compose, build and check the run, each once, before a folder is made; then run it as a job of Hydra's."""
    if "hydra/launcher=slurm" in overrides:
        problem = "only a multirun can be submitted"
        raise ConfigError(problem, key="hydra/launcher", value="slurm", hint="add -m, also for one run")
    resume = Resume.requested(overrides)
    composed = compose([*searched, *(resume.overrides(overrides) if resume else overrides)], with_hydra=True)
    config = resume.merged(without_hydra(composed)) if resume else without_hydra(composed)
    run, folder = build_run(config), Path(str(composed.hydra.run.dir)).absolute()
    if resume and (message := _finished(RunDir(folder), run)):
        print(clean(message))
        return
    if not resume:
        RunDir(folder).check_free()
        config.overrides = raw_value(composed.hydra.overrides, "task")
    check_files(run, training=True)
    try:
        run_job(composed, lambda job: _train(config, run, resuming=resume is not None))
    finally:
        close_log()
    if sys.stdout.isatty():
        print(clean(_next_commands(folder)))


def _sweep(argv: list[str], overrides: list[str], searched: list[str]) -> None:
    if Resume.requested(overrides):
        raise ConfigError("cannot be combined with -m", key="resume")
    if folder := sweep_folder([*searched, *overrides]):
        RunDir(folder).check_free()
    hydra_app(_job_of_sweep, "train", argv)


def _job_of_sweep(config: DictConfig) -> float | None:
    from hydra.core.hydra_config import HydraConfig

    from grpocli.processes.libraries import quiet_libraries

    quiet_libraries()  # a launcher of Hydra's may have started this process
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        RunDir(folder).check_free()
        run = build_run(config)
        check_files(run, training=True)
    except ConfigError:
        with suppress(OSError):  # remove the folder that Hydra made, if it is empty
            folder.rmdir()
        raise
    config.overrides = raw_value(HydraConfig.get().overrides, "task")
    return _train(config, run)


def _train(config: DictConfig, run: Run, resuming: bool = False) -> float | None:
    """Train in the folder of Hydra's job."""
    from hydra.core.hydra_config import HydraConfig

    from grpocli.launch.run import launch

    return launch(config, run, Path(HydraConfig.get().runtime.output_dir), resuming)


def _finished(run_dir: RunDir, run: Run) -> str | None:
    """The message for a finished run; None for any other."""
    saved_run = SavedRun(run_dir.path)
    done = saved_run.finished_steps
    saved = run_dir.saved_steps()
    if done is None or not run_dir.model.is_dir() or max(saved, default=done) < done:  # the newest one was removed
        return None
    if done < run.train.steps:
        stop_at = run.eval.stop_at
        why = ended_early(saved_run.summary, stop_at)
        higher = "a higher threshold, or " if (stop_at.threshold or 0) < 1 else ""
        remedy = f"{higher}eval.stop_at.metric=null with eval.stop_at.threshold=null, trains on"
        return f"{run_dir.path} is finished after {done} of {run.train.steps} steps: {why}; {remedy}" if why else None
    return f"{run_dir.path} is finished after {done} steps; train.steps=N above {done} trains more"


def _next_commands(folder: Path) -> str:
    """Commands that show the completions of a finished run and compare it with others."""
    run = shlex.quote(str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder))
    commands = {"show its completions:": f"rollouts {run}", "compare it with other runs:": f"compare {run} RUN ..."}
    return "\n".join(f"{what:<28}grpocli {command}" for what, command in commands.items())


def sft(argv: list[str]) -> int:
    """Train with `algorithm=sft`, and `engine=transformers` unless another is chosen. Returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(SFT_HELP, end="")
        return 0
    overrides = arguments(argv).overrides
    if any(override.startswith("resume=") for override in overrides):
        return main(argv)
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    if (other := given.get("algorithm", "sft")) != "sft":
        hint = "leave it out, or use `grpocli train`"
        raise ConfigError("`grpocli sft` is algorithm=sft", key="algorithm", value=other, hint=hint)
    return main([*argv, *(f"{key}={choice}" for key, choice in SFT_CHOICES.items() if key not in given)])
