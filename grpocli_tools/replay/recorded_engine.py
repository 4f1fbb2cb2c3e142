"""An engine that samples nothing: it returns the recorded tokens, so that a step runs again on its own rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from grpocli.rollout.engine import Engine, Listener, OnGroup, ignore_group
from grpocli.rollout.sampling import StopStrings
from grpocli.types import Completion, Request, ReusableKV, Sampling

UNFINISHED = "unfinished"
"""The finish reason of recorded tokens that end without an end token, a stop string or the length limit."""


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The recorded tokens of one completion, those of its environment included.

    versions: the weight version of each token. finish_reason: the recorded one. mask: 1 for tokens of the model, 0 for
    those of an environment.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    mask: list[int]


@dataclass(slots=True)
class RecordedEngine(Engine):
    """Returns the turns of recorded completions, as an engine that sampled them would.

    Turns end as in sampling: at an end token, a stop string or the limit. So the number of turns, their tokens and
    their finish reasons are computed again rather than read.

    recorded: the completions of each prompt, by uid. end_ids: tokens that end a completion; empty: unknown, then turns
    end where an environment's tokens begin, and the recorded finish reasons hold. The first turn of an episode
    registers its `ReusableKV`, by which later turns find it.
    """

    recorded: Mapping[str, Sequence[RecordedTokens]]
    end_ids: frozenset[int]
    tokenizer: Any
    _episodes: dict[ReusableKV, tuple[RecordedTokens, int]] = field(default_factory=dict)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """The next turn of each completion of each request."""
        listener = Listener.wrap(on_group)
        found = []
        for k, request in enumerate(requests):
            found.append(self._turns(request, request.under(sampling)))
            listener(k, found[k])
        return found

    def _turns(self, request: Request, sampling: Sampling) -> list[Completion]:
        assert request.prompt is not None
        if request.reusable_kv and request.reusable_kv[0] in self._episodes:
            one, prompt_length = self._episodes[request.reusable_kv[0]]
            return [self._turn(one, len(request.token_ids) - prompt_length, request, sampling)]
        everyone = self.recorded[request.prompt.uid]
        for kv, one in zip(request.reusable_kv, everyone, strict=False):
            self._episodes[kv] = one, len(request.token_ids)
        return [self._turn(one, 0, request, sampling) for one in everyone]

    def _turn(self, one: RecordedTokens, start: int, request: Request, sampling: Sampling) -> Completion:
        n, reason = self._end(one, start, request, sampling)
        piece = slice(start, start + n)
        versions = one.versions[piece] or one.versions[-1:]
        spans = [(version, len(list(tokens))) for version, tokens in groupby(versions)]
        return Completion(
            one.token_ids[piece],
            one.logprobs[piece],
            reason,
            min(versions),
            spans=spans if len(spans) > 1 else None,
        )

    def _end(self, one: RecordedTokens, start: int, request: Request, sampling: Sampling) -> tuple[int, str]:
        """The number of tokens of the turn that begins at `start`, and its finish reason."""
        ids = one.token_ids[start : start + sampling.max_tokens]
        if not self.end_ids:
            after = one.mask[start + 1 : start + len(ids)]
            return 1 + after.index(0) if 0 in after else len(ids), one.finish_reason
        watched = StopStrings(self.tokenizer, sampling.stop, request.token_ids) if sampling.stop else None
        for n, token in enumerate(ids, 1):
            if token in self.end_ids or (watched and watched.completed_by(token)):
                return n, "stop"
        if len(ids) == sampling.max_tokens:
            return len(ids), "length"
        return len(ids), UNFINISHED

    def sync(self, version: int) -> dict[str, float]:
        """Do nothing: there are no weights."""
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to stop."""
