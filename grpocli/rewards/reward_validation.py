"""Whether rewards agree with the answers of a task's own examples, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from typing import Any

from grpocli.rewards.answer_text import plain_number
from grpocli.rewards.final_answer import final_answer
from grpocli.rewards.reward import BaseReward, Failure, Sample
from grpocli.rewards.scoring import call
from grpocli.types import Text

KINDS = {"own": True, "empty": False, "other": False}
"""Answers given to every example, and whether each is right."""
FORM_EXAMPLES = 200
"""How many of a split, spread over it, are answered in other forms."""


def _decimal(answer: str) -> str | None:
    number = plain_number(answer)
    if number is None or 10**28 % number.denominator:  # its decimals do not end, or not within Decimal's 28
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
"""Writes an answer in another form; None where it has none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of one answer to one example.

    kind: of KINDS or FORMS. number: of the example. score: None where the reward failed, for a `reason`.
    """

    kind: str
    number: int
    sample: Sample
    score: float | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """An answer is right where it scores 1 or more, as in evaluations."""
        return self.score is not None and (self.score >= 1) == KINDS.get(self.kind, True)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a reward with a split of a task.

    seconds: for all of `verdicts`, without what a reward does once. column: of the examples' own answers.
    forms: verdicts on the same answers in other forms; they do not count in `share`.
    """

    task: str
    reward: str
    verdicts: list[Verdict]
    seconds: float
    column: str
    split: str = ""
    forms: list[Verdict] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of all verdicts, failures included."""
        return sum(one.agrees for one in self.verdicts) / len(self.verdicts) if self.verdicts else 1.0

    def of(self, kind: str) -> list[Verdict]:
        return [one for one in [*self.verdicts, *self.forms] if one.kind == kind]

    @property
    def disagreements(self) -> list[Verdict]:
        return [one for one in [*self.verdicts, *self.forms] if not one.agrees]

    @property
    def failures(self) -> list[list[Verdict]]:
        """The verdicts without a score, those with the same reason together."""
        found: dict[str, list[Verdict]] = {}
        for one in self.disagreements:
            if one.score is None:
                found.setdefault(one.reason, []).append(one)
        return list(found.values())


def agreement(
    task: str, name: str, reward: BaseReward, examples: Sequence[Mapping[str, Any]], template: str, split: str = ""
) -> Agreement:
    """Score each example's own answer, an empty one and another example's, written as `template` says.

    Of `FORM_EXAMPLES` whose own answer is right, also in the forms that the reward reads.
    """
    column = reward.solution_column or getattr(reward, "answer_column", "answer")
    answers = [str(example.get(column, "")) for example in examples]
    finals = [final_answer(answer) for answer in answers]
    cases = list(chain.from_iterable(_cases(i, answers, finals, template) for i in range(len(answers))))
    _verdicts(task, reward, examples, cases[:1])  # imports, and workers that start
    start = time.perf_counter()
    verdicts = _verdicts(task, reward, examples, cases)
    seconds = time.perf_counter() - start
    right = [one.number for one in verdicts if one.kind == "own" and one.agrees]
    some = right[:: max(1, -(-len(right) // FORM_EXAMPLES))]
    texts = ((kind, i, FORMS[kind](finals[i])) for i in some for kind in reward.answer_forms)
    forms = _verdicts(task, reward, examples, [(kind, i, text) for kind, i, text in texts if text is not None])
    return Agreement(task, name, verdicts, seconds, column, split, forms)


def _verdicts(
    task: str, reward: BaseReward, examples: Sequence[Mapping[str, Any]], cases: Sequence[tuple[str, int, str]]
) -> list[Verdict]:
    samples = [_sample({**examples[i], "task_name": task}, text) for _, i, text in cases]
    verdicts = []
    for (kind, i, _), sample, score in zip(cases, samples, call(reward, samples), strict=True):
        if score is None:
            score = Failure("it does not apply")
        if isinstance(score, Failure):
            verdicts.append(Verdict(kind, i, sample, None, score.reason))
        else:
            verdicts.append(Verdict(kind, i, sample, score))
    return verdicts


def _cases(i: int, answers: Sequence[str], finals: Sequence[str], template: str) -> Iterator[tuple[str, int, str]]:
    yield "own", i, template.replace("{answer}", answers[i])
    yield "empty", i, ""
    others = ((i + k) % len(answers) for k in range(1, len(answers)))
    other = next((j for j in others if finals[j].strip() != finals[i].strip()), None)
    if other is not None:
        yield "other", i, template.replace("{answer}", answers[other])


def _sample(example: Mapping[str, Any], text: str) -> Sample:
    prompt: Text = example["prompt"]
    completion: Text = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    columns = {name: value for name, value in example.items() if name != "prompt"}
    return Sample(prompt, completion, text, columns, token_ids=[], max_tokens=0, truncated=False)
