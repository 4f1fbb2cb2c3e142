"""`grpocli replay`: compute recorded steps again and compare them with the record."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError, GrpoError
from grpocli_tools.command_line import composed, parser_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.views.view import View
    from grpocli_tools.replay.replay import Replay
    from grpocli_tools.replay.source import ReplaySession

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


def main(argv: Sequence[str]) -> int:
    """Replay steps and print a report. Returns the exit code. Raises GrpoError."""
    args = _parser().parse_intermixed_args(argv)
    run_folder, args.overrides = _folder(args.overrides)
    from grpocli.runs.saved_run import check_is_run
    from grpocli_tools.rollouts.rollout_query import step_files

    check_is_run(run_folder, f"RUN {run_folder}")
    steps = [int(path.stem.removeprefix("step_")) for path in step_files(run_folder, args.step or ":")]
    from grpocli.views.live_view import status_view
    from grpocli_tools.replay.render import as_dict, as_text

    view = status_view()
    try:
        with _replay(run_folder, args, steps, view) as replay:
            if not args.step:
                last, left_out = replay.last_whole(steps)
                steps = [last]
                for note in left_out:
                    view.note(note)
            chosen = _Others.of(replay, args, steps[-1])
            reports = list(replay.reports(steps))
            others: list[dict[str, object]] = []
            failure: GrpoError | None = None
            try:
                others += _what_if(replay, args, steps[-1], chosen, view)
            except GrpoError as error:  # the report is complete without it
                failure = error
    finally:
        view.stop()
    text = as_text(run_folder, reports, others)
    print(json.dumps(as_dict(run_folder, reports, others), indent=2) if args.json else text)
    if failure:
        raise failure
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
    folders = [word for word in words if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1:
        raise ConfigError("give the folder of one run (grpocli replay --help)", key="RUN")
    overrides = [word for word in words if word not in folders]
    if refused := [word for word in overrides if word.startswith(("resume=", "hydra."))]:
        raise ConfigError("RUN names the run", key=refused[0], hint="leave it out")
    return Path(folders[0]), overrides


@contextmanager
def _replay(run_folder: Path, args: argparse.Namespace, steps: Sequence[int], view: View) -> Iterator[Replay]:
    view.stage("loading libraries")
    from grpocli.runs.run_dir import RunDir
    from grpocli_tools.replay.sessions import sessions_of

    run_dir = RunDir(run_folder, "RUN")
    sessions, problem = sessions_of(run_dir, partial(_session, run_folder, args, view))
    if args.step and steps[0] < sessions[0].first:
        hint = f"choose steps from {sessions[0].first} on"
        raise ConfigError(problem, key="--step", value=args.step, hint=hint)
    from grpocli.distributed.world import World
    from grpocli_tools.replay.replay import Replay

    world = World(sessions[-1].run.hardware)
    try:
        yield Replay(run_dir, sessions, world, view.progress, view.stage)
    finally:
        for session in sessions:
            _close_rewards(session.run)
        world.close()


def _close_rewards(run: Run) -> None:
    for reward in run.reward.values():
        reward.close()


def _session(
    run_folder: Path, args: argparse.Namespace, view: View, earlier: Sequence[str], first: int, last: int
) -> ReplaySession:
    """The session of these steps, and how its model is loaded. earlier: overrides with the values it had."""
    from grpocli.composition.compose import build_run
    from grpocli.models.loading import choose_dtype
    from grpocli.rollout.engine import EngineJob
    from grpocli.training.resume_point import latest
    from grpocli_tools.replay.source import ReplaySession

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


@dataclass(frozen=True, slots=True)
class _Others:
    """What to compare with: the rewards of --reward, and a run with the algorithm of --algorithm; None without."""

    rewards: dict[str, Any] | None
    run: Run | None

    @classmethod
    def of(cls, replay: Replay, args: argparse.Namespace, step: int) -> _Others:
        """Raises GrpoError for a reward or an algorithm that cannot be had."""
        from grpocli.composition.compose import build_run
        from grpocli_tools.replay.what_if import check_rewards

        rewards, run = None, None
        if args.reward:
            rewards = build_run(composed([f"reward=[{args.reward}]"], args.config_dir)).reward
            check_rewards(rewards, replay.recorded(step).groups)
        if args.algorithm:
            words = _algorithm_words(args)
            run = build_run(composed([f"resume={replay.run_dir.path}", *args.overrides, *words], args.config_dir))
            run = replace(run, reward=run.reward | _added_rewards(words, run, args.config_dir))
        return cls(rewards, run)


def _algorithm_words(args: argparse.Namespace) -> list[str]:
    """The overrides of --algorithm."""
    return [word if "=" in word else f"algorithm={word}" for word in args.algorithm]


def _what_if(
    replay: Replay, args: argparse.Namespace, step: int, chosen: _Others, view: View
) -> Iterator[dict[str, object]]:
    """What another reward or algorithm would have given in a step."""
    if chosen.rewards is None and chosen.run is None:
        return
    from grpocli_tools.replay.what_if import other_algorithm, other_reward, recorded_groups

    groups = recorded_groups(replay, step)
    if chosen.rewards is not None:
        view.stage(f"scoring with {args.reward}")
        found = other_reward(groups, replay, step, chosen.rewards)
        for reward in chosen.rewards.values():
            reward.close()
        yield {"step": step, "other reward": args.reward, **found}
    if chosen.run is not None:
        words = " ".join(_algorithm_words(args))
        weights = replay.weights_before(step)
        view.stage(f"computing {words}")
        found = other_algorithm(groups, replay, step, weights, chosen.run)
        _close_rewards(chosen.run)
        yield {"step": step, "other algorithm": words, **found}


def _added_rewards(words: Sequence[str], run: Run, config_dir: str | None) -> dict[str, Any]:
    """The rewards that an algorithm brings along, such as DAPO's `overlong`, and the run does not have."""
    from grpocli.composition.compose import build_run

    chosen = [word for word in words if word.startswith("algorithm=")]
    length = f"rollout.max_completion_tokens={run.rollout.max_completion_tokens}"
    default, other = (build_run(composed([length, *some], config_dir)).reward for some in ([], chosen))
    return {name: reward for name, reward in other.items() if name not in default and name not in run.reward}
