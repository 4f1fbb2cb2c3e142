"""rollouts/step_000001.parquet: every completion that a step trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpocli.data import Group
from grpocli.errors import ConfigError
from grpocli.tracking.files import write_atomic


def write_rollouts(path: Path, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int) -> None:
    """A row a completion; conversations are JSON, a reward that does not apply is null.

    version: of the weights that sampled it; where they changed on the way, the oldest, and version_spans has
    [version, number of tokens] of each piece.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        _row(group, i, k, advantages[i][k], step) for i, group in enumerate(groups) for k in range(len(group.rollouts))
    ]
    table = pa.Table.from_pylist(rows, schema=_schema(groups))
    out = pa.BufferOutputStream()
    pq.write_table(table, out, compression="zstd")
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, out.getvalue().to_pybytes())


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of such a file. Raises ConfigError for one that is broken."""
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except ArrowInvalid as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is broken or no parquet file: {reason}; remove it, or name other steps") from error
    return rows


def _row(group: Group, index: int, k: int, advantage: float, step: int) -> dict[str, Any]:
    rollout = group.rollouts[k]
    prompt, done = rollout.prompt, rollout.completion
    rewards = {f"reward/{name}": None if math.isnan(v) else v for name, v in rollout.rewards.items()}
    return {
        "step": step,
        "task": prompt.task,
        "uid": group.uid,
        "group": index,
        "prompt": _utf8(prompt.text if isinstance(prompt.text, str) else json.dumps(prompt.text, ensure_ascii=False)),
        "completion": _utf8(rollout.text),
        "prompt_ids": prompt.token_ids,
        "completion_ids": done.token_ids,
        "logprobs": done.logprobs,
        "advantage": advantage,
        "finish_reason": done.finish_reason,
        "version": done.version,
        "version_spans": done.spans,
        **rewards,
    }


def _utf8(text: str) -> str:
    """Data sets hold lone surrogates now and then, and Arrow refuses them."""
    return text.encode(errors="replace").decode()


def _schema(groups: Sequence[Group]) -> Any:
    import pyarrow as pa

    names = dict.fromkeys(name for group in groups for rollout in group.rollouts for name in rollout.rewards)
    ids = pa.list_(pa.int32())
    return pa.schema(
        [
            ("step", pa.int32()),
            ("task", pa.string()),
            ("uid", pa.string()),
            ("group", pa.int32()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("prompt_ids", ids),
            ("completion_ids", ids),
            ("logprobs", pa.list_(pa.float32())),
            ("advantage", pa.float32()),
            ("finish_reason", pa.string()),
            ("version", pa.int32()),
            ("version_spans", pa.list_(ids)),
            *[(f"reward/{name}", pa.float64()) for name in names],
        ]
    )
