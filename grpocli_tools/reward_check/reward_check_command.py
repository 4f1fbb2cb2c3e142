"""`grpocli reward-check`: check rewards against the reference answers of tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING

from grpocli.composition.overrides import unescape
from grpocli.errors import ConfigError
from grpocli.text import counted
from grpocli_tools.command_line import composed, parser_of, stages, warn_of_rewards, whole_number

if TYPE_CHECKING:
    from rich.table import Table

    from grpocli.config.schema import Run
    from grpocli.rewards.reward import BaseReward
    from grpocli.tasks.task import Example
    from grpocli.views.view import View
    from grpocli_tools.reward_check.reward_validation import Agreement, ScoredAnswer

EXAMPLES = """\
The rewards score three answers to each example: its reference answer, which has to be right (a score of 1 or
more), an empty answer and another example's answer, which have to be wrong. Some answers are also scored in other
forms: in a box or an answer tag, after ####, in a sentence, as a decimal or fraction. The reward that measures accuracy
is judged by this; of others the mean scores are shown.
Exit code 1: the agreement of a reward that measures accuracy is below --threshold.

examples
  grpocli reward-check task=gsm8k 'reward=[math]'
  grpocli reward-check task=jsonl task.path=problems.jsonl 'reward=[number]' --split train --examples 200
  grpocli reward-check task=countdown 'reward=[countdown]' --answer '<answer>{answer}</answer>'
