"""Checks, before training, that rewards agree with the answers of a task's own examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from grpocli.answers.final_answer import final_answer
from grpocli.answers.math_text import plain_number
from grpocli.rewards.reward import BaseReward, Failure, Sample, accepted, answer_text
from grpocli.rewards.scorer import call
from grpocli.types import Text

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
