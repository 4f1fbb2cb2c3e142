"""`grpocli reward-check`: check rewards against the reference answers of tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpocli.composition.overrides import unescape
from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of, warn_of_rewards

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
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    args.answer = unescape(args.answer)
    if "{answer}" not in args.answer:
        parser.error(f"--answer {args.answer!r}: must have {{answer}} in it")
    if not 0 <= args.threshold <= 1:
        parser.error(f"--threshold {args.threshold}: must be between 0 and 1")
    if args.examples < 0:
        parser.error(f"--examples {args.examples}: must be 0 (all) or more")
    from grpocli.composition.checks import check_data
    from grpocli.composition.compose import build_run
    from grpocli.tasks.prompt_source import doubtful_choices
    from grpocli.views.live_view import status_view

    run = build_run(composed(args.overrides, args.config_dir))
    check_data(run)
    warn_of_rewards(run.reward.values())
    for doubt in doubtful_choices(run).values():
        print(f"warning: {doubt}", file=sys.stderr)
    view = status_view()
    try:
        found = list(_agreements(run, args.split, args.examples, args.answer, view))
        view.stop()
        _show(found, run.reward, args.list)
    finally:
        view.stop()
        for reward in run.reward.values():
            reward.close()
    return 0 if all(one.share >= args.threshold for one, _ in found if one.decides) else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("reward-check", "[--split SPLIT] [--examples N]", __doc__, EXAMPLES)
    parser.add_argument("--split", choices=("train", "eval", "all"), default="all", help="the examples to check (all)")
    parser.add_argument("--examples", type=int, default=0, metavar="N", help="the first N of a split; 0: all")
    parser.add_argument(
        "--threshold", type=float, default=0.99, metavar="SHARE", help="the share of answers that must agree (0.99)"
    )
    parser.add_argument("--answer", default="{answer}", metavar="TEXT", help="the template of an answer ({answer})")
    parser.add_argument("--list", type=int, default=20, metavar="N", help="the number of disagreements to show (20)")
    return parser


def _agreements(
    run: Run, split: str, limit: int, template: str, view: View
) -> Iterator[tuple[Agreement, Sequence[Example]]]:
    """The agreement of each reward on each split, with the examples, which know their rows."""
    from grpocli.rewards.python import PythonReward
    from grpocli.rewards.reward import Correctness
    from grpocli.tasks.prompt_source import rewards_for
    from grpocli.tasks.task import columns_of, errors_below, key_of, tasks_of
    from grpocli_tools.reward_check.reward_validation import agreement

    checked = 0
    for name, task in tasks_of(run.task).items():
        every = {name: run.reward[name] for name in rewards_for(task, run.reward)}
        names = [name for name, reward in every.items() if reward.checks_answers and not reward.sees_group]
        deciding = [one for one in names if isinstance(run.reward[one], Correctness)]
        accuracy = run.eval.reward if run.eval.reward in names else next(iter([*deciding, *names]), "")
        checked += len(names)
        for one in _splits(task, split) if names else ():
            with errors_below(key_of(run.task, name)):
                source = task.examples(one)
                examples = list(islice(source, limit or None))
                for reward in names:
                    run.reward[reward].check(columns_of(examples[0]))
            for reward in names:
                view.stage(f"{reward} scores {name} {one}, {len(examples):,} examples")
                found = agreement(name, reward, run.reward[reward], examples, template, one)
                # of a function of the user only its scores tell whether it decides, unless eval.reward names it
                open_kind = isinstance(run.reward[reward], PythonReward) and reward != run.eval.reward
                decides = not open_kind or {answer.score for answer in found.answers} <= {0, 1, None}
                yield replace(found, decides=reward == accuracy and decides), source
    if not checked:
        problem = "none of them decides whether an answer is right"
        raise ConfigError(problem, key="reward", value=f"[{', '.join(run.reward)}]", hint="choose one that does")


def _splits(task: Any, chosen: str) -> Sequence[str]:
    """The splits to check. A task that only evaluates has no split to train on."""
    if chosen != "all":
        return [chosen]
    return ["eval"] if getattr(task, "split", "") is None else ["train", "eval"]


def _show(
    checked: Sequence[tuple[Agreement, Sequence[Example]]], rewards: Mapping[str, BaseReward], limit: int
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from grpocli.text import one_line
    from grpocli_tools.console import CleanConsole

    found = [one for one, _ in checked]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("task", "split", "reward"):
        table.add_column(column, no_wrap=True)
    for column in ("own", "empty", "other", "errors", "agreement", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        kinds = [one.of(kind) for kind in ("own", "empty", "other")]
        errors = sum(answer.score is None for answer in one.answers)
        cells = [_agreeing(answers) for answers in kinds]
        if not one.decides:
            scores = [[v.score for v in answers if v.score is not None] for answers in kinds]
            cells = [f"{fmean(of_kind):.3g}" if of_kind else "" for of_kind in scores]
        each, share = 1000 * one.seconds / max(len(one.answers), 1), f"{one.share:.2%}" if one.decides else ""
        table.add_row(one.task, one.split, one.reward, *cells, str(errors), share, f"{each:.2f}")
    console = CleanConsole(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(LEGEND)
    if not any(one.decides for one in found):
        console.print(
            "no reward is judged: none scores only 0 and 1; eval.reward=NAME names the one that measures accuracy\n"
        )
    if any(one.forms for one in found):
        console.print(_forms(found))
    for one, source in checked:
        failures = one.failures
        wrong = [answer for answer in one.disagreements if answer.score is not None and one.decides]
        lines = chain(
            (_failure_line(one, answers, source) for answers in failures),
            (_line(one, answer, rewards[one.reward], source) for answer in wrong),
        )
        for line in islice(lines, limit):
            console.print(one_line(line), soft_wrap=True)
        if (total := len(failures) + len(wrong)) > limit:
            console.print(f"{one.task} {one.split} {one.reward}: {total - limit} more; --list {total} shows all")


def _agreeing(answers: Sequence[ScoredAnswer]) -> str:
    """The examples all of whose answers agree, of all examples."""
    rows, wrong = {one.number for one in answers}, {one.number for one in answers if not one.agrees}
    return f"{len(rows) - len(wrong)}/{len(rows)}"


def _forms(found: Sequence[Agreement]) -> Table:
    """A table of the right answers that are also right in other forms."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from grpocli_tools.reward_check.reward_validation import FORMS

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("task", "split", "reward"):
        table.add_column(column, no_wrap=True)
    for form in FORMS:
        table.add_column(form, justify="right", no_wrap=True)
    for one in found:
        tried = [one.of(form) for form in FORMS]
        cells = [f"{sum(v.agrees for v in answers)}/{len(answers)}" if answers else "" for answers in tried]
        table.add_row(one.task, one.split, one.reward, *cells)
    return table


