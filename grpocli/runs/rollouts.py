"""Rollout files: rollouts/step_000001.parquet has every completion that was sampled for a step, with its status."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import config_errors
from grpocli.files import write_atomic
from grpocli.runs.metrics import LONGEST, to_json
from grpocli.text import prompt_text, shorten, spoken
from grpocli.types import Group, Message, Prompt, Rollout, Row, Status


@dataclass(frozen=True, slots=True)
class Record:
    """One completion of a step's rollout file."""

    rollout: Rollout
    group: int
    """The number of its group in the step."""
    status: Status
    sampled_step: int
    """The step that sampled it, whose metrics count it."""
    reward: float = math.nan
    """The weighted sum of its rewards; NaN if none applies."""
    row: Row | None = None
    """What the update trained on; None outside of the update."""


def evaluation_records(groups: Sequence[Group]) -> list[Record]:
    """Records of the completions of an evaluation."""
    return [Record(r, i, Status.EVALUATED, 0) for i, group in enumerate(groups) for r in group.rollouts]


def reference_answer(columns: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The reference answer of an example as text: the first of these columns that is not None."""
    answer = next((columns[name] for name in names if columns.get(name) is not None), None)
    return answer if answer is None or isinstance(answer, str) else _json(answer)


def write_rollouts(path: Path, records: Sequence[Record], step: int, answers: Sequence[str] = ("answer",)) -> None:
    """Write a row for each record, with the columns of docs/rollouts.md; missing values are null.

    answers: the example columns that may hold the reference answer.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = pa.BufferOutputStream()
    # log-probs hardly repeat, so a dictionary encoding makes the file 1.5 times as large
    pq.write_table(rollout_table(records, step, answers), out, compression="zstd", use_dictionary=False)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, out.getvalue().to_pybytes())


def rollout_table(records: Sequence[Record], step: int, answers: Sequence[str] = ("answer",)) -> Any:
    """The Arrow table of a rollout file. Arguments are those of `write_rollouts`."""
    import pyarrow as pa

    prompts = {id(record.rollout.prompt): record.rollout.prompt for record in records}
    shared = {key: _of_prompt(prompt, answers) for key, prompt in prompts.items()}
    rows = [{"step": step, **_of_record(record), **shared[id(record.rollout.prompt)]} for record in records]
    rewards = dict.fromkeys(name for record in records for name in record.rollout.rewards)
    return pa.Table.from_pylist(rows, schema=rollout_schema(rewards))


def read_rollouts(path: Path, wanted: Callable[[str], bool] = lambda column: True) -> list[dict[str, Any]]:
    """The rows of a rollout file, with the wanted columns. Raises ConfigError if it is broken."""
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:  # `read_table` loads pandas
        columns = [column for column in file.schema_arrow.names if wanted(column)]
        return list(file.read(columns).to_pylist())


def read_schema(path: Path) -> Any:
    """The Arrow schema of a rollout file. Raises ConfigError if it is broken."""
    import pyarrow.parquet as pq

    with _readable(path):
        return pq.read_schema(path)


def _readable(path: Path) -> AbstractContextManager[None]:
    """Turns the errors of Arrow, and of text that is not UTF-8, into a ConfigError."""
    problem = f"{path}: is broken or no parquet file: {{}}; remove it, or name other steps"
    return config_errors(OSError, ValueError, says=problem)


def _of_prompt(prompt: Prompt, answers: Sequence[str]) -> dict[str, Any]:
    """The columns that all completions of a prompt share."""
    reference = reference_answer(prompt.columns, answers)
    return {
        "task": prompt.task,
        "uid": prompt.uid,
        "row": prompt.row,
        "prompt": _utf8(prompt_text(prompt.text)),
        "messages": None if isinstance(prompt.text, str) else _messages(prompt.text),
        "answer": None if reference is None else _utf8(reference),
        "columns": _columns(prompt),
        "prompt_ids": prompt.token_ids,
    }


def _of_record(record: Record) -> dict[str, Any]:
    rollout, done, row = record.rollout, record.rollout.completion, record.row
    return {
        "sampled_step": record.sampled_step,
        "status": str(record.status),
        "group": record.group,
        "completion": _utf8(rollout.text),
        "episode": _messages(done.episode.messages) if done.episode else None,
        "turns": done.episode.turns if done.episode else None,
        "completion_ids": done.token_ids,
        "length": done.written,
        "loss_mask": row.mask if row else [0] * len(done.token_ids),
        "logprobs": None if any(map(math.isnan, done.logprobs[:1])) else done.logprobs,
        "trainer_logprobs": row.logp if row else None,
        "entropies": row.entropy if row else None,
        "ratios": row.ratio if row else None,
        "clipped": None if row is None or row.clipped is None else row.clipped.astype("int8"),
        "reward": to_json(record.reward),  # null for NaN, because a mean over NaN is NaN
        "advantage": row.advantage if row else None,
        "finish_reason": done.finish_reason,
        "version": done.version,
        "version_spans": done.spans,
        **{f"reward/{name}": to_json(value) for name, value in rollout.rewards.items()},
    }


def rollout_schema(rewards: Iterable[str]) -> Any:
    """The Arrow schema of a rollout file with these rewards."""
    import pyarrow as pa

    int32, int64, float32, float64, string = pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()
    ids, floats = pa.list_(int32), pa.list_(float32)
    messages = pa.list_(pa.struct({"role": string, "content": string}))
    example = {"task": string, "uid": string, "row": int64, "group": int32, "prompt": string, "messages": messages}
    written = {"completion": string, "episode": messages, "turns": int32, "answer": string, "columns": string}
    tokens = {"prompt_ids": ids, "completion_ids": ids, "length": int32, "loss_mask": pa.list_(pa.int8())}
    numbers = dict.fromkeys(("logprobs", "trainer_logprobs", "entropies", "ratios"), floats)
    result = {"clipped": pa.list_(pa.int8()), "reward": float64, "advantage": float32, "finish_reason": string}
    version = {"version": int32, "version_spans": pa.list_(ids)}
    started = {"step": int32, "sampled_step": int32, "status": string}
    scores = {f"reward/{name}": float64 for name in rewards}
    return pa.schema(started | example | written | tokens | numbers | result | version | scores)


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages with role and content as text, with calls of tools; `_columns` keeps messages that have more."""
    contents = [spoken(one) if one.get("tool_calls") else one.get("content") for one in messages]
    return [
        {"role": _text(one.get("role")), "content": _text(text)} for one, text in zip(messages, contents, strict=True)
    ]


def _text(value: Any) -> str:
    return _utf8("" if value is None else value if isinstance(value, str) else _json(value))


def _columns(prompt: Prompt) -> str:
    """The columns of the example that rewards get, as a JSON object.

    It includes the prompt's messages if they have more than a role and a text.
    """
    columns = {str(name): value for name, value in prompt.columns.items() if name != "task_name"}
    if not isinstance(prompt.text, str) and _messages(prompt.text) != prompt.text:
        columns["prompt"] = prompt.text
    for name, value in columns.items():
        text = _json(value)
        columns[name] = to_json(value) if len(text) <= LONGEST else shorten(text, LONGEST, counted=True)
    return _utf8(json.dumps(columns, ensure_ascii=False))


def _json(value: Any) -> str:
    return json.dumps(to_json(value), ensure_ascii=False)


def _utf8(text: str) -> str:
    """Replace lone surrogates, which some data sets have and Arrow refuses."""
    return text.encode(errors="replace").decode()