"""
LEGEND = """\
own: the reference answer, which has to be right, as is each of several; empty and other: an empty answer and another
example's answer, which have to be wrong; errors: answers that were not scored; ms: time for each answer. Without
agreement: mean scores of a reward that does not measure accuracy
"""


def main(argv: Sequence[str]) -> int:
    """Print the table and the disagreements. Returns the exit code. Raises ConfigError."""
    args = _parser().parse_intermixed_args(argv)
    from grpocli.composition.checks import check_file
    from grpocli.composition.compose import build_run
    from grpocli.tasks.prompt_source import doubtful_choices

    run = build_run(composed(args.overrides, args.config_dir))
    check_file(run, "data")
    warn_of_rewards(run.reward.values())
    for doubt in doubtful_choices(run).values():
        print(f"warning: {doubt}", file=sys.stderr)
    with ExitStack() as stack:
        for reward in run.reward.values():
            stack.callback(reward.close)
        with stages() as view:
            found = list(_agreements(run, args, view))
        _show(found, run.reward, args.list)
    return 0 if all(one.share >= args.threshold for one, _ in found if one.decides) else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("reward-check", "[--split SPLIT] [--examples N]", __doc__, EXAMPLES)
    parser.add_argument("--split", choices=("train", "eval", "all"), default="all", help="the examples to check (all)")
    parser.add_argument("--examples", type=whole_number, default=0, metavar="N", help="the first N of a split; 0: all")
    parser.add_argument(
        "--threshold", type=_share, default=0.99, metavar="SHARE", help="the share of answers that must agree (0.99)"
    )
    parser.add_argument(
        "--answer", type=_template, default="{answer}", metavar="TEXT", help="the template of an answer ({answer})"
    )
    parser.add_argument("--list", type=int, default=20, metavar="N", help="the number of disagreements to show (20)")
    return parser


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return float(text)


def _template(text: str) -> str:
    if "{answer}" not in text:
        raise argparse.ArgumentTypeError(f"{text!r}: must have {{answer}} in it")
    return unescape(text)


def _agreements(run: Run, args: argparse.Namespace, view: View) -> Iterator[tuple[Agreement, Sequence[Example]]]:
    """The agreement of each reward on each split, with the examples, which know their rows."""
    from grpocli.rewards.python import PythonReward
    from grpocli.rewards.reward import Correctness
    from grpocli.tasks.prompt_source import rewards_for
    from grpocli.tasks.task import columns_of, errors_below, key_of
    from grpocli_tools.reward_check.reward_validation import agreement

    checked = 0
    for name, task in run.tasks.items():
        every = {name: run.reward[name] for name in rewards_for(task, run.reward)}
        names = [name for name, reward in every.items() if reward.checks_answers and not reward.sees_group]
        deciding = [one for one in names if isinstance(run.reward[one], Correctness)]
        accuracy = run.eval.reward if run.eval.reward in names else next(iter([*deciding, *names]), "")
        checked += len(names)
        splits = ["eval"] if getattr(task, "split", "") is None else ["train", "eval"]  # some tasks only evaluate
        splits = splits if args.split == "all" else [args.split]
        for split in splits if names else ():
            with errors_below(key_of(run.task, name)):
                source = task.examples(split)
                examples = list(islice(source, args.examples or None))
                for reward in names:
                    run.reward[reward].check(columns_of(examples[0]))
            for reward in names:
                view.stage(f"{reward} scores {name} {split}, {len(examples):,} examples")
                found = agreement(name, split, reward, run.reward[reward], examples, args.answer)
                # of a function of the user only its scores tell whether it decides, unless eval.reward names it
                open_kind = isinstance(run.reward[reward], PythonReward) and reward != run.eval.reward
                decides = not open_kind or {answer.score for answer in found.answers} <= {0, 1, None}
                yield replace(found, decides=reward == accuracy and decides), source
    if not checked:
        problem = "none of them decides whether an answer is right"
        raise ConfigError(problem, key="reward", value=f"[{', '.join(run.reward)}]", hint="choose one that does")


def _show(
    checked: Sequence[tuple[Agreement, Sequence[Example]]], rewards: Mapping[str, BaseReward], limit: int
) -> None:
    from grpocli.text import one_line
    from grpocli_tools.console import CleanConsole
    from grpocli_tools.reward_check.reward_validation import FORMS, KINDS

    found = [one for one, _ in checked]
    console = CleanConsole(width=None if sys.stdout.isatty() else 160)
    console.print(_table(found, [*KINDS, "errors", "agreement", "ms"], _cells))
    console.print(LEGEND)
    if not any(one.decides for one in found):
        console.print(
            "no reward is judged: none scores only 0 and 1; eval.reward=NAME names the one that measures accuracy\n"
        )
    if any(one.forms for one in found):

        def right(one: Agreement) -> list[str]:
            tried = [one.of(form) for form in FORMS]
            return [f"{sum(v.agrees for v in answers)}/{len(answers)}" if answers else "" for answers in tried]

        console.print(_table(found, list(FORMS), right))
    for one, source in checked:
        lines = [*_failures(one, source), *_wrong(one, source, rewards[one.reward])]
        for line in lines[:limit]:
            console.print(one_line(f"{one.title}: {line}"), soft_wrap=True)
        if len(lines) > limit:
            console.print(f"{one.title}: {len(lines) - limit} more; --list {len(lines)} shows all")


def _table(found: Sequence[Agreement], columns: Sequence[str], cells: Callable[[Agreement], list[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("task", "split", "reward"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        table.add_row(one.task, one.split, one.reward, *cells(one))
    return table


def _cells(one: Agreement) -> list[str]:
    """The examples all of whose answers agree; mean scores if the reward does not decide."""
    from grpocli_tools.reward_check.reward_validation import KINDS

    cells = []
    for answers in map(one.of, KINDS):
        examples, wrong = {v.number for v in answers}, {v.number for v in answers if not v.agrees}
        scores = [v.score for v in answers if v.score is not None]
        mean = f"{fmean(scores):.3g}" if scores else ""
        cells.append(f"{len(examples) - len(wrong)}/{len(examples)}" if one.decides else mean)
    errors, milliseconds = sum(v.score is None for v in one.answers), 1000 * one.seconds / max(len(one.answers), 1)
    return [*cells, str(errors), f"{one.share:.2%}" if one.decides else "", f"{milliseconds:.2f}"]


def _failures(one: Agreement, source: Sequence[Example]) -> Iterator[str]:
    """A line for each reason for which answers have no score."""
    by_reason: dict[str, list[ScoredAnswer]] = {}
    for answer in [*one.answers, *one.forms]:
        if answer.score is None:
            by_reason.setdefault(answer.reason, []).append(answer)
    for reason, answers in by_reason.items():
        yield f"fails on {counted(len(answers), 'answer')}, first of {_row(answers[0], source)}: {reason}"


def _wrong(one: Agreement, source: Sequence[Example], reward: BaseReward) -> Iterator[str]:
    """A line for each wrong score of a reward that decides."""
    from grpocli.rewards.scorer import excerpt

    kinds = {"own": "its own answer", "empty": "an empty answer", "other": "another's answer"}
    for answer in [*one.answers, *one.forms]:
        if one.decides and answer.score is not None and not answer.agrees:
            what = kinds.get(answer.kind, f"its own answer ({answer.kind})")
            why = f" ({text})" if (text := reward.explain(answer.sample)) else ""
            own = excerpt(str(answer.sample.columns.get(one.column)))
            said = f"{what} {excerpt(answer.sample.text)} scores {answer.score:g}{why} (answer {own})"
            yield f"{_row(answer, source)}: {said}"


def _row(answer: ScoredAnswer, source: Sequence[Example]) -> str:
    from grpocli.tasks.table import Examples

    return source.where(answer.number) if isinstance(source, Examples) else f"example {answer.number + 1}"
