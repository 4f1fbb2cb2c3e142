"""The sampler's log-probs of a step against those of the weights that sampled its completions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpocli.progress import Progress
from grpocli.training.micro_batch import rows_of
from grpocli.types import Completion, Group, Row
from grpocli_tools.replay import checks as limits
from grpocli_tools.replay.checks import Check, Difference
from grpocli_tools.replay.collection import RolloutSource
from grpocli_tools.replay.record import RecordedStep
from grpocli_tools.replay.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplerCheck:
    """Compares each sampled token's log-prob with that of the weights that sampled it.

    Call `logp_before_update`, train, and then `check`. weights: None if there are none, for the reason `no_weights`.
    """

    recorded: RecordedStep
    source: RolloutSource
    weights: Weights | None
    no_weights: str
    progress: Progress

    def logp_before_update(self, rows: Sequence[Row], old: Sequence[Group]) -> dict[int, Tensor]:
        """Log-probs, by place in the file, under the weights that sampled the completion.

        Those that the update computes are left out.
        """
        if self.weights is None or self._no_check():
            return {}
        found: dict[int, Tensor] = {}
        every = dict(zip(self._trained_places, rows, strict=True))
        # with the sampler as old policy, the update computes most rows only after the weights have changed
        at_start = not self.source.run.algorithm.takes_sampler_as_old
        computed = {i for i, row in every.items() if at_start and self.weights.updater.is_computed(row)}
        for group in self.recorded.groups:
            if not group.in_update:
                zeros = torch.zeros(1, self._group_size, dtype=torch.float64)
                own = rows_of([old[group.number]], zeros, self.source.run.algorithm, self.recorded.step)
                every |= {group.number * self._group_size + k: row for k, row in enumerate(own)}
        versions = [_first_version(r.completion) for group in old for r in group.rollouts]
        for version in filter(self.weights.has_version, sorted(set(versions))):
            skipped = computed if version == self.recorded.step else set()
            places = [i for i in every if versions[i] == version and i not in skipped]
            with self.weights.at_version(version):
                found |= dict(zip(places, self.weights.score([every[i] for i in places], self.progress), strict=True))
        return found

    def check(self, rows: Sequence[Row], old: Sequence[Group], scored: Mapping[int, Tensor]) -> Check:
        """The check. rows: after the update. scored: from `logp_before_update`."""
        check = Check("sampler log-probs", "tokens")
        if why := self._no_check():
            check.skip(why, sum(row["length"] or 0 for row in self.recorded.rows))
            return check
        now = {i: row.logp for i, row in zip(self._trained_places, rows, strict=True) if row.logp is not None}
        pairs: list[tuple[int, int, float, float]] = []
        for place, done in enumerate(r.completion for group in old for r in group.rollouts):
            version, unchanged = _first_version(done), done.spans[0][1] if done.spans else len(done.token_ids)
            logp = scored.get(place, now.get(place) if version == self.recorded.step else None)
            for t, inside in enumerate(done.mask or [1] * len(done.token_ids)):
                if not inside:
                    continue
                if t >= unchanged:
                    check.skip("weights changed while the completion was sampled")
                elif logp is None or math.isnan(logp[t]):
                    check.skip(f"the weights of version {version} are not available")
                else:
                    pairs.append((place, t, self.recorded.rows[place]["logprobs"][t], float(logp[t])))
        self._compare(check, pairs)
        return check

    @property
    def _group_size(self) -> int:
        return self.source.run.rollout.group_size

    @property
    def _trained_places(self) -> list[int]:
        """The places in the file of the update's rows."""
        return [group.number * self._group_size + k for group in self.recorded.trained for k in range(self._group_size)]

    def _no_check(self) -> str:
        """Why nothing can be compared; empty if it can."""
        run = self.source.run
        if self.weights is None:
            return self.no_weights
        if run.rollout.sampling.structure:
            return f"rollout.{run.rollout.sampling.structure} masks tokens in the sampler only"
        return "the engine rounds the weights" if run.engine.quantizes else ""

    def _compare(self, check: Check, pairs: Sequence[tuple[int, int, float, float]]) -> None:
        assert self.weights is not None
        limit = limits.SAMPLER_TOLERANCE[self.weights.dtype]
        if pairs and self.weights.dtype == "float32":
            usual = statistics.median(abs(old - new) for *_, old, new in pairs)
            limit = min(limit, max(limits.SAMPLER_ROUNDING, limits.SAMPLER_OUTLIER * usual))
        for place, t, old, new in pairs:
            text = self._token_text(place, t) if abs(old - new) > limit else ""
            group, completion = divmod(place, self._group_size)
            difference = Difference(self.recorded.step, "logprobs", old, new, group, completion, t, text)
            check.compare(difference, abs(old - new) <= limit, old == new)

    def _token_text(self, place: int, t: int) -> str:
        return str(self.source.tokenizer.decode([self.recorded.rows[place]["completion_ids"][t]]))


def _first_version(completion: Completion) -> int:
    """The weight version of a completion's first token."""
    return completion.spans[0][0] if completion.spans else completion.version