def _failure_line(one: Agreement, answers: Sequence[ScoredAnswer], source: Sequence[Example]) -> str:
    """The line for all answers on which a reward failed for one reason."""
    count = f"{len(answers):,} answer{'s' * (len(answers) > 1)}"
    first = f"first of {_row(answers[0], source)}"
    return f"{one.task} {one.split} {one.reward}: fails on {count}, {first}: {answers[0].reason}"


def _line(one: Agreement, answer: ScoredAnswer, reward: BaseReward, source: Sequence[Example]) -> str:
    """The line for a wrong score."""
    from grpocli.rewards.scorer import excerpt

    what = {"own": "its own answer", "empty": "an empty answer", "other": "another's answer"}.get(
        answer.kind, f"its own answer ({answer.kind})"
    )
    why = reward.explain(answer.sample)
    score = f"scores {answer.score:g}" + (f" ({why})" if why else "")
    own = excerpt(str(answer.sample.columns.get(one.column)))
    where = f"{one.task} {one.split} {one.reward}: {_row(answer, source)}"
    return f"{where}: {what} {excerpt(answer.sample.text)} {score} (answer {own})"


def _row(answer: ScoredAnswer, source: Sequence[Example]) -> str:
    from grpocli.tasks.dataset import Examples

    return source.where(answer.number) if isinstance(source, Examples) else f"example {answer.number + 1}"
