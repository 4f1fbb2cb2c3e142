"""`grpocli data`: show the data of a run as its model will see it: tokens, too long, duplicated."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType
    from rich.text import Text

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
QUANTILES = (0, 0.25, 0.5, 0.75, 0.95, 1)
BINS = 10
STREAMED = 1000
"""Rows of a stream that are read without --rows."""
SHOWN = 4000
"""Characters shown of a prompt or an answer without --whole."""


def main(argv: Sequence[str]) -> int:
    """Print the view. Returns the exit code. Raises ConfigError for data that a run would refuse."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    for name in ("prompts", "rows", "example"):
        if (getattr(args, name) or 0) < 0:
            parser.error(f"--{name} {getattr(args, name)}: must be 0 or more")
    from grpocli.composition.checks import check_data
    from grpocli.composition.compose import build_run
    from grpocli.runs.metrics import to_json
    from grpocli.views.live_view import status_view
    from grpocli_tools.data_view.data_view import SPLITS, DataView

    run = build_run(composed(args.overrides, args.config_dir))
    check_data(run)
    status = status_view()

    def report(text: str, done: int, total: int) -> None:
        status.stage(text)
        if total:
            status.progress(done, total, "examples")

    try:
        status.stage("loading the tokenizer")
        tokenizer = run.model.tokenizer()
        splits, ends = [args.split] if args.split else SPLITS, run.model.end_ids(tokenizer)
        view = DataView.of(run, tokenizer, ends, splits, args.rows, STREAMED, report)
    finally:
        status.stop()
    if args.example is not None:
        _check_example(view, args.example)
    if args.json:
        print(json.dumps(to_json(_as_dict(view, args)), allow_nan=False, default=str))
    else:
        _show(view, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", "[--split SPLIT] [--example N] [--longest] [--json]", __doc__, EXAMPLES)
    parser.add_argument("--split", choices=("train", "eval"), help="this split only (both)")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="prompts to show of each split (3)")
    parser.add_argument("--example", type=int, metavar="N", help="show example N, counted from 0, instead of the first")
    parser.add_argument("--longest", action="store_true", help="show the longest prompts instead of the first")
    parser.add_argument("--rows", type=int, metavar="N", help="read N examples of a split (all; 1,000 of a stream)")
    parser.add_argument("--whole", action="store_true", help=f"show prompts of more than {SHOWN:,} characters whole")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


# What is shown


def _check_example(view: DataView, number: int) -> None:
    """Raise ConfigError if no split has an example of this number."""
    if all(number >= split.read for split in view.splits):
        read = ", ".join(map(_has, view.splits))
        raise ConfigError(f"{read}, numbered from 0", key="--example", value=number)


def _has(split: SplitView) -> str:
    return f"{split.task} {split.split} has {split.read:,} examples"


def _chosen(split: SplitView, args: argparse.Namespace) -> list[int]:
    """The numbers of the examples to show; none if the split has no --example."""
    if args.example is not None:
        return [args.example] if args.example < split.read else []
    order: Sequence[int] = range(split.read)
    if args.longest:
        order = sorted(order, key=lambda i: -split.lengths[i])
    return list(order[: args.prompts])


def _quantiles(lengths: Sequence[int]) -> list[int]:
    """The lengths at QUANTILES."""
    ordered = sorted(lengths)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]


