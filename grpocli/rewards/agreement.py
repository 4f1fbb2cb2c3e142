"""Whether rewards agree with the answers of a task's own examples, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from grpocli.data import Text
from grpocli.rewards.reward import BaseReward, Failure, Sample
from grpocli.rewards.scoring import call
from grpocli.tasks.task import Example

KINDS = {"own": True, "empty": False, "other": False}
"""What an example is answered with, and whether that is right."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """kind: of KINDS. number: of the example. score: None where the reward failed, for a `reason`."""

    kind: str
    number: int
    sample: Sample
    score: float | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """An answer is right where it scores 1 or more, as in evaluations."""
        return self.score is not None and (self.score >= 1) == KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one reward with one task. seconds: for all of its calls. column: where the examples' own answers are."""

    task: str
    reward: str
    verdicts: list[Verdict]
    seconds: float
    column: str

    @property
    def share(self) -> float:
        """Of all verdicts, failures included."""
        return sum(one.agrees for one in self.verdicts) / len(self.verdicts) if self.verdicts else 1.0

    def of(self, kind: str) -> list[Verdict]:
        return [one for one in self.verdicts if one.kind == kind]

    @property
    def disagreements(self) -> list[Verdict]:
        return [one for one in self.verdicts if not one.agrees]


def agreement(task: str, name: str, reward: BaseReward, examples: Sequence[Example], template: str) -> Agreement:
    """Score each example's own answer, an empty one and another example's, written as `template` says."""
    column = reward.solution_column or getattr(reward, "answer_column", "answer")
    answers = [str(example.get(column, "")) for example in examples]
    cases = list(chain.from_iterable(_cases(i, answers, template) for i in range(len(answers))))
    samples = [_sample({**examples[i], "task_name": task}, text) for _, i, text in cases]
    start = time.perf_counter()
    scores = call(reward, samples)
    seconds = time.perf_counter() - start
    verdicts = []
    for (kind, i, _), sample, score in zip(cases, samples, scores, strict=True):
        if score is None:
            score = Failure("it does not apply")
        if isinstance(score, Failure):
            verdicts.append(Verdict(kind, i, sample, None, score.reason))
        else:
            verdicts.append(Verdict(kind, i, sample, score))
    return Agreement(task, name, verdicts, seconds, column)


def _cases(i: int, answers: Sequence[str], template: str) -> Iterator[tuple[str, int, str]]:
    yield "own", i, template.replace("{answer}", answers[i])
    yield "empty", i, ""
    others = (answers[(i + k) % len(answers)] for k in range(1, len(answers)))
    other = next((text for text in others if text.strip() != answers[i].strip()), None)
    if other is not None:
        yield "other", i, template.replace("{answer}", other)


def _sample(example: Example, text: str) -> Sample:
    prompt: Text = example["prompt"]
    completion: Text = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    columns = {name: value for name, value in example.items() if name != "prompt"}
    return Sample(prompt, completion, text, columns, token_ids=[], max_tokens=0, truncated=False)
