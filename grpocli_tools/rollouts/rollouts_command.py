"""`grpocli rollouts`: show, filter and export the completions of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.cli import plain_parser
from grpocli.errors import ConfigError, RunError
from grpocli.text import clean, one_line, prompt_text
from grpocli.types import Status
from grpocli_tools.command_line import whole_number
from grpocli_tools.console import paged

if TYPE_CHECKING:
    from rich.console import Console

    from grpocli_tools.rollouts.rollout_query import RolloutRow

EXAMPLES = """\
examples
  grpocli rollouts runs/DATE/TIME                          the last step, a page at a time
  grpocli rollouts RUN --step 10:20 --finish length        completions that were cut off in steps 10 to 20
  grpocli rollouts RUN --where 'math<1' --where 'task=gsm8k' --n 5
  grpocli rollouts RUN --where status=filtered             completions of groups with equal scores
  grpocli rollouts RUN --problems --sort pass_rate --n 20  the problems with the lowest pass rates
  grpocli rollouts RUN --step : --export all.jsonl         every completion of the run, or .parquet, or hub:OWNER/NAME
"""
WRITERS = {".jsonl": "to_json", ".parquet": "to_parquet"}
"""The method of a table that exports it, by the file's suffix."""
SHOWN = 2000
"""Characters shown of a prompt or completion without --whole."""


def main(argv: Sequence[str]) -> int:
    """Show or export completions. Returns the exit code. Raises ConfigError for a missing run, step or column."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; columns are filtered with --where COLUMN=VALUE")
    if args.export:
        _check_target(args.export)
    from grpocli.runs.saved_run import SavedRun
    from grpocli_tools.rollouts.rollout_query import Condition, matching_rows, steps_of

    saved = SavedRun(args.run)
    conditions = [Condition.parse(text) for text in args.where]
    conditions += [Condition("finish_reason", "=", args.finish)] if args.finish else []
    conditions += [Condition("task", "=", args.task)] if args.task else []
    if args.problems:
        from grpocli_tools.rollouts import problem_table

        problems = problem_table.problems_of(saved, args.step, conditions)
        problems.sort(key=problem_table.SORTS[args.sort])
        if problems and not args.export:
            with paged() as console:
                problem_table.show(console, problems, args.n)
            return 0
        return _export([one.as_dict() for one in problems[: args.n or None]], None, args.export, "problems")
    steps = steps_of(saved, args.step or ":")[0 if args.step else -1 :]
    rows = islice(matching_rows(saved, steps, conditions), args.n or None)
    if args.export:
        from pyarrow import unify_schemas

        from grpocli.runs.rollouts import read_schema

        files = [saved.rollout_files[step] for step in steps]
        schema = unify_schemas([read_schema(path) for path in files])  # a resume may have changed the rewards
        return _export(list(rows), schema, args.export, "completions")
    first = list(islice(rows, 1))
    if not first:
        return _nothing()
    with paged() as console:
        for row in chain(first, rows):
            _show(console, row, args.whole)
    return 0


def _nothing() -> int:
    print("no completion matches", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = plain_parser("rollouts", "Show, filter and export the completions of a run.", EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", metavar="N|FROM:TO", help="only these steps (the last one; with --problems all)")
    parser.add_argument("--task", metavar="NAME", help="only this task")
    parser.add_argument("--finish", choices=("stop", "length"), help="only completions that ended like this")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN<VALUE",
        help="filter by a reward, status, advantage, columns.NAME of the examples ...",
    )
    parser.add_argument("--problems", action="store_true", help="a line for each problem instead of its completions")
    parser.add_argument(
        "--sort",
        choices=("row", "pass_rate", "sampled", "last"),
        default="row",
        help="the order of --problems, hardest or latest first",
    )
    parser.add_argument(
        "--n", "--limit", type=whole_number, default=0, metavar="N", help="only the first N matches or problems; 0: all"
    )
    parser.add_argument("--whole", action="store_true", help=f"do not cut texts after {SHOWN:,} characters")
    parser.add_argument(
        "--export", metavar="FILE", help="export all columns to FILE.jsonl, FILE.parquet or hub:OWNER/NAME"
    )
    return parser


def _show(console: Console, row: RolloutRow, whole: bool) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(clean(text), style=style, soft_wrap=True)

    say(f"── {_title(row)}".replace("\n", " "), "dim")
    say(_cut(row["prompt"], whole), "dim")
    said = row.get("episode")
    say(_cut(prompt_text(said) if said and len(said) > 1 else row["completion"], whole))
    if row.get("answer") is not None:
        say(f"reference: {_cut(row['answer'], whole)}", "cyan")


def _title(row: RolloutRow) -> str:
    """The origin of a completion, its scores, and its status unless it was trained on."""
    rewards = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    status = row.get("status", Status.TRAINED)
    parts = [
        f"step {row['step']}  group {row['group']}",
        f"task {row['task']}" if row.get("task") else "",
        *(f"{name} {'-' if value is None else f'{value:g}'}" for name, value in rewards.items()),
        "" if row["advantage"] is None else f"advantage {row['advantage']:.3f}",
        f"{len(row['completion_ids'])} tokens, {row['finish_reason']}",
        "" if status == Status.TRAINED else status,
    ]
    return "  ".join(part for part in parts if part)


def _cut(text: str, whole: bool) -> str:
    more = len(text) - SHOWN
    return text if whole or more <= 0 else f"{text[:SHOWN]} ... ({more:,} more characters: --whole)"


def _export(rows: list[RolloutRow], schema: Any, target: str, what: str) -> int:
    """Write rows to a file, or to a private data set on the hub. Returns the exit code."""
    if not rows:
        return _nothing()
    from datasets import Dataset
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of the client it has chosen
    from pyarrow import Table

    table, path = Dataset(Table.from_pylist(rows, schema=schema)), Path(target)
    beside = path.with_name(f".tmp-{path.name}")
    try:
        if target.startswith("hub:"):
            table.push_to_hub(target.removeprefix("hub:"), private=True)
        else:
            getattr(table, WRITERS[path.suffix])(str(beside))
            beside.replace(path)
    except (OSError, ValueError, HTTPError) as error:
        raise RunError(f"--export={target}: {one_line(str(error))[:300]}") from error
    finally:
        beside.unlink(missing_ok=True)
    print(clean(f"{len(rows):,} {what} in {target}"))
    return 0


def _check_target(target: str) -> None:
    path = Path(target)
    if target.startswith("hub:"):
        return
    if path.suffix not in WRITERS:
        raise ConfigError(f"must end in {' or '.join(WRITERS)}, or be hub:OWNER/NAME", key="--export", value=path)
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", key="--export", value=path)
