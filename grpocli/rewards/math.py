"""reward=[math]: whether the final answer equals the reference mathematically."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from grpocli.config.parts import part, require
from grpocli.rewards.reward import Correctness, Failure, Forfeit, Sample, Score, answer_text, answers_of, best_of
from grpocli.rewards.worker_pool import WorkerPool, score_items, shared_pool


@part("reward", "math", package="reward.math")
class Math(Correctness):
    r"""`right` (1) if the final answer equals the reference mathematically (math-verify), else `wrong` (0).

    The final answer is the content of the last \boxed{}, else of the last <answer>, else what follows "####", else the
    last expression after the thinking part. The reference is a number, LaTeX, or ends in "#### 42".
    """

    scores_independently = True
    answer_forms = ("boxed", "tag", "####", "sentence", "decimal", "fraction")
    require_evaluated: bool = True
    r"""If the reference is a number, count a sum, a product or a call such as \binom as wrong even if its value is
    right. Fractions, roots, powers and constants are values."""
    timeout: float = 5.0
    """Seconds for a sample. A completion that takes longer is wrong; a reference that takes longer, or is empty, is a
    failure."""
    workers: int = 0
    """Worker processes; 0: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check(self, columns: Sequence[str]) -> None:
        super().check(columns)
        self._pool().start()

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        answers = [answers_of(sample, self.answer_column) for sample in samples]
        pairs = [(i, answer_text(one)) for i, known in enumerate(answers) if isinstance(known, list) for one in known]
        items = [[answer, samples[i].text, self.require_evaluated] for i, answer in pairs]
        references = [[answer, None] for _, answer in pairs]
        scores: list[list[Score]] = [[one] if isinstance(one, Failure) else [] for one in answers]
        for (i, _), score in zip(pairs, score_items(self._pool(), items, references), strict=True):
            if not isinstance(score, Failure):
                score = Forfeit(self.wrong, score.reason) if isinstance(score, Forfeit) else self.value(score == 1)
            scores[i].append(score)
        return [best_of(one) for one in scores]

    def votes(self, samples: Sequence[Sample]) -> list[str]:
        """The answers; answers of equal value get the same text, so that 0.5 and \\frac{1}{2} are one answer."""
        from grpocli.answers.final_answer import answer_expression  # slow: their patterns are compiled
        from grpocli.answers.math_text import plain_number

        answers = [answer_expression(sample.text) for sample in samples]
        values = {text: plain_number(text) for text in answers}
        first: dict[Fraction | str, str] = {}
        texts = [first.setdefault(text if (value := values[text]) is None else value, text) for text in answers]
        others = [text for text in first.values() if values[text] is None]
        parsed = self._pool().map([[text, None] for text in others])
        alone = {text for text, score in zip(others, parsed, strict=True) if isinstance(score, Failure)}
        votes: dict[str, str] = {}
        for text in first.values():  # one that is empty, or not read in time, is equal only to itself
            known = [one for one in dict.fromkeys(votes.values()) if not alone & {one, text}]
            known = [one for one in known if None in (values[one], values[text])]  # numbers in digits differ
            same = self._pool().map([[one, text, False] for one in known])
            votes[text] = next((one for one, score in zip(known, same, strict=True) if score == 1), text)
        return [votes[text] for text in texts]

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> WorkerPool:
        return shared_pool("grpocli.answers.math_worker:equal", self.workers, self.timeout)
