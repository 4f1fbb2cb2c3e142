"""The data of a run as its model will see it: prompts as tokens, lengths, duplicates, overlap with evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.tasks.loading import with_columns
from grpocli.tasks.prompts import PromptMaker, text_hash
from grpocli.tasks.table import Examples, Jsonl
from grpocli.tasks.task import errors_below, key_of
from grpocli.types import Message, Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.tasks.task import Example, Task

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
    total: int | None
    """The number of examples; None if it is not known because the data is streamed."""
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
        """Read the splits of a run. limit: read at most so many examples of each; None: all, of a stream AT_ONCE.

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
                streamed = split == "train" and getattr(task, "streaming", False)
                most = AT_ONCE if limit is None and streamed else limit
                with errors_below(key_of(run.task, name)):
                    splits.append(_split_view(run, makers[name], task, split, most, report))
        if not splits:
            raise ConfigError("the task has no such split", key="--split", value=", ".join(wanted))
        return cls(run, tokenizer, splits, makers)

    def prompt(self, view: SplitView, number: int) -> tuple[Prompt, str]:
        """One example of a split as the run would draw it, neither dropped nor cut, and its name in the data."""
        task = self.run.tasks[view.task]
        with errors_below(key_of(self.run.task, view.task)):
            example, where = _example(task, view.split, number)
            maker = self.makers[view.task]
            settled = maker.settled(example, where)
            (ids,), target_ids = maker.token_ids([settled], lambda _: where)
        return maker.prompt(settled[0], ids, target_ids[0] if target_ids else None, "", number), where


def _split_view(run: Run, maker: PromptMaker, task: Task, split: str, limit: int | None, report: Report) -> SplitView:
    name = maker.task
    report(f"reading {name} {split}", 0, 0)
    total, examples = _examples(task, split, limit)
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
        report(f"tokenising {name} {split}", view.read, total or 0)
    view.columns = {column: " or ".join(sorted(kinds)) for column, kinds in sorted(types.items())}
    return view


def _has(text: Text, tokens: Sequence[str]) -> bool:
    """Whether a prompt's own text has one of the tokens."""
    messages: Sequence[Message] = [{"content": text}] if isinstance(text, str) else text
    return any(token in str(message.get("content", "")) for message in messages for token in tokens)


def _examples(task: Task, split: str, limit: int | None) -> tuple[int | None, Iterator[tuple[Example, str]]]:
    """The number of examples of a split, None if it is not known, and the first `limit` of them with their names."""
    if split == "train" and isinstance(task, Jsonl) and task.streaming:
        stream = task.stream
        rows = islice(stream.rows.read(stream.first), limit)
        return None, (
            (stream.example(with_columns(row, stream.columns), i), stream.where(i)) for i, row in enumerate(rows)
        )
    source = task.examples(split)
    return len(source), ((one, _name(source, i)) for i, one in enumerate(islice(source, limit)))


def _example(task: Task, split: str, number: int) -> tuple[Example, str]:
    """One example and its name."""
    if split == "train" and isinstance(task, Jsonl) and task.streaming:
        _, examples = _examples(task, split, number + 1)
        return next(islice(examples, number, None))
    source = task.examples(split)
    return source[number], _name(source, number)


def _name(source: Sequence[Example], number: int) -> str:
    return source.where(number) if isinstance(source, Examples) else f"example {number}"
