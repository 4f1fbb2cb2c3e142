"""The completions of a run that a page shows, and the rule that chooses them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import RunError
from grpocli.progress import Progress, unreported
from grpocli.runs.metrics import number
from grpocli.runs.saved_run import SavedRun
from grpocli.text import shorten
from grpocli_tools.report.page_data import CompletionView, GroupView, PromptText, RolloutSelection, Series

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUDGET = 6_000_000
"""Bytes of JSON of all rollouts of a page: small enough for a mail, and read by a browser in a moment."""

MANY_STEPS, USUAL_GROUP = 32, 64
"""Where completions do not all fit, the page has at least so many steps, if groups are no larger than this."""

LONGEST = 20_000
"""Characters shown of a text; the rest is left out, and the text says how much."""

MOST_TOKENS = 8_192
"""Tokens of a completion that have values; longer completions are shown as text."""

TOKEN_BYTES, COMPLETION_BYTES = 40, 230
"""The JSON of a token and of the rest of a completion, measured on runs of the built-in model."""


@dataclass(slots=True)
class Prompts:
    """The prompts of a page. A group refers to its prompt by number, so that a text is on the page once."""

    found: list[PromptText] = field(default_factory=list)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def number(self, row: Mapping[str, Any]) -> int:
        key = (_text(row.get("task")), _text(row.get("prompt")))
        if key not in self.numbers:
            self.numbers[key] = len(self.found)
            answer = row.get("answer")
            text = PromptText(
                key[0],
                shorten(key[1], LONGEST, counted=True),
                _messages(row.get("messages")),
                None if answer is None else shorten(answer, LONGEST, counted=True),
            )
            self.found.append(text)
        return self.numbers[key]


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Decodes tokens one by one."""

    tokenizer: Tokenizer

    @classmethod
    def of_run(cls, run: SavedRun) -> TokenTexts | None:
        """With the tokenizer of the final model, of the newest checkpoint or of a local start model; None without."""
        from tokenizers import Tokenizer

        for folder in _folders(run):
            try:
                return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))
            except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for a missing or broken file
                continue
        return None

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each token, special tokens included; joined they are the decoded text. None if that fails.

        A character of several tokens is in the last one of them.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        try:
            pieces = [stream.step(self.tokenizer, token) or "" for token in ids]
        except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for bytes that no text has
            return None
        joined, whole = "".join(pieces), self.tokenizer.decode(list(ids), skip_special_tokens=False)
        if not pieces or not whole.startswith(joined):
            return None
        return [*pieces[:-1], pieces[-1] + whole[len(joined) :]]  # the rest are bytes of a character that was cut off


def _folders(run: SavedRun) -> list[Path]:
    checkpoints = [run.dir.checkpoint(step) for step in reversed(run.dir.saved_steps())]
    return [run.dir.model, *checkpoints, Path(str(run.section("model").get("path")))]


