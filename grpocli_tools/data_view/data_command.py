"""`grpocli data`: show the data of a run as its model will see it: tokens, too long, duplicated."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of, stages, whole_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from grpocli_tools.data_view.data_view import DataView, SplitView

EXAMPLES = """\
For each split: the number of examples, the tokens of their prompts, those that are too long, duplicates, prompts that
are also evaluated on, columns, and the first prompts as the chat template writes them, with special tokens.

examples
  grpocli data task=gsm8k model=qwen2.5-1.5b
  grpocli data task=jsonl task.path=problems.jsonl --split train --example 41
  grpocli data task=hub task.path=OWNER/DATASET task.streaming=true --rows 5000 --longest
  grpocli data algorithm=sft task=gsm8k --json
"""
QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
BINS = 10
SHOWN = 4000
"""Characters shown of a prompt or an answer without --whole."""


def main(argv: Sequence[str]) -> int:
    """Print the view. Returns the exit code. Raises ConfigError for data that a run would refuse."""
    args = _parser().parse_intermixed_args(argv)
    from grpocli.composition.checks import check_file
    from grpocli.composition.compose import build_run
    from grpocli.runs.metrics import to_json
    from grpocli_tools.data_view.data_view import SPLITS, DataView

    run = build_run(composed(args.overrides, args.config_dir))
    check_file(run, "data")
    with stages() as status:

        def report(text: str, done: int, total: int) -> None:
            status.stage(text)
            if total:
                status.progress(done, total, "examples")

        status.stage("loading the tokenizer")
        tokenizer = run.model.tokenizer()
        splits, ends = [args.split] if args.split else SPLITS, run.model.end_ids(tokenizer)
        view = DataView.of(run, tokenizer, ends, splits, args.rows, report)
    if args.example is not None and all(args.example >= split.read for split in view.splits):
        have = ", ".join(f"{split.task} {split.split} has {split.read:,} examples" for split in view.splits)
        raise ConfigError(f"{have}, numbered from 0", key="--example", value=args.example)
    found = [_split(view, split, args) for split in view.splits]
    if args.json:
        names = ("max_prompt_tokens", "max_completion_tokens", "long_prompts")
        limits = {name: getattr(run.rollout, name) for name in names}
        print(json.dumps(to_json({**limits, "splits": found}), allow_nan=False, default=str))
    else:
        _show(view, found, args.whole)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", "[--split SPLIT] [--example N] [--longest] [--json]", __doc__, EXAMPLES)
    parser.add_argument("--split", choices=("train", "eval"), help="this split only (both)")
    parser.add_argument(
        "--prompts", type=whole_number, default=3, metavar="N", help="prompts to show of each split (3)"
    )
    parser.add_argument(
        "--example", type=whole_number, metavar="N", help="show example N, counted from 0, instead of the first"
    )
    parser.add_argument("--longest", action="store_true", help="show the longest prompts instead of the first")
    parser.add_argument(
        "--rows", type=whole_number, metavar="N", help="read N examples of a split (all; 1,000 of a stream)"
    )
    parser.add_argument("--whole", action="store_true", help=f"show prompts of more than {SHOWN:,} characters whole")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


# The figures


def _split(view: DataView, split: SplitView, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a split, and the examples to show."""
    rollout = view.run.rollout
    evaluated = [other for other in view.splits if other.split == "eval"] if split.split == "train" else []
    order: Sequence[int] = range(split.read)
    if args.longest:
        order = sorted(order, key=lambda i: -split.lengths[i])
    chosen = order[: args.prompts] if args.example is None else [args.example] * (args.example < split.read)
    taught = {
        "answer_tokens": _lengths(split.target_lengths),
        "too_long_answers": _long(split.target_lengths, rollout.max_completion_tokens),
    }
    return {
        "task": split.task,
        "split": split.split,
        "examples": split.total,
        "read": split.read,
        "evaluated": split.wanted,
        "prompt_tokens": _lengths(split.lengths),
        "too_long": _long(split.lengths, rollout.max_prompt_tokens),
        **(taught if split.target_lengths else {}),
        "duplicates": split.duplicates,
        "overlap": split.shared_with(evaluated),
        "special_tokens_in_text": split.specials,
        "columns": split.columns,
        "prompts": [_prompt(view, split, number) for number in chosen],
    }


def _long(lengths: Sequence[int], limit: int) -> list[int]:
    """The examples of more than `limit` tokens."""
    return [i for i, n in enumerate(lengths) if n > limit]


def _lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Quantiles, mean and histogram; empty without lengths."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    quantiles = {name: ordered[round(share * (len(ordered) - 1))] for name, share in QUANTILES.items()}
    return {**quantiles, "mean": sum(lengths) / len(lengths), "histogram": histogram(lengths)}


