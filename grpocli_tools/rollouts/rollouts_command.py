"""`grpocli rollouts`: show, filter and export the completions of a run."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.cli import plain_parser
from grpocli.errors import ConfigError, RunError
from grpocli.text import clean, prompt_text
from grpocli.types import Status
from grpocli_tools.console import paged

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from grpocli_tools.rollouts.rollout_query import Condition, RolloutRow

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
        raise ConfigError(_unknown(unknown[0], argv, parser))
    if args.n < 0:
        parser.error(f"--n {args.n}: must be 0 (all) or more")
    if args.export:
        _check_target(args.export)
    if args.sort and not args.problems:
        parser.error("--sort is for --problems")
    from grpocli_tools.rollouts.rollout_query import Condition, matching_rows, step_files

    conditions = [Condition.parse(text) for text in args.where]
    conditions += [Condition("finish_reason", "=", args.finish)] if args.finish else []
    conditions += [Condition("task", "=", args.task)] if args.task else []
    if args.problems:
        return _problems(args, conditions)
    files = step_files(args.run, args.step or ":")[0 if args.step else -1 :]
    rows: Iterable[RolloutRow] = matching_rows(files, conditions)
    if args.n:
        rows = islice(rows, args.n)
    if args.export:
        return _export(rows, files, args.export)
    return _page(rows, args.whole)


def _unknown(word: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The problem with an unknown word, and advice: columns are filtered with --where."""
    if not word.startswith("--"):
        return f"{word}: give the folder of one run, then options (grpocli rollouts --help)"
    option, _, value = word.partition("=")
    if near := difflib.get_close_matches(option, parser._option_string_actions, n=1, cutoff=0.85):
        return f'there is no option {option}; did you mean "{near[0]}"?'
    after = [value, *argv[list(argv).index(word) + 1 :]]
    value = next((one for one in after if one and not one.startswith("-")), "VALUE")
    condition = shlex.quote(f"{option.removeprefix('--').replace('-', '_')}={value}")
    return f"there is no option {option}; write --where {condition}"


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
        help="the order of --problems, hardest or latest first",
    )
    parser.add_argument(
        "--n", "--limit", type=int, default=0, metavar="N", help="only the first N matches or problems; 0: all"
    )
    parser.add_argument("--whole", action="store_true", help=f"do not cut texts after {SHOWN:,} characters")
    parser.add_argument(
        "--export", metavar="FILE", help="export all columns to FILE.jsonl, FILE.parquet or hub:OWNER/NAME"
    )
    return parser


def _page(rows: Iterable[RolloutRow], whole: bool) -> int:
    rest = iter(rows)
    first = list(islice(rest, 1))
    if not first:
        print("no completion matches", file=sys.stderr)
        return 1
    with paged() as console:
        for row in chain(first, rest):
            _show(console, row, whole)
    return 0


def _problems(args: argparse.Namespace, conditions: Sequence[Condition]) -> int:
    """Show or export the problems of a run, from its rollout files, otherwise from its newest checkpoint's scores."""
    from grpocli.training.resume_point import latest, restoring
    from grpocli_tools.rollouts import problem_table
    from grpocli_tools.rollouts.rollout_query import problem_rows, step_files

    keys, checkpoint = problem_table.RunKeys.of(args.run), latest(args.run / "checkpoints")
    if checkpoint and not any((args.run / "rollouts").glob("step_*.parquet")) and not (conditions or args.step):
        with restoring(checkpoint):
            found = problem_table.saved_problems(checkpoint)
    else:
        files = step_files(args.run, args.step or ":")
        there = [int(file.stem.removeprefix("step_")) for file in files]
        if gone := sorted(set(range(there[0], there[-1])) - set(there)):
            steps = ("steps " if gone[1:] else "step ") + ", ".join(map(str, gone[:4])) + (" ..." if gone[4:] else "")
            print(f"warning: rollout files of {steps} are gone: their samples are not counted", file=sys.stderr)
        rows = problem_rows(files, list(conditions))
        found = problem_table.problems_of(rows, keys)
    if not found:
        print("no completion matches", file=sys.stderr)
        return 1
    problem_table.rest(found, keys, args.run)
    found.sort(key=problem_table.SORTS[args.sort or "row"])
    if args.export:
        return _export_table([one.as_dict() for one in found[: args.n or None]], None, args.export, "problems")
    with paged() as console:
        problem_table.show(console, found, args.n)
    return 0


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


def _export(rows: Iterable[RolloutRow], files: Sequence[Path], target: str) -> int:
    from pyarrow import unify_schemas

    from grpocli.runs.rollouts import read_schema

    kept = list(rows)
    if not kept:
        print("no completion matches", file=sys.stderr)
        return 1
    schema = unify_schemas([read_schema(path) for path in files])  # a resume may have changed the rewards
    return _export_table(kept, schema, target, "completions")


def _export_table(rows: list[RolloutRow], schema: Any, target: str, what: str) -> int:
    from datasets import Dataset
    from pyarrow import Table

    table = Dataset(Table.from_pylist(rows, schema=schema))
    if target.startswith("hub:"):
        _to_hub(table, target)
    else:
        _to_file(table, Path(target))
    print(clean(f"{len(rows):,} {what} in {target}"))
    return 0


def _to_hub(table: Dataset, target: str) -> None:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of the client it has chosen

    try:
        table.push_to_hub(target.removeprefix("hub:"), private=True)
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        problem = f"the hub refused it: {reason}; check the name, HF_TOKEN and the network"
        raise RunError(f"--export {target}: {problem}") from error


def _check_target(target: str) -> None:
    path = Path(target)
    if target.startswith("hub:"):
        return
    if path.suffix not in WRITERS:
        raise ConfigError(f"must end in {' or '.join(WRITERS)}, or be hub:OWNER/NAME", key="--export", value=path)
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", key="--export", value=path)


def _to_file(table: object, path: Path) -> None:
    beside = path.with_name(f".tmp-{path.name}")
    try:
        getattr(table, WRITERS[path.suffix])(str(beside))
        beside.replace(path)
    except OSError as error:
        raise ConfigError(str(error.strerror or error), key="--export", value=path) from error
    finally:
        beside.unlink(missing_ok=True)
