"""`grpocli replay`: compute recorded steps again and compare them with the record."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, GrpoError
from grpocli_tools.command_line import composed, parse, stages
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.runs.saved_run import SavedRun
    from grpocli.views.view import View
    from grpocli_tools.replay.collection import ReplaySession
    from grpocli_tools.replay.replay import Replay


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("replay", __doc__), argv)
    run_folder, args.overrides = _folder(args.overrides)
    from grpocli.runs.saved_run import SavedRun
    from grpocli_tools.rollouts.rollouts_command import steps_of

    saved = SavedRun(run_folder)
    steps = steps_of(saved, args.step or ":")
    with stages() as view, _replay(saved, args, steps, view) as replay:
        if not args.step:
            last, left_out = replay.last_whole(steps)
            steps = [last]
            for note in left_out:
                view.note(note)
        reports = list(replay.reports(steps))
    from grpocli_tools.replay.render import as_dict, as_text

    print(json.dumps(as_dict(run_folder, reports), indent=2) if args.json else as_text(run_folder, reports))
    return 0 if all(report.agrees for report in reports) else 1


def _folder(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The run's folder and the overrides among the command's words."""
    folders = [word for word in words if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1:
        raise ConfigError("give the folder of one run (grpocli replay --help)", key="RUN")
    overrides = [word for word in words if word not in folders]
    if refused := [word for word in overrides if word.startswith(("resume=", "hydra."))]:
        raise ConfigError("RUN names the run", key=refused[0], hint="leave it out")
    return Path(folders[0]), overrides


@contextmanager
def _replay(saved: SavedRun, args: argparse.Namespace, steps: Sequence[int], view: View) -> Iterator[Replay]:
    view.stage("loading libraries")
    from grpocli.distributed.world import World
    from grpocli_tools.replay.replay import Replay, sessions_of

    def session_of(earlier: Sequence[str], first: int, last: int) -> ReplaySession:
        return _session(saved.path, args, view, earlier, first, last)

    sessions, problem = sessions_of(saved, session_of)
    if args.step and steps[0] < sessions[0].first:
        hint = f"choose steps from {sessions[0].first} on"
        raise ConfigError(problem, key="--step", value=args.step, hint=hint)
    with ExitStack() as stack:
        world = World(sessions[-1].run.hardware)
        stack.callback(world.close)
        for session in sessions:
            for reward in session.run.reward.values():
                stack.callback(reward.close)
        yield Replay(saved, sessions, world, view.progress, view.stage)


def _session(
    run_folder: Path, args: argparse.Namespace, view: View, earlier: Sequence[str], first: int, last: int
) -> ReplaySession:
    """The session of these steps, and how its model is loaded. earlier: overrides with the values it had."""
    from grpocli.composition.compose import build_run
    from grpocli.models.loading import choose_dtype
    from grpocli.rollout.engine import EngineJob
    from grpocli.training.checkpoint import latest
    from grpocli_tools.replay.collection import ReplaySession

    run: Run = build_run(composed([f"resume={run_folder}", *earlier, *args.overrides], args.config_dir))
    if run.algorithm.supervised:
        why = "learned answers of the data (algorithm=sft): nothing was sampled, so there is nothing to compute again"
        raise ConfigError(why, key="RUN", value=run_folder)
    model_path, problem = "", ""
    try:
        model_path = run.model.prepare(lambda fraction, text: view.stage(text, fraction))
    except (GrpoError, OSError) as error:
        problem = f"the initial model is not available ({error})"
    known = model_path or str(latest(run_folder / "checkpoints") or "")
    dtype = choose_dtype(run.model.dtype, run.model, known, run.hardware.device) if known else "float32"
    job = EngineJob(model_path, dtype, run.rollout.longest_row, run_folder, run.seed, lora_rank=run.model.lora.rank)
    return ReplaySession(first, last, run, job, problem)
