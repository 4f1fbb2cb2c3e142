"""`grpocli eval`: evaluate models and checkpoints, with confidence intervals."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.hub import PREFIX
from grpocli.text import clean
from grpocli_tools.command_line import composed, parse, stages, warn_of_rewards
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpocli.config.schema import Run
    from grpocli_tools.evaluation.evaluate import ModelResult


def main(argv: Sequence[str]) -> int:
    parser = parser_of("eval", __doc__)
    args = parse(parser, argv)
    if args.no_greedy and not args.samples:
        parser.error("--no-greedy --samples 0: there is nothing to sample")
    if args.checkpoints and not args.run:
        parser.error("--checkpoints: needs --run RUN")
    config, run = _run(args)
    out = Path(args.out or time.strftime("evals/%Y-%m-%d/%H-%M-%S"))
    warn_of_rewards(run.reward.values())
    found = _evaluate(run, args, out)
    write_atomic(out / "results.json", json.dumps(_as_dict(config, run, args, found), indent=2) + "\n")
    _show(found)
    print(clean(f"results and samples are in {out}"))
    return 0


def _run(args: argparse.Namespace) -> tuple[DictConfig, Run]:
    from grpocli.composition.checks import check_files
    from grpocli.composition.compose import build_run

    overrides = list(args.overrides)
    if args.run:
        if any(one.startswith(("model=", "model.path=", "resume=")) for one in overrides):
            raise ConfigError("the model is the run's own", key="--run", hint="leave out model= and model.path=")
        overrides.insert(0, f"resume={args.run}")
    config = composed(overrides, args.config_dir)
    run = build_run(config)
    if (run.hardware.processes or 1) > 1 or run.hardware.nodes > 1:
        raise ConfigError("an evaluation runs in one process", key="hardware.processes", value=run.hardware.processes)
    check_files(run)
    if args.run and not args.checkpoints:  # the final model: LoRA's updates are added to weights of all their bits
        lora = replace(run.model.lora, rank=0, path=None)
        run = replace(run, model=replace(run.model, lora=lora, quantization=None))
    return config, run


def _models(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(name, path) of each model of --run to evaluate; empty without --run."""
    from grpocli_tools.evaluation.evaluate import checkpoints_of

    if args.checkpoints:
        return checkpoints_of(args.run, args.checkpoints)
    if args.run and not (args.run / "model").is_dir():
        raise ConfigError("has no final model yet", key="--run", value=args.run, hint="give --checkpoints all")
    return [(str(args.run / "model"), str(args.run / "model"))] if args.run else []


def _evaluate(run: Run, args: argparse.Namespace, out: Path) -> list[ModelResult]:
    from grpocli.hardware import devices_of
    from grpocli.launch.run import prepare
    from grpocli.rewards.reward import answer_columns
    from grpocli.runs.rollouts import evaluation_records, write_rollouts
    from grpocli.runs.run_dir import RunDir
    from grpocli_tools.evaluation.evaluate import Evaluation

    models = _models(args)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("exists already", key="--out", value=out, hint="give another folder")
    found = []
    with stages() as view:
        out_dir = RunDir(out, "--out")
        job = prepare(run, out_dir, view, devices_of(run.hardware, run.engine.resolved()), split="eval").engine
        out_dir.check_writable(resuming=True)
        given = str(getattr(run.model, "path", ""))  # the name on the hub rather than the folder of its download
        models = models or [(given if given.startswith(PREFIX) else job.model_path, job.model_path)]
        evaluation = Evaluation(run, job, view, args.problems, args.samples, not args.no_greedy)
        for number, one in enumerate(evaluation.results(models)):
            name = "".join(c if c.isalnum() else "_" for c in Path(one.name).name)
            for kind, groups in (("greedy", one.greedy), ("sampled", one.sampled)):
                if groups:
                    path = out / "samples" / f"{number:03d}_{name}_{kind}.parquet"
                    write_rollouts(path, evaluation_records(groups), 0, answer_columns(run.reward.values()))
            found.append(one)
    return found


def _as_dict(config: DictConfig, run: Run, args: argparse.Namespace, found: Sequence[ModelResult]) -> dict[str, object]:
    from grpocli.config.environment import without_environment

    rollout = without_environment(config)["rollout"]
    return {
        "settings": {
            "samples": args.samples,
            "problems": args.problems,
            "overrides": args.overrides,
            "run": args.run and str(args.run),
        },
        "sampling": {name: rollout.get(name, value) for name, value in asdict(run.rollout.sampling).items()},
        "models": [{"name": one.name, "tasks": [task.as_dict() for task in one.tasks]} for one in found],
    }


def _show(found: Sequence[ModelResult]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from grpocli_tools.console import CleanConsole
    from grpocli_tools.evaluation.significance import Paired

    scores = dict.fromkeys(score for one in found for task in one.tasks for score in task.scores)
    table = Table(box=SIMPLE_HEAD)
    for name in ("model", "task"):
        table.add_column(name, overflow="fold")
    for name in ("questions", *scores, "length", "cut off", "failed"):
        table.add_column(name, justify="right")
    for one in found:
        for task in one.tasks:
            cells = [
                f"{s.value:.3f}\n{s.low:.3f} to {s.high:.3f}" if (s := task.scores.get(name)) else "" for name in scores
            ]
            rest = [f"{task.mean_length:.0f}", f"{task.truncated:.1%}", str(task.failed)]
            table.add_row(Path(one.name).name, task.task, str(task.questions), *cells, *rest)
    console = CleanConsole(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "below each score: its 95 % confidence interval over questions (Wilson, several samples by design effect)"
    )
    for one in found[1:]:
        for first, task in zip(found[0].tasks, one.tasks, strict=True):
            if paired := Paired.of(first.by_problem, task.by_problem):
                names = f"{Path(one.name).name} against {Path(found[0].name).name}"
                console.print(f"{task.task}, {names}: {paired.change:+.3f}, {paired}")
