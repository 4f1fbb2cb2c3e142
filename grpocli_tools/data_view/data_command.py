"""`grpocli data`: show the data of a run as its model will see it: tokens, too long, duplicated."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.tasks.prompts import PromptMaker, text_hash
from grpocli.tasks.table import Examples
from grpocli.tasks.task import errors_below, key_of
from grpocli.types import Message, Prompt, Text
from grpocli_tools.command_line import composed, parse, stages
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.tasks.task import Example, Task

QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
BINS = 10
SHOWN = 4000
"""Characters shown of a prompt or an answer without --whole."""


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("data", __doc__), argv)
    from grpocli.composition.checks import check_file
    from grpocli.composition.compose import build_run
    from grpocli.runs.metrics import to_json

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


# The figures


def _split(view: DataView, split: SplitView, args: argparse.Namespace) -> dict[str, Any]:
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
            for part in _shown_example(view, split, example, whole):
                console.print(part)
        console.print()


def _facts(view: DataView, split: Mapping[str, Any], evaluates: bool) -> Iterator[tuple[str, str]]:
    """The lines about a split: (name, text). evaluates: whether a split to evaluate on is shown, too."""
    rollout, read, total = view.run.rollout, split["read"], split["examples"]
    drops, trains = rollout.long_prompts == "drop", split["split"] == "train"
    yield "examples", f"{read:,}" if total == read else f"{read:,} of {total:,} read"
    if not trains and split["evaluated"] is None:
        yield "evaluated", "the first 256 on a GPU, 32 on a CPU (eval.problems)"
    elif not trains and split["evaluated"] < total:
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
    """The quantiles of a split's lengths."""
    from rich.table import Table

    kinds = {name: split[f"{name}_tokens"] for name in ("prompt", "answer") if split.get(f"{name}_tokens")}
    table = Table("tokens", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    for quantile, title in zip(QUANTILES, ("least", "25 %", "median", "75 %", "95 %", "most"), strict=True):
        table.add_row(title, *(f"{lengths[quantile]:,}" for lengths in kinds.values()))
    return table


def _shown_example(
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


AT_ONCE = 1000
"""Examples tokenised at once, between two reports of progress."""
SPLITS = ("train", "eval")
Report = Callable[[str, int, int], None]
"""Called with a phrase, the examples read so far and all of them; 0 if their number is not known."""


@dataclass(slots=True)
class SplitView:
    """The examples of a split of a task, as a run would read them."""

    task: str
    split: str
    total: int
    """The number of examples."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt."""
    target_lengths: list[int] = field(default_factory=list)
    """Tokens of each answer in supervised training."""
    hashes: list[int] = field(default_factory=list)
    """Of each prompt."""
    columns: dict[str, str] = field(default_factory=dict)
    """Those that rewards get, with a type."""
    specials: list[int] = field(default_factory=list)
    """Examples whose own text has a special token of the tokenizer."""
    wanted: int | None = None
    """Problems that the run evaluates on, in `eval`; None if this machine decides."""

    @property
    def read(self) -> int:
        return len(self.lengths)

    @property
    def duplicates(self) -> list[int]:
        """The examples whose prompt an earlier example has."""
        first: dict[int, int] = {}
        return [i for i, one in enumerate(self.hashes) if first.setdefault(one, i) != i]

    def shared_with(self, others: Sequence[SplitView]) -> list[int]:
        """The examples whose prompt one of the others has."""
        theirs = {one for other in others for one in other.hashes}
        return [i for i, one in enumerate(self.hashes) if one in theirs]


@dataclass(frozen=True, slots=True)
class DataView:
    """The data of a run: the split views, and what reads single examples again."""

    run: Run
    tokenizer: PreTrainedTokenizerBase
    splits: list[SplitView]
    makers: dict[str, PromptMaker]

    @classmethod
    def of(
        cls,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        wanted: Sequence[str] = SPLITS,
        limit: int | None = None,
        report: Report = lambda text, done, total: None,
    ) -> DataView:
        """Read the splits of a run. limit: read at most so many examples of each; None: all.

        end_ids: tokens that end a completion, beside the tokenizer's. Raises ConfigError for data that the run would
        refuse.
        """
        makers = {}
        splits = []
        for name, task in run.tasks.items():
            with errors_below(key_of(run.task, name)):
                makers[name] = PromptMaker.of(name, task, run, tokenizer, end_ids)
            for split in wanted:
                if split == "train" and getattr(task, "split", "") is None:
                    continue  # the task is for evaluation only
                with errors_below(key_of(run.task, name)):
                    splits.append(_split_view(run, makers[name], task, split, limit, report))
        if not splits:
            raise ConfigError("the task has no such split", key="--split", value=", ".join(wanted))
        return cls(run, tokenizer, splits, makers)

    def prompt(self, view: SplitView, number: int) -> tuple[Prompt, str]:
        """One example of a split as the run would draw it, neither dropped nor cut, and its name in the data."""
        task = self.run.tasks[view.task]
        with errors_below(key_of(self.run.task, view.task)):
            source = task.examples(view.split)
            example, where = source[number], _name(source, number)
            maker = self.makers[view.task]
            settled = maker.settled(example, where)
            (ids,), target_ids = maker.token_ids([settled], lambda _: where)
        return maker.prompt(settled[0], ids, target_ids[0] if target_ids else None, "", number), where


def _split_view(run: Run, maker: PromptMaker, task: Task, split: str, limit: int | None, report: Report) -> SplitView:
    name = maker.task
    report(f"reading {name} {split}", 0, 0)
    source = task.examples(split)
    total, examples = len(source), ((one, _name(source, i)) for i, one in enumerate(islice(source, limit)))
    view = SplitView(name, split, total, wanted=run.eval.problems)
    special = [token for token in maker.tokenizer.all_special_tokens if token]
    types: dict[str, Counter[str]] = {}
    while batch := list(islice(examples, AT_ONCE)):
        start = view.read
        names = [where for _, where in batch]
        pairs = [maker.settled(one, where) for one, where in batch]
        texts = [one["prompt"] for one, _ in pairs]
        prompt_ids, target_ids = maker.token_ids(pairs, names.__getitem__)
        view.lengths += map(len, prompt_ids)
        view.target_lengths += map(len, target_ids or ())
        view.hashes += [text_hash(text) for text in texts]
        view.specials += [start + i for i, text in enumerate(texts) if _has(text, special)]
        for one, _ in pairs:
            for column, value in one.items():
                if column != "prompt":
                    types.setdefault(column, Counter())[type(value).__name__] += 1
        report(f"tokenising {name} {split}", view.read, total)
    view.columns = {column: " or ".join(sorted(kinds)) for column, kinds in sorted(types.items())}
    return view


def _has(text: Text, tokens: Sequence[str]) -> bool:
    messages: Sequence[Message] = [{"content": text}] if isinstance(text, str) else text
    return any(token in str(message.get("content", "")) for message in messages for token in tokens)


def _name(source: Sequence[Example], number: int) -> str:
    return source.where(number) if isinstance(source, Examples) else f"example {number}"