def histogram(lengths: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """(from, to, number) of lengths in bins of equal width, both ends included."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // bins))
    edges = range(low, high + 1, width)
    counts = [0] * len(edges)
    for n in lengths:
        counts[(n - low) // width] += 1
    return [(edge, min(edge + width - 1, high), count) for edge, count in zip(edges, counts, strict=True)]


def _prompt(view: DataView, split: SplitView, number: int) -> dict[str, Any]:
    prompt, where = view.prompt(split, number)
    decode = view.tokenizer.decode
    found: dict[str, Any] = {
        "example": number,
        "where": where,
        "tokens": len(prompt.token_ids),
        "text": decode(prompt.token_ids, skip_special_tokens=False),
        "token_ids": prompt.token_ids,
        "columns": prompt.columns,
    }
    if prompt.target_ids is not None:
        found["target_ids"] = prompt.target_ids
        found["target"] = decode(prompt.target_ids, skip_special_tokens=False)
    return found


# The figures as text


def _show(view: DataView, splits: Sequence[Mapping[str, Any]], whole: bool) -> None:
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.table import Table

    from grpocli.text import one_line
    from grpocli_tools.console import CleanConsole

    console = CleanConsole(width=None if sys.stdout.isatty() else 120)
    for split in splits:
        console.print(Rule(f"{split['task']} {split['split']}", align="left"))
        facts = Table.grid(padding=(0, 2))
        facts.add_column(no_wrap=True, style="bold")
        for name, text in _facts(view, split, any(other["split"] == "eval" for other in splits)):
            facts.add_row(name, one_line(text))
        console.print(facts)
        if split["prompt_tokens"]:
            console.print(Padding(_length_table(split), (1, 0, 0, 0)))
        for example in split["prompts"]:
            for part in _example(view, split, example, whole):
                console.print(part)
        console.print()


def _facts(view: DataView, split: Mapping[str, Any], evaluates: bool) -> Iterator[tuple[str, str]]:
    """The lines about a split: (name, text). evaluates: whether a split to evaluate on is shown, too."""
    rollout, read, total = view.run.rollout, split["read"], split["examples"]
    drops, trains = rollout.long_prompts == "drop", split["split"] == "train"
    some = f"{read:,} read; the rest of the stream was not" if total is None else f"{read:,} of {total:,} read"
    yield "examples", f"{read:,}" if total == read else some
    if not trains and split["evaluated"] is None:
        yield "evaluated", "the first 256 on a GPU, 32 on a CPU (eval.problems)"
    elif not trains and split["evaluated"] < (total or 0):
        yield "evaluated", f"the first {split['evaluated']:,} (eval.problems)"

    def count(found: Sequence[int], what: str) -> str:
        if not found:
            return "none"
        first = ", ".join(str(i) for i in found[:3]) + (" ..." if len(found) > 3 else "")
        return f"{len(found):,} of {read:,} {what} (example{'s' * (len(found) > 1)} {first})"

    limit, fate = f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}", "dropped" if drops else "cut on the left"
    yield "too long", count(split["too_long"], f"over {limit}: {fate}")
    if "too_long_answers" in split:
        limit = f"rollout.max_completion_tokens={rollout.max_completion_tokens}"
        fate = ("dropped" if trains else "left out of eval/loss") if drops else "cut at the end"
        yield "answers too long", count(split["too_long_answers"], f"over {limit}: {fate}")
    yield "duplicates", count(split["duplicates"], "have the prompt of an earlier example")
    if trains and evaluates:
        yield "overlap", count(split["overlap"], "are evaluation prompts, too")
    if special := split["special_tokens_in_text"]:
        yield "special", count(special, "have special tokens of the tokenizer in their own text")
    columns = ", ".join(f"{name} ({kind})" for name, kind in split["columns"].items())
    yield "columns", columns or "none beside the prompt"


def _length_table(split: Mapping[str, Any]) -> RenderableType:
    """The quantiles and the histogram of a split's lengths."""
    from rich.columns import Columns
    from rich.table import Table

    kinds = {name: split[f"{name}_tokens"] for name in ("prompt", "answer") if split.get(f"{name}_tokens")}
    table = Table("tokens", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    for quantile, title in zip(QUANTILES, ("least", "25 %", "median", "75 %", "95 %", "most"), strict=True):
        table.add_row(title, *(f"{lengths[quantile]:,}" for lengths in kinds.values()))
    bars = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    bars.add_column("prompt tokens", justify="right", no_wrap=True)
    bars.add_column("", no_wrap=True)
    bars.add_column("examples", justify="right", no_wrap=True)
    rows = split["prompt_tokens"]["histogram"]
    most = max(count for _, _, count in rows)
    for low, high, count in rows:
        span = f"{low:,}" if low == high else f"{low:,}-{high:,}"
        bars.add_row(span, "█" * max(round(30 * count / most), int(count > 0)), f"{count:,}")
    return Columns([table, bars], padding=(0, 4))


def _example(
    view: DataView, split: Mapping[str, Any], example: Mapping[str, Any], whole: bool
) -> Iterator[RenderableType]:
    """A headline, the prompt as the model sees it, and the answer that is taught."""
    from rich.padding import Padding
    from rich.text import Text

    from grpocli.rewards.reward import accepted, answer_text

    def cut(text: str) -> str:
        short = f"{text[: SHOWN // 2]} ... {len(text) - SHOWN:,} characters, see --whole ... {text[-SHOWN // 2 :]}"
        return text if whole or len(text) <= SHOWN else short

    def block(text: str) -> Padding:
        shown = Text(cut(text))
        if special := sorted(filter(None, view.tokenizer.all_special_tokens), key=len, reverse=True):
            shown.highlight_regex("|".join(map(re.escape, special)), style="bold magenta")
        return Padding(shown, (0, 0, 0, 2))

    over = example["tokens"] - view.run.rollout.max_prompt_tokens
    long = f", {over:,} too many" if over > 0 else ""
    title = f"{split['split']} {example['example']} ({example['where']}), {example['tokens']:,} tokens{long}"
    yield Text(f"\n{title}", style="bold")
    yield block(example["text"])
    answer = example["columns"].get("answer")
    if "target" in example:
        yield Text(f"taught, {len(example['target_ids']):,} tokens", style="bold")
        yield block(example["target"])
    elif answer is not None:
        yield Text.assemble(("answer ", "bold"), cut(" or ".join(map(answer_text, accepted(answer)))))
