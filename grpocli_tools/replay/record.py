"""The record of a step: its rollout file by group, its line of metrics.jsonl, and an engine that repeats it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.rollout.engine import Engine, Listener, OnGroup, ignore_group
from grpocli.rollout.sampling import StopStrings
from grpocli.runs.rollouts import read_rollouts, read_schema
from grpocli.types import Completion, Prompt, Request, ReusableKV, Sampling, Status

IN_UPDATE = (Status.TRAINED, Status.ZERO_ADVANTAGE, Status.MASKED)
"""Statuses of the rows that a step's update had."""
TOKEN_COLUMNS = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratios", "clipped")
"""Columns with one value for each token of `completion_ids`."""
REQUIRED = (
    *("step", "sampled_step", "status", "group", "uid", "prompt_ids", "completion_ids", "logprobs", "loss_mask"),
    *("finish_reason", "version"),
)
"""The columns that a replay cannot do without. None of their values is null."""
UNFINISHED = "unfinished"
"""The finish reason of recorded tokens that end without an end token, a stop string or the length limit."""

FileRow = dict[str, Any]


def commonest(values: Iterable[Any]) -> Any:
    """The most frequent value, the first of several."""
    (text, _), *_ = Counter(json.dumps(value, default=str) for value in values).most_common(1)
    return json.loads(text)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """The rows of one group, by their place in the file: one damaged cell does not move a row to another group."""

    number: int
    rows: list[FileRow]

    def shared(self, column: str) -> Any:
        """The value of a column that all rows of the group share: the most frequent one."""
        return commonest(row.get(column) for row in self.rows)

    @property
    def uid(self) -> str:
        return str(self.shared("uid"))

    @property
    def in_update(self) -> bool:
        """Whether the step trained on the group."""
        return bool(commonest(row["status"] in IN_UPDATE for row in self.rows))

    @property
    def status(self) -> Status:
        """Why the step did not train on the group; TRAINED if it did."""
        return Status.TRAINED if self.in_update else Status(self.shared("status"))

    @property
    def is_leftover(self) -> bool:
        """Whether it was sampled for the step before."""
        return bool(commonest(row["sampled_step"] < row["step"] for row in self.rows))

    def prompt(self) -> Prompt:
        """The prompt as the file has it."""
        columns = json.loads(self.shared("columns") or "{}")
        messages = columns.pop("prompt", None) or self.shared("messages")
        text = messages if messages is not None else self.shared("prompt")
        columns |= {"task_name": task} if (task := self.shared("task")) else {}
        return Prompt(self.uid, self.shared("prompt_ids"), text, columns, self.shared("row"))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step's record."""

    step: int
    groups: list[RecordedGroup]
    metrics: dict[str, Any] | None
    """Its line of metrics.jsonl; None if there is none (yet)."""

    @classmethod
    def read(cls, path: Path, step: int, group_size: int, metrics: dict[str, Any] | None) -> RecordedStep:
        """Read a rollout file. Raises ConfigError if its rows cannot be those of a step."""
        names = read_schema(path).names
        problems = [f": the column {column} is missing" for column in REQUIRED if column not in names]
        rows = [] if problems else read_rollouts(path)
        problems += [f", row {number}: {damage}" for number, row in enumerate(rows) if (damage := _damage(row))]
        if len(rows) % group_size:
            problems.append(f": {len(rows)} completions are not whole groups of {group_size} (rollout.group_size)")
        if problems:
            raise ConfigError(f"{path}: step {step}{problems[0]}; the file is damaged: name other steps")
        groups = [RecordedGroup(i, rows[i * group_size : (i + 1) * group_size]) for i in range(len(rows) // group_size)]
        return cls(step, groups, metrics)

    @property
    def rows(self) -> list[FileRow]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trained(self) -> list[RecordedGroup]:
        """The groups of the update."""
        return [group for group in self.groups if group.in_update]

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled a row; the step itself without rows."""
        return min((row["version"] for row in self.rows), default=self.step)


def _damage(row: FileRow) -> str:
    """What is wrong with a row that no run has written; empty if nothing is."""
    if null := [column for column in REQUIRED if row[column] is None]:
        return f"the column {null[0]} is null"
    n = len(row["completion_ids"])
    wrong = [column for column in TOKEN_COLUMNS if row.get(column) is not None and len(row[column]) != n]
    return f"the column {wrong[0]} has {len(row[wrong[0]])} values for {n} completion_ids" if wrong else ""


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The recorded tokens of one completion, those of its environment included."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """The weight version of each token."""
    finish_reason: str


@dataclass(slots=True)
class RecordedEngine(Engine):
    """Returns the turns of recorded completions, as an engine that sampled them would.

    Turns end as in sampling: at an end token, a stop string or the limit. So the number of turns, their tokens and
    their finish reasons are computed again rather than read.
    """

    recorded: Mapping[str, Sequence[RecordedTokens]]
    """The completions of each prompt, by uid."""
    end_ids: frozenset[int]
    """Tokens that end a completion; empty: unknown, then a turn has all tokens and the recorded finish reason."""
    tokenizer: Any
    _episodes: dict[ReusableKV, tuple[RecordedTokens, int]] = field(default_factory=dict)
    """Completions and prompt lengths by the `ReusableKV` of their first turn, which later turns name."""

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
        changed = spans if len(spans) > 1 else None
        return Completion(one.token_ids[piece], one.logprobs[piece], reason, min(versions), spans=changed)

    def _end(self, one: RecordedTokens, start: int, request: Request, sampling: Sampling) -> tuple[int, str]:
        """The number of tokens of the turn that begins at `start`, and its finish reason."""
        ids = one.token_ids[start : start + sampling.max_tokens]
        if not self.end_ids:
            return len(ids), one.finish_reason
        watched = StopStrings(self.tokenizer, sampling.stop, request.token_ids) if sampling.stop else None
        for n, token in enumerate(ids, 1):
            if token in self.end_ids or (watched and watched.completed_by(token)):
                return n, "stop"
        return len(ids), "length" if len(ids) == sampling.max_tokens else UNFINISHED

    def sync(self, version: int) -> dict[str, float]:
        """Do nothing: there are no weights."""
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to stop."""
