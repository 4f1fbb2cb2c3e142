"""`grpocli reward-check`: check rewards against the reference answers of tasks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpocli.answers.final_answer import final_answer
from grpocli.answers.math_text import plain_number
from grpocli.composition.overrides import unescape
from grpocli.errors import ConfigError
from grpocli.rewards.reward import BaseReward, Failure, Sample, accepted, answer_text
from grpocli.rewards.scorer import call
from grpocli.text import counted
from grpocli.types import Text
from grpocli_tools.command_line import composed, parse, stages, warn_of_rewards
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from rich.table import Table

    from grpocli.config.schema import Run
    from grpocli.rewards.reward import BaseReward
    from grpocli.tasks.task import Example
    from grpocli.views.view import View

LEGEND = """\
own: the reference answer, which has to be right, as is each of several; empty and other: an empty answer and another
example's answer, which have to be wrong; errors: answers that were not scored; ms: time for each answer. Without
agreement: mean scores of a reward that does not measure accuracy
"""


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("reward-check", __doc__, answer={"type": _template}), argv)
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


KINDS = {"own": True, "empty": False, "other": False}
"""The answers to every example, and whether each is right."""
FORM_EXAMPLES = 200
"""Number of examples of a split, evenly spaced, that are answered in other forms."""


def _decimal(answer: str) -> str | None:
    number = plain_number(answer)
    if number is None or 10**28 % number.denominator:  # more decimals than Decimal's 28, or endless
        return None
    return f"{Decimal(number.numerator) / Decimal(number.denominator):f}" + (".0" if number.denominator == 1 else "")


def _fraction(answer: str) -> str | None:
    number = plain_number(answer)
    return None if number is None else rf"$\frac{{{2 * number.numerator}}}{{{2 * number.denominator}}}$"


FORMS: dict[str, Callable[[str], str | None]] = {
    "boxed": lambda answer: rf"It is 12345, no: \boxed{{{answer}}}.",
    "tag": lambda answer: f"<think>It may be 12345.</think>\n<answer>{answer}</answer>",
    "####": lambda answer: f"12345 - 1\n#### {answer}",
    "sentence": lambda answer: f"The answer is {answer if plain_number(answer) is not None else f'${answer}$'}.",
    "decimal": _decimal,
    "fraction": _fraction,
}
"""Functions that write an answer in another form; None if it has no such form."""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer to an example and its score."""

    kind: str
    """One of KINDS or FORMS."""
    number: int
    """The index of the example."""
    sample: Sample
    score: float | None
    """None if the reward failed."""
    reason: str = ""
    """Why it failed."""

    @property
    def agrees(self) -> bool:
        """Whether the score has the expected value; a score of 1 or more is right, as in evaluations."""
        return self.score is not None and (self.score >= 1) == KINDS.get(self.kind, True)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a reward agrees with the answers of a split of a task."""

    task: str
    split: str
    reward: str
    answers: list[ScoredAnswer]
    """The examples' answers, empty ones and other examples' answers."""
    forms: list[ScoredAnswer]
    """The examples' answers in other forms, which do not count in `share`."""
    seconds: float
    """The time to score `answers`, without imports and the start of workers."""
    column: str
    """The column of the examples' own answers."""
    decides: bool = True
    """Whether the reward measures the task's accuracy, so that it has to agree."""

    @property
    def title(self) -> str:
        return f"{self.task} {self.split} {self.reward}"

    @property
    def share(self) -> float:
        """The share of `answers` that agree; failures do not."""
        return sum(one.agrees for one in self.answers) / len(self.answers) if self.answers else 1.0

    def of(self, kind: str) -> list[ScoredAnswer]:
        return [one for one in [*self.answers, *self.forms] if one.kind == kind]


def agreement(
    task: str, split: str, name: str, reward: BaseReward, examples: Sequence[Mapping[str, Any]], template: str
) -> Agreement:
    """Score three answers to each example: its own, an empty one and another example's; `template` formats them.

    Of the examples whose own answer is right, FORM_EXAMPLES are also answered in the other forms that the reward reads.
    """
    column = reward.solution_column or getattr(reward, "answer_column", "answer")
    texts = [list(map(answer_text, accepted(example.get(column)))) or [""] for example in examples]
    finals = [[final_answer(text) for text in of_example] for of_example in texts]
    cases = [case for i in range(len(texts)) for case in _cases(i, texts, finals, template)]
    _score(task, reward, examples, cases[:1])  # imports libraries and starts workers
    start = time.perf_counter()
    answers = _score(task, reward, examples, cases)
    seconds = time.perf_counter() - start
    right = list(dict.fromkeys(one.number for one in answers if one.kind == "own" and one.agrees))
    some = right[:: max(1, -(-len(right) // FORM_EXAMPLES))]
    in_forms = ((kind, i, FORMS[kind](finals[i][0])) for i in some for kind in reward.answer_forms)
    forms = _score(task, reward, examples, [(kind, i, text) for kind, i, text in in_forms if text is not None])
    return Agreement(task, split, name, answers, forms, seconds, column)


def _score(
    task: str, reward: BaseReward, examples: Sequence[Mapping[str, Any]], cases: Sequence[tuple[str, int, str]]
) -> list[ScoredAnswer]:
    samples = [_sample({**examples[i], "task_name": task}, text) for _, i, text in cases]
    answers = []
    for (kind, i, _), sample, score in zip(cases, samples, call(reward, samples), strict=True):
        failure = Failure("it does not apply") if score is None else score if isinstance(score, Failure) else None
        value = None if score is None or isinstance(score, Failure) else score
        answers.append(ScoredAnswer(kind, i, sample, value, failure.reason if failure else ""))
    return answers


def _cases(
    i: int, texts: Sequence[Sequence[str]], finals: Sequence[Sequence[str]], template: str
) -> Iterator[tuple[str, int, str]]:
    """Answers to the i-th example, as (kind, i, text). texts, finals: the accepted answers of each example."""
    for text in texts[i]:
        yield "own", i, template.replace("{answer}", text)
    yield "empty", i, ""
    others = ((i + k) % len(texts) for k in range(1, len(texts)))
    own = {final.strip() for final in finals[i]}
    other = next((j for j in others if finals[j][0].strip() not in own), None)
    if other is not None:
        yield "other", i, template.replace("{answer}", texts[other][0])


def _sample(example: Mapping[str, Any], text: str) -> Sample:
    prompt: Text = example["prompt"]
    completion: Text = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    columns = {name: value for name, value in example.items() if name != "prompt"}
    return Sample(prompt, completion, text, columns, token_ids=[], max_tokens=0, truncated=False)
