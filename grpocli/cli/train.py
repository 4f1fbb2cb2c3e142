"""`grpocli train`: train a model."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from grpocli.cli.hydra_app import (
    arguments,
    complete,
    hydra_app,
    only_prints,
    options_first,
    search_path,
)
from grpocli.composition.ready import check_ready, check_training
from grpocli.composition.resume import Resume
from grpocli.config.environment import raw_value
from grpocli.errors import ConfigError
from grpocli.hub import PREFIX
from grpocli.publish.pull import fetched
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun, ended_early
from grpocli.text import clean

if TYPE_CHECKING:
    from grpocli.config.schema import Run


def main(argv: list[str]) -> int:
    """Check the config, then run. Returns the exit code."""
    if arguments(argv).shell_completion:
        return complete(argv, ())
    argv = options_first(argv, "train")
    args = arguments(argv)
    searched = search_path(args.config_dir)
    if only_prints(args):
        if args.multirun and not args.help:
            raise ConfigError("a sweep has several configs", key="-m", hint="leave it out to print one")
        hydra_app(lambda config: None, "train", argv)
        return 0
    if sys.stdout.isatty():  # the next output overwrites it
        print("reading the config ...", end="\r", flush=True)
    if not args.multirun and any(text.startswith(f"resume={PREFIX}") for text in args.overrides):
        given = fetched(args.overrides, searched)
        argv = [text for text in argv if text not in args.overrides] + given
        args = arguments(argv)
    resume = Resume.requested(args.overrides)
    if resume and args.multirun:
        raise ConfigError("cannot be combined with -m", key="resume")
    if "hydra/launcher=slurm" in args.overrides and not args.multirun:
        raise ConfigError(
            "only a multirun can be submitted", key="hydra/launcher", value="slurm", hint="add -m, also for one run"
        )
    if resume:
        argv = [a for a in argv if a not in args.overrides] + resume.overrides(args.overrides)
        args = arguments(argv)
    run = _check([*searched, *args.overrides], args.multirun, resume)
    if resume and run and (message := _finished(RunDir(resume.folder), run)):
        print(clean(message))
        from grpocli.publish.push import complete_push

        complete_push(run.hub, RunDir(resume.folder))
        return 0
    if run:
        check_ready(run)
        check_training(run)
    hydra_app(lambda config: _task(config, resume), "train", argv)
    return 0


def _check(overrides: list[str], multirun: bool, resume: Resume | None) -> Run | None:
    """Raise ConfigError before Hydra makes a folder, if the run cannot work or its folder has another run.

    Returns the run; None for a sweep, which has several.
    """
    from grpocli.composition.compose import build_run, compose, run_folder, sweep_folder

    if multirun:
        run, folder = None, sweep_folder(overrides)
    else:
        config = compose(overrides, with_hydra=True)
        folder = run_folder(config)
        with open_dict(config):
            del config["hydra"]
        run = build_run(resume.merged(config) if resume else config)
    if folder and not resume:
        RunDir(folder).check_free()
    return run


def _finished(run_dir: RunDir, run: Run) -> str | None:
    """The message for a finished run; None for any other."""
    saved_run = SavedRun(run_dir.path)
    done = saved_run.finished_steps
    saved = run_dir.saved_steps()
    if done is None or not run_dir.model.is_dir() or max(saved, default=done) < done:  # the newest one was removed
        return None
    if done < run.train.steps:
        stop_at = run.eval.stop_at
        why = ended_early(saved_run.summary, stop_at.metric, stop_at.threshold)
        higher = "a higher threshold, or " if (stop_at.threshold or 0) < 1 else ""
        remedy = f"{higher}eval.stop_at.metric=null with eval.stop_at.threshold=null, trains on"
        return f"{run_dir.path} is finished after {done} of {run.train.steps} steps: {why}; {remedy}" if why else None
    return f"{run_dir.path} is finished after {done} steps; train.steps=N above {done} trains more"


def _task(config: DictConfig, resume: Resume | None) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from grpocli.composition.compose import write_record
    from grpocli.launch.run import launch
    from grpocli.processes.libraries import quiet_libraries

    quiet_libraries()  # a launcher of Hydra's may have started this process
    folder = Path(HydraConfig.get().runtime.output_dir)
    if resume:
        accuracy = launch(resume.merged(config), folder, resuming=True)
    else:
        config.overrides = raw_value(HydraConfig.get().overrides, "task")
        accuracy = launch(config, folder, begin=partial(write_record, folder, config))
    if sys.stdout.isatty() and HydraConfig.get().mode != RunMode.MULTIRUN:
        print(clean(_next_commands(folder)))
    return accuracy


def _next_commands(folder: Path) -> str:
    """Commands that show the completions of a finished run and compare it with others."""
    run = shlex.quote(str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder))
    return (
        f"show its completions:       grpocli rollouts {run}\ncompare it with other runs: grpocli compare {run} RUN ..."
    )