def histogram(lengths: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """(from, to, number) of lengths in bins of equal width, both ends included."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // bins))
    edges = range(low, high + 1, width)
    counts = [0] * len(edges)
    for n in lengths:
        counts[(n - low) // width] += 1
    return [(edge, min(edge + width - 1, high), count) for edge, count in zip(edges, counts, strict=True)]


def _facts(view: DataView, split: SplitView) -> Iterator[tuple[str, str]]:
    """The lines about a split: (name, text)."""
    rollout = view.run.rollout
    drops = rollout.long_prompts == "drop"
    total = f"{split.read:,}"
    if split.total is None:
        total = f"{split.read:,} read; the rest of the stream was not"
    elif split.total > split.read:
        total = f"{split.read:,} of {split.total:,} read"
    yield "examples", total
    if split.split == "eval":
        wanted = split.wanted
        if wanted is None:
            yield "evaluated", "the first 256 on a GPU, 32 on a CPU (eval.problems)"
        elif wanted < (split.total or 0):
            yield "evaluated", f"the first {wanted:,} (eval.problems)"
    long = split.long(rollout.max_prompt_tokens)
    fate = "dropped" if drops else "cut on the left"
    yield (
        "too long",
        _count(long, split.read, f"over rollout.max_prompt_tokens={rollout.max_prompt_tokens}: {fate}"),
    )
    if split.target_lengths:
        limit = rollout.max_completion_tokens
        fate = ("dropped" if split.split == "train" else "left out of eval/loss") if drops else "cut at the end"
        answers = _count(split.long_targets(limit), split.read, f"over rollout.max_completion_tokens={limit}: {fate}")
        yield "answers too long", answers
    yield "duplicates", _count(split.duplicates, split.read, "have the prompt of an earlier example")
    if split.split == "train":
        evaluated = [other for other in view.splits if other.split == "eval"]
        if evaluated:
            yield "overlap", _count(split.shared_with(evaluated), split.read, "are evaluation prompts, too")
    if split.specials:
        yield "special", _count(split.specials, split.read, "have special tokens of the tokenizer in their own text")
    yield "columns", ", ".join(f"{name} ({kind})" for name, kind in split.columns.items()) or "none beside the prompt"


def _count(found: Sequence[int], total: int, what: str) -> str:
    if not found:
        return "none"
    first = ", ".join(str(i) for i in found[:3]) + (" ..." if len(found) > 3 else "")
    return f"{len(found):,} of {total:,} {what} (example{'s' * (len(found) > 1)} {first})"


def _show(view: DataView, args: argparse.Namespace) -> None:
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.table import Table

    from grpocli.text import one_line
    from grpocli_tools.console import CleanConsole

    console = CleanConsole(width=None if sys.stdout.isatty() else 120)
    for split in view.splits:
        console.print(Rule(f"{split.task} {split.split}", align="left"))
        facts = Table.grid(padding=(0, 2))
        facts.add_column(no_wrap=True, style="bold")
        facts.add_column()
        for name, text in _facts(view, split):
            facts.add_row(name, one_line(text))
        console.print(facts)
        if split.lengths:
            console.print(Padding(_lengths(split), (1, 0, 0, 0)))
        if args.example is not None and args.example >= split.read:
            console.print(f"\n{_has(split)}, numbered from 0: no example {args.example}")
        for number in _chosen(split, args):
            for one in _example(view, split, number, args.whole):
                console.print(one)
        console.print()


def _lengths(split: SplitView) -> RenderableType:
    """The quantiles and the histogram of a split's lengths."""
    from rich.columns import Columns
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tokens", no_wrap=True)
    kinds = [("prompt", split.lengths), *([("answer", split.target_lengths)] if split.target_lengths else [])]
    for name, _ in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    titles = ("least", "25 %", "median", "75 %", "95 %", "most")
    for place, title in enumerate(titles):
        table.add_row(title, *(f"{_quantiles(lengths)[place]:,}" for _, lengths in kinds))
    bars = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    bars.add_column("prompt tokens", justify="right", no_wrap=True)
    bars.add_column("", no_wrap=True)
    bars.add_column("examples", justify="right", no_wrap=True)
    rows = histogram(split.lengths)
    most = max(count for _, _, count in rows)
    for low, high, count in rows:
        span = f"{low:,}" if low == high else f"{low:,}-{high:,}"
        bars.add_row(span, "█" * max(round(30 * count / most), int(count > 0)), f"{count:,}")
    return Columns([table, bars], padding=(0, 4))


def _example(view: DataView, split: SplitView, number: int, whole: bool) -> Iterator[RenderableType]:
    """A headline, the prompt as the model sees it, and the answer that is taught."""
    from rich.padding import Padding
    from rich.text import Text

    from grpocli.rewards.reward import accepted, answer_text

    prompt, where = view.prompt(split, number)
    limit = view.run.rollout.max_prompt_tokens
    tokens = len(prompt.token_ids)
    long = f", {tokens - limit:,} too many" if tokens > limit else ""
    yield Text(f"\n{split.split} {number} ({where}), {tokens:,} tokens{long}", style="bold")
    yield Padding(_decoded(view, prompt.token_ids, whole), (0, 0, 0, 2))
    if prompt.target_ids is not None:
        yield Text(f"taught, {len(prompt.target_ids):,} tokens", style="bold")
        yield Padding(_decoded(view, prompt.target_ids, whole), (0, 0, 0, 2))
        return
    answer = prompt.columns.get("answer")
    if answer is not None:
        known = " or ".join(map(answer_text, accepted(answer)))
        yield Text.assemble(("answer ", "bold"), _shortened(known, whole))


def _decoded(view: DataView, token_ids: list[int], whole: bool) -> Text:
    """The text of tokens, with special tokens in colour."""
    from rich.text import Text

    text = Text(_shortened(view.tokenizer.decode(token_ids, skip_special_tokens=False), whole))
    special = sorted({token for token in view.tokenizer.all_special_tokens if token}, key=len, reverse=True)
    if special:
        text.highlight_regex("|".join(map(re.escape, special)), style="bold magenta")
    return text


def _shortened(text: str, whole: bool) -> str:
    if whole or len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]} ... {len(text) - SHOWN:,} characters, see --whole ... {text[-SHOWN // 2 :]}"


# For machines


def _as_dict(view: DataView, args: argparse.Namespace) -> dict[str, Any]:
    rollout = view.run.rollout
    return {
        "max_prompt_tokens": rollout.max_prompt_tokens,
        "max_completion_tokens": rollout.max_completion_tokens,
        "long_prompts": rollout.long_prompts,
        "splits": [_split_dict(view, split, args) for split in view.splits],
    }


def _split_dict(view: DataView, split: SplitView, args: argparse.Namespace) -> dict[str, Any]:
    rollout = view.run.rollout
    evaluated = [other for other in view.splits if other.split == "eval"] if split.split == "train" else []
    taught = {
        "answer_tokens": _length_dict(split.target_lengths),
        "too_long_answers": split.long_targets(rollout.max_completion_tokens),
    }
    return {
        "task": split.task,
        "split": split.split,
        "examples": split.total,
        "read": split.read,
        "prompt_tokens": _length_dict(split.lengths),
        "too_long": split.long(rollout.max_prompt_tokens),
        **(taught if split.target_lengths else {}),
        "duplicates": split.duplicates,
        "overlap": split.shared_with(evaluated),
        "special_tokens_in_text": split.specials,
        "columns": split.columns,
        "prompts": [_prompt_dict(view, split, number) for number in _chosen(split, args)],
    }


def _length_dict(lengths: Sequence[int]) -> dict[str, Any]:
    if not lengths:
        return {}
    names = ("min", "p25", "median", "p75", "p95", "max")
    mean = sum(lengths) / len(lengths)
    quantiles: dict[str, Any] = dict(zip(names, _quantiles(lengths), strict=True))
    return quantiles | {"mean": mean, "histogram": histogram(lengths)}


def _prompt_dict(view: DataView, split: SplitView, number: int) -> dict[str, Any]:
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
