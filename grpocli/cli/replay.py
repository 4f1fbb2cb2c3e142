"""`grpocli replay`: compute recorded steps of a run again, and compare them with the record."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.cli.hydra_app import composed, parser_of
from grpocli.errors import ConfigError, GrpoError

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.replay.replay import Replay
    from grpocli.replay.source import Session
    from grpocli.tracking.view import View

EXAMPLES = """\
A step is replayed from the newest checkpoint before it, or from the initial model, over the recorded rollouts: nothing
is sampled, and nothing is written in the run's folder. Overrides (hardware.device=cpu, model.path=FOLDER) change the
run's config. Exit code 0: everything agrees; 1: something differs.

examples
  grpocli replay runs/DATE/TIME                            the last step
  grpocli replay RUN --step 12
  grpocli replay RUN --step :                              all steps, in one pass
  grpocli replay RUN --step 12 --reward rewards.py:strict  what another reward would have said
  grpocli replay RUN --step 12 --algorithm dapo            another algorithm's advantages, loss and gradient norm
"""
HARMLESS = ("engine", "sync", "hardware", "tracker", "checkpoint", "eval", "resume_fallback", "train.steps")
"""Keys that do not change what a step computes. A schedule of the learning rate makes `train.steps` one that does."""


def main(argv: Sequence[str]) -> int:
    """Replay steps and print a report. Returns the exit code. Raises GrpoError."""
    args = _parser().parse_intermixed_args(argv)
    run_folder, args.overrides = _folder(args.overrides)
    from grpocli.tracking.rollout_query import step_files
    from grpocli.tracking.runs import check_run

    check_run(run_folder, f"RUN {run_folder}")
    files = step_files(run_folder, args.step or ":")[0 if args.step else -1 :]
    steps = [int(path.stem.removeprefix("step_")) for path in files]
    from grpocli.replay.render import as_dict, as_text
    from grpocli.tracking.live_view import status_view

    view = status_view()
    try:
        with _replay(run_folder, args, steps, view) as replay:
            reports = list(replay.reports(steps))
            others = list(_what_if(replay, args, steps, view))
    finally:
        view.stop()
    text = as_text(run_folder, reports, others)
    print(json.dumps(as_dict(run_folder, reports, others), indent=2) if args.json else text)
    return 0 if all(report.agrees for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("replay", "RUN [--step N|FROM:TO] [--reward NAME] [--algorithm NAME]", __doc__, EXAMPLES)
    parser.add_argument("--step", metavar="N|FROM:TO", help="these steps; `:` is all of them (the last one)")
    parser.add_argument("--reward", metavar="NAME", help="also score with this reward, as in reward=[NAME]")
    parser.add_argument(
        "--algorithm", action="append", default=[], metavar="NAME|KEY=VALUE", help="also compute this algorithm's step"
    )
    parser.add_argument("--json", action="store_true", help="print counts and all differences as JSON")
    return parser


def _folder(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The run's folder and the overrides among the command's words."""
    folders = [word for word in words if "=" not in word]
    if len(folders) != 1:
        raise ConfigError("give the folder of one run (grpocli replay --help)", key="RUN")
    overrides = [word for word in words if "=" in word]
    if refused := [word for word in overrides if word.startswith(("resume=", "hydra."))]:
        raise ConfigError("RUN names the run", key=refused[0], hint="leave it out")
    return Path(folders[0]), overrides


@contextmanager
def _replay(run_folder: Path, args: argparse.Namespace, steps: Sequence[int], view: View) -> Iterator[Replay]:
    from grpocli.launch.trainer_process import quiet_libraries

    view.stage("loading libraries")
    quiet_libraries()
    session = _session(run_folder, args, view)
    if steps[0] < session.first:
        keys = ", ".join(_changed(run_folder)[1])
        raise ConfigError(
            f"an earlier session trained it, with other values of {keys}",
            key="--step",
            value=args.step or steps[0],
            hint=f"choose steps from {session.first} on",
        )
    from grpocli.distributed.world import World
    from grpocli.replay.replay import Replay
    from grpocli.tracking.run_dir import RunDir

    world = World(session.run.hardware)
    try:
        yield Replay(RunDir(run_folder, "RUN"), [session], world, view.progress, view.stage)
    finally:
        for reward in session.run.reward.values():
            reward.close()
        world.close()


def _session(run_folder: Path, args: argparse.Namespace, view: View) -> Session:
    """The steps that the run's config has trained, and how its model is loaded."""
    from grpocli.launch.compose import build_run
    from grpocli.models.loading import choose_dtype
    from grpocli.replay.source import Session
    from grpocli.rollout.engine import EngineJob
    from grpocli.training.resume_point import latest

    run: Run = build_run(composed([f"resume={run_folder}", *args.overrides], args.config_dir))
    model_path, problem = "", ""
    try:
        model_path = run.model.prepare(lambda fraction, text: view.stage(text, fraction))
    except (GrpoError, OSError) as error:
        problem = f"the initial model cannot be had ({error})"
    known = model_path or str(latest(run_folder / "checkpoints") or "")
    dtype = choose_dtype(run.model.dtype, run.model, known, run.hardware.device) if known else "float32"
    job = EngineJob(model_path, dtype, run.rollout.longest_row, run_folder, run.seed, lora_rank=run.model.lora.rank)
    return Session(_changed(run_folder)[0], 10**9, run, job, problem)


def _changed(run_folder: Path) -> tuple[int, list[str]]:
    """The first step that the run's present config has trained, and the keys that resumes have changed before it."""
    from grpocli.tracking.run_dir import RunDir
    from grpocli.tracking.sessions import read_sessions

    first, keys = 1, []
    for session in read_sessions(RunDir(run_folder)):
        changed = [key for key in session.changes if not f"{key}.".startswith(tuple(f"{one}." for one in HARMLESS))]
        if changed and session.step:
            first, keys = session.step + 1, changed
    return first, keys


def _what_if(replay: Replay, args: argparse.Namespace, steps: Sequence[int], view: View) -> Iterator[dict[str, object]]:
    """What another reward or algorithm would have given, in the last of the steps."""
    if not (args.reward or args.algorithm):
        return
    from grpocli.launch.compose import build_run
    from grpocli.replay.what_if import other_algorithm, other_reward, recorded_groups

    step = steps[-1]
    groups = recorded_groups(replay, step)
    if args.reward:
        rewards = build_run(composed([f"reward=[{args.reward}]"], args.config_dir)).reward
        view.stage(f"scoring with {args.reward}")
        yield {"step": step, "other reward": args.reward, **other_reward(groups, replay, step, rewards)}
    if args.algorithm:
        words = [word if "=" in word else f"algorithm={word}" for word in args.algorithm]
        run = build_run(composed([f"resume={replay.run_dir.path}", *args.overrides, *words], args.config_dir))
        weights = replay.weights_before(step)
        view.stage(f"computing {' '.join(words)}")
        found = other_algorithm(groups, replay, step, weights, run.algorithm)
        yield {"step": step, "other algorithm": " ".join(words), **found}