@dataclass(frozen=True)
class RolloutSample:
    """Chooses and reads completions of one run.

    budget: bytes of JSON. most: completions; None without a limit. notes: gets a sentence for each problem.
    """

    run: SavedRun
    prompts: Prompts
    tokens: TokenTexts | None
    budget: int = BUDGET
    most: int | None = None
    notes: list[str] = field(default_factory=list)
    progress: Progress = unreported

    def read(self) -> RolloutSelection:
        """The completions: all if they fit into the budget, otherwise those of the rule."""
        steps = sorted(self.files)
        if not steps:
            return RolloutSelection()
        counts = self._counts(steps)
        total, steps = sum(counts.values()), [step for step in steps if step in counts]
        if not steps or self.most == 0:
            return RolloutSelection("no completions were asked for" if steps else "", total, steps)
        affordable, chosen, each, rule = self._affordable(steps), steps, None, ""
        if total > affordable:
            whole_steps = affordable * len(steps) // total
            count = min(len(steps), max(2, whole_steps, min(MANY_STEPS, affordable // USUAL_GROUP)))
            chosen = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
            each = max(1, affordable // len(chosen))
            rule = f"of {len(chosen):,} steps, evenly spaced from the first to the last"
        groups = [group for step in chosen for group in self._groups(step, each)]
        shown = sum(len(group.completions) for group in groups)
        return RolloutSelection(rule and f"{shown:,} of {total:,} completions: {rule}", total, steps, groups)

    @property
    def files(self) -> dict[int, Path]:
        return self.run.rollout_files

    def _counts(self, steps: Sequence[int]) -> dict[int, int]:
        """The number of completions of each step, from the files' footers; unreadable files are left out."""
        counts = {}
        for step in steps:
            with_rows = self._arrow(step, lambda file: file.metadata.num_rows)
            if with_rows is not None:
                counts[step] = int(with_rows)
            self.progress(len(counts), len(steps), "rollout files")
        return counts

    def _affordable(self, steps: Sequence[int]) -> int:
        """How many completions fit into the budget, estimated from the first, a middle and the last step."""
        sizes = [size for step in {steps[0], steps[len(steps) // 2], steps[-1]} if (size := self._size(step))]
        fit = int(self.budget / (sum(sizes) / len(sizes))) if sizes else 0
        return fit if self.most is None else self.most

    def _size(self, step: int) -> float:
        """The mean bytes of JSON of a completion of a step."""
        table = self._arrow(step, lambda file: file.read(columns=["completion_ids", "completion", "loss_mask"]))
        if table is None or not table.num_rows:
            return 0.0
        shown = [
            (min(len(text), LONGEST) + (len(ids) * TOKEN_BYTES if len(ids) <= MOST_TOKENS else 0))
            for text, ids in zip(table["completion"].to_pylist(), table["completion_ids"].to_pylist(), strict=True)
        ]
        return COMPLETION_BYTES + sum(shown) / len(shown)

    def _groups(self, step: int, most: int | None) -> Iterator[GroupView]:
        """The groups of a step. most: about how many completions, in whole groups from the first."""
        by_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in self._table(step):
            by_group[row["group"] if isinstance(row.get("group"), int) else 0].append(row)
        left = most
        for group, members in by_group.items():
            if left is not None and left <= 0:
                return
            left = None if left is None else left - len(members)
            views = [completion_view(row, self.tokens) for row in members]
            yield GroupView(step, group, _text(members[0].get("uid")), self.prompts.number(members[0]), views)

    def step_groups(self, step: int) -> list[GroupView]:
        """The first groups of a step that fit into the budget."""
        return list(self._groups(step, self._affordable([step])))

    def _table(self, step: int) -> list[dict[str, Any]]:
        def rows(file: Any) -> list[dict[str, Any]]:
            names = set(file.schema_arrow.names)
            table = file.read(columns=sorted(names - {"columns", "prompt_ids", "version_spans"}), use_threads=False)
            return table.to_pylist()  # type: ignore[no-any-return]

        return self._arrow(step, rows) or []

    def _arrow(self, step: int, use: Callable[[Any], Any]) -> Any:
        """What `use` makes of a step's file; None, and a note, if it is broken."""
        import pyarrow.parquet as pq

        path = self.files[step]
        try:
            with pq.ParquetFile(path) as file:
                return use(file)
        except (OSError, ValueError, KeyError, TypeError):  # the errors of Arrow, and columns of other types
            note = f"rollouts/{path.name} is broken or not a rollout file, and is left out"
            if note not in self.notes:
                self.notes.append(note)
            return None


def read_step(run: Path, step: int) -> dict[str, Any]:
    """The prompts and groups of one step for the live page: as many groups as fit into the budget.

    Raises RunError if the file is broken.
    """
    saved, prompts = SavedRun(run), Prompts()
    sample = RolloutSample(saved, prompts, TokenTexts.of_run(saved))
    groups = sample.step_groups(step)
    if sample.notes:
        raise RunError(sample.notes[0])
    return {"prompts": prompts.found, "groups": groups}


def completion_view(row: Mapping[str, Any], tokens: TokenTexts | None) -> CompletionView:
    """A row of a rollout file for the page."""
    ids = row.get("completion_ids") or []
    short = len(ids) <= MOST_TOKENS
    length = row.get("length")
    return CompletionView(
        text=shorten(_text(row.get("completion")), LONGEST, counted=True),
        status=_text(row.get("status")),
        finish=_text(row.get("finish_reason")),
        length=length if isinstance(length, int) else len(ids),
        version=row["version"] if isinstance(row.get("version"), int) else 0,
        reward=number(row.get("reward")),
        rewards={name.removeprefix("reward/"): number(v) for name, v in row.items() if name.startswith("reward/")},
        advantage=rounded(row.get("advantage")),
        episode=_messages(row.get("episode")),
        tokens=tokens(ids) if tokens and short and ids else None,
        mask=_per_token(row.get("loss_mask"), ids) if short else None,
        logp=_rounded(row.get("logprobs"), ids) if short else None,
        trainer_logp=_rounded(row.get("trainer_logprobs"), ids) if short else None,
        entropy=_rounded(row.get("entropies"), ids) if short else None,
        ratio=_rounded(row.get("ratios"), ids) if short else None,
        clipped=_per_token(row.get("clipped"), ids) if short else None,
    )


def rounded(value: Any) -> float | int | None:
    """Four significant digits, which keeps the page small."""
    known = number(value)
    return None if known is None else float(f"{known:.4g}")


def _rounded(values: Any, ids: Sequence[int]) -> Series | None:
    known = _per_token(values, ids)
    if known is None:
        return None
    return [float(f"{value:.4g}") if value is not None and isfinite(value) else None for value in known]


def _per_token(values: Any, ids: Sequence[int]) -> Any:
    return values if isinstance(values, list) and ids and len(values) == len(ids) else None


def _messages(messages: Any) -> list[dict[str, str]] | None:
    if not isinstance(messages, list):
        return None
    return [
        {"role": _text(message.get("role")), "content": shorten(_text(message.get("content")), LONGEST, counted=True)}
        for message in messages
        if isinstance(message, Mapping)
    ]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
