"""`grpocli rollouts RUN`: read what a run has sampled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, RunError
from grpocli.tracking.text import clean

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from grpocli.tracking.sampled import Row

EXAMPLES = """\
examples
  grpocli rollouts runs/DATE/TIME                          the last step, a page at a time
  grpocli rollouts RUN --step 10:20 --finish length        what was cut off in steps 10 to 20
  grpocli rollouts RUN --where 'math<1' --where 'task=gsm8k' --n 5
  grpocli rollouts RUN --step : --export all.jsonl         every completion of the run, or .parquet, or hub:OWNER/NAME
"""
WRITERS = {".jsonl": "to_json", ".parquet": "to_parquet"}
"""How a table is exported, by a file's ending."""
SHOWN = 2000
"""Characters of a prompt or completion; --whole shows all."""


def main(argv: Sequence[str]) -> int:
    """Show or export. Returns the exit code; raises ConfigError for what is not there."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.n < 0:
        parser.error(f"--n {args.n}: must be 0 (all) or more")
    if args.export:
        _check_target(args.export)
    from grpocli.tracking.sampled import Condition, rows_of, steps_of

    conditions = [Condition.parse(text) for text in args.where]
    conditions += [Condition("finish_reason", "=", args.finish)] if args.finish else []
    conditions += [Condition("task", "=", args.task)] if args.task else []
    files = steps_of(args.run, args.step or ":")[0 if args.step else -1 :]
    rows: Iterable[Row] = rows_of(files, conditions)
    if args.n:
        rows = islice(rows, args.n)
    if args.export:
        return _export(rows, args.export)
    return _page(rows, args.whole)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpocli rollouts",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", metavar="N|FROM:TO", help="of these steps; the last one by default")
    parser.add_argument("--task", metavar="NAME", help="of this task")
    parser.add_argument("--finish", choices=("stop", "length"), help="that ended like this")
    parser.add_argument(
        "--where", action="append", default=[], metavar="COLUMN<VALUE", help="a reward by name, advantage, group ..."
    )
    parser.add_argument("--n", type=int, default=0, metavar="N", help="the first N that fit; 0: all")
    parser.add_argument("--whole", action="store_true", help=f"texts longer than {SHOWN:,} characters too")
    parser.add_argument("--export", metavar="FILE", help="to FILE.jsonl, FILE.parquet or hub:OWNER/NAME, all columns")
    return parser


def _page(rows: Iterable[Row], whole: bool) -> int:
    from rich.console import Console

    console = Console()
    shown = 0
    with console.pager(styles=True) if sys.stdout.isatty() else nullcontext():
        for row in rows:
            _show(console, row, whole)
            shown += 1
    if not shown:
        print("nothing fits", file=sys.stderr)
    return 0 if shown else 1


def _show(console: Console, row: Row, whole: bool) -> None:
    rewards = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    scores = "  ".join(f"{name} {'-' if value is None else f'{value:g}'}" for name, value in rewards.items())
    task = f"  task {row['task']}" if row.get("task") else ""
    title = (
        f"step {row['step']}  group {row['group']}{task}  {scores}  advantage {row['advantage']:.3f}  "
        f"{len(row['completion_ids'])} tokens, {row['finish_reason']}"
    )
    console.print(f"── {title}", style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(
        clean(_cut(_conversation(row["prompt"]), whole)), style="dim", markup=False, highlight=False, soft_wrap=True
    )
    console.print(clean(_cut(row["completion"], whole)), markup=False, highlight=False, soft_wrap=True)


def _conversation(prompt: str) -> str:
    """A list of messages, which is kept as JSON, as a line or more a message."""
    try:
        messages = json.loads(prompt)
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (json.JSONDecodeError, TypeError, KeyError):
        return prompt


def _cut(text: str, whole: bool) -> str:
    more = len(text) - SHOWN
    return text if whole or more <= 0 else f"{text[:SHOWN]} ... ({more:,} more characters: --whole)"


def _export(rows: Iterable[Row], target: str) -> int:
    from datasets import Dataset, disable_progress_bars

    kept = list(rows)
    if not kept:
        print("nothing fits", file=sys.stderr)
        return 1
    disable_progress_bars()
    names = dict.fromkeys(name for row in kept for name in row)  # a resume may have changed the rewards
    table = Dataset.from_list([{name: row.get(name) for name in names} for row in kept])
    if target.startswith("hub:"):
        _to_hub(table, target)
    else:
        _to_file(table, Path(target))
    print(f"{len(kept):,} completions in {target}")
    return 0


def _to_hub(table: Dataset, target: str) -> None:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of the client it has chosen

    try:
        table.push_to_hub(target.removeprefix("hub:"), private=True)
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        problem = f"the hub did not take it: {reason}; check the name, HF_TOKEN and the network"
        raise RunError(f"--export {target}: {problem}") from error


def _check_target(target: str) -> None:
    path = Path(target)
    if target.startswith("hub:"):
        return
    if path.suffix not in WRITERS:
        raise ConfigError(f"--export {path}: must end in {' or '.join(WRITERS)}, or be hub:OWNER/NAME")
    if not path.parent.is_dir():
        raise ConfigError(f"--export {path}: there is no folder {path.parent}")


def _to_file(table: object, path: Path) -> None:
    beside = path.with_name(f".tmp-{path.name}")
    try:
        getattr(table, WRITERS[path.suffix])(str(beside))
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--export {path}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
