"""task=jsonl, hub, gsm8k, code: rows of files or of the hub become examples, by templates and processors.

Some rows are held out for evaluation; some become worked examples before every prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, UserCode, interpolate, one_of, part, require, template_fields
from grpocli.config.user_code import check_exists, load, raised
from grpocli.errors import ConfigError, config_errors
from grpocli.rewards.reward import with_one_answer
from grpocli.tasks.loading import (
    Row,
    Table,
    check_path,
    is_one_file,
    load_table,
    missing_value,
    need_columns,
)
from grpocli.tasks.prompts import check_last_turn, fill, in_messages, text_hash, text_of
from grpocli.tasks.task import BaseTask, permutation
from grpocli.types import Message, Text

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

PROCESSOR, TEMPLATE = "task.processor", "task.prompt_template"
HEAD = 100
"""Rows at the beginning that determine the columns."""
SHOTS = 1
"""Seed stream of the worked examples, so that their order differs from the order of training."""


@part("task", "jsonl")
class Jsonl(BaseTask):
    """Examples from .jsonl, .json, .csv, .parquet or .arrow files, or from the hub."""

    path: str = MISSING
    """A file, a folder of files, either also at an address (s3://BUCKET/FOLDER, https://HOST/FILE.jsonl), or the name
    of a dataset on the hub."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of fsspec's file system for an address, such as `anon: true`. Keys and tokens belong into the
    environment instead (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL ...)."""
    name: str | None = None
    """Configuration of the dataset on the hub; null: its default."""
    split: str | None = "train"
    """Split on the hub, or the beginning of file names in a folder; a single file has no splits. null: no training
    data, the task is for `grpocli eval`, which reads a single file whole."""
    eval_path: str | None = None
    """Data to evaluate on; null: task.path. Without eval_path and eval_split, eval_size prompts are held out."""
    eval_split: str | None = None
    """Split to evaluate on. Without eval_path and eval_split, eval_size prompts are held out."""
    eval_size: int = 128
    """Different prompts to hold out, at most a fifth of all."""
    prompt_column: str = "prompt"
    """Column with the prompt, text or a list of messages. Here and elsewhere `reward_model.ground_truth` is a value
    within an object."""
    answer_column: str | None = "answer"
    """Column that rewards get as `answer`; null: none."""
    prompt_template: Escaped | None = None
    r"""Text with {column} fields, instead of prompt_column; null: none. On the command line `\n` is a line break in
    this and other texts."""
    prefix: Escaped = ""
    """Text before every prompt, such as worked examples."""
    system_prompt: Escaped | None = None
    """System message of every prompt, with which a text becomes a user message; null: none."""
    format: str = "auto"
    """`plain` text, `chat` (a text becomes a user message), or `auto`, the form that the data has."""
    processor: UserCode | None = None
    """Your function, FILE.py:NAME or module:NAME, instead of the columns and templates; null: none. It
    gets a row and returns a dict with `prompt`, text or messages, and the columns that rewards and environments need
    (`answer` ...). The column `loss_multiplier` multiplies the advantages of the prompt's completions, not their KL
    term."""
    shots: int = 0
    """Worked examples before every prompt, as turns of a conversation or as text. They are neither trained nor
    evaluated on."""
    shot_template: Escaped = "{answer}"
    """Answer of a worked example, text with {column} fields."""
    shot_seed: int | None = interpolate("seed")
    """Seed that chooses the worked examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "format", ("auto", "plain", "chat"))
        named = self.processor is None or ":" in self.processor
        require(self, "processor", named, "must be FILE.py:NAME or module:NAME")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(self, "shots", self.shots >= 0, "must be 0 or more")
        known = bool(self.split or self.eval_path or self.eval_split) or is_one_file(self.path)
        require(self, "split", known, "name a split to train on, or with task.eval_split one to evaluate on")
        shown = self.system_prompt is None or self.format != "plain"
        require(self, "system_prompt", shown, "plain prompts have no system message: use task.prefix, or format=chat")

    def check_ready(self) -> None:
        super().check_ready()
        if self.processor:
            check_exists(self.processor, "task.processor")
        for key, path in (("task.path", self.path), ("task.eval_path", self.eval_path)):
            if path is not None:
                check_path(path, key)

    def source(self, split: str) -> tuple[str, str] | None:
        """The path and split of `train` or `eval`; None if eval is held out of train."""
        if split == "train":
            return self.path, self.split or ""
        if self.eval_path is not None:
            return self.eval_path, self.eval_split or self.split or ""
        if self.eval_split is None:
            return None if self.split else (self.path, "")
        return self.path, self.eval_split

    def convert(self, row: Row, where: str) -> Row:
        """The row with the columns that the task needs; a hook for derived tasks. where: the row's name in errors."""
        return row

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`."""
        if split == "train" and self.split is None:
            problem = "the task is for `grpocli eval`; name a split to train on"
            raise ConfigError(problem, key="task.split", value="null")
        if not self.shots:
            return self._bare(split)
        found = self._bare(split).without(self._shots)
        if not found:
            problem = f"no example is left for {split}; take fewer, or other data"
            raise ConfigError(problem, key="task.shots", value=self.shots)
        return found

    @cached_property
    def _bare(self) -> Callable[[str], Examples]:
        """The examples of a split that is read whole, without worked examples; read when they are first asked for."""
        return cache(self._whole)

    def _whole(self, split: str) -> Examples:
        if self.source("eval") is None:
            return self._halves[split]
        path, table_split = self.source(split) or ("", "")
        same = path == self.path and (table_split == self.split or is_one_file(path))
        if split == "eval" and self.split is not None and same:
            problem = f"{path} would give the examples to train on"
            hint = "give another split or task.eval_path, or leave both null"
            raise ConfigError(problem, key="task.eval_split", value=self.eval_split, hint=hint)
        return self._table(path, table_split)

    def _table(self, path: str, split: str) -> Examples:
        name, key = (self.name, "task.path") if path == self.path else (None, "task.eval_path")
        table = load_table(path, name, split, key, self.storage_options)
        converter = RowConverter.of(self, table.columns, islice(table.rows, HEAD), path)
        return Examples(converter, table, range(len(table.rows)))

    @cached_property
    def _shots(self) -> Sequence[Shot]:
        """The worked examples."""
        train = self._bare("train")
        chosen = permutation(len(train), self.shot_seed or 0, SHOTS, 0).tolist()
        return choose(((train[i], train.where(i)) for i in chosen), self.shots, self.shot_template, self.path)

    @cached_property
    def _halves(self) -> dict[str, Examples]:
        """The table at `path`, divided into training and evaluation."""
        everything = self._table(self.path, self.split or "")
        table = everything.table
        if len(table.rows) < 2:
            problem = "has one example; give two, so that one is held out, or give task.eval_path"
            raise ConfigError(problem, key="task.path", value=self.path)
        columns = table.columns if self.processor else everything.converter.prompt_columns
        train, evaluate = hold_out(table.rows, columns, self.eval_size)
        return {"train": replace(everything, numbers=train), "eval": replace(everything, numbers=evaluate)}


@part("task", "hub")
class Hub(Jsonl):
    """The same as `jsonl`, under the name that fits `task.path=OWNER/DATASET`."""


@part("task", "gsm8k")
class Gsm8k(Jsonl):
    """GSM8K (arXiv 2110.14168): 7,473 problems to train on and 1,319 to evaluate on.

    The data has the columns `question` and `answer`. `answer` becomes the final number; the worked solution stays as
    `solution`.
    """

    path: str = "openai/gsm8k"
    """A name on the hub, a folder with train.jsonl and test.jsonl, or one file, part of which is held out."""
    name: str | None = "main"
    eval_split: str | None = "test"
    prompt_template: Escaped | None = (
        "{question}\nReason step by step, and put the final answer, a number, in \\boxed{{}}."
    )
    format: str = "chat"
    shot_template: Escaped = "{solution}\nThe answer is \\boxed{{{answer}}}."

    def source(self, split: str) -> tuple[str, str] | None:
        if split == "eval" and self.eval_path is None and is_one_file(self.path):
            return None
        return super().source(split)

    def convert(self, row: Row, where: str) -> Row:
        """`answer` becomes the final number after "####", without commas; the text before it becomes `solution`."""
        if self.answer_column is None:
            return row
        solution, mark, answer = str(row[self.answer_column]).rpartition("####")
        if not mark or not answer.strip():
            problem = f"{where} has no final #### NUMBER in its answer {row[self.answer_column]!r}"
            raise ConfigError(problem, key="task")
        return {**row, "solution": solution.strip(), self.answer_column: answer.strip().replace(",", "")}


@part("task", "code")
class CodeProblems(Jsonl):
    """Programming problems with the column `tests` for reward=[code].

    Further columns: `setup` (code before the tests), `before` (code before the program), `answer` (a right program).
    Rows in the form of MBPP (`test_list`, `code`; arXiv 2108.07732) and of HumanEval (`test`, `entry_point`,
    `canonical_solution`; arXiv 2107.03374) are converted to these columns.
    """

    format: str = "chat"

    def convert(self, row: Row, where: str) -> Row:
        """The row with the column `tests`. Raises ConfigError if it has none."""
        if tests := row.get("test_list"):
            setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
            shown = tests if isinstance(tests, str) else "\n".join(tests)  # one text, for the prompt
            return {**row, "tests": tests, "setup": "\n".join(setup), "test_list": shown}
        if tests := row.get("test"):
            return {**row, "tests": tests, "before": (row.get("entry_point") and row.get("prompt")) or ""}
        if not row.get("tests"):
            problem = f"{where} has no tests: needs the column tests, test_list or test"
            raise ConfigError(problem, key="task")
        return row


def dotted(row: Row, prefix: str = "") -> Row:
    """The values within the objects of a row, by names such as `reward_model.ground_truth`."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= dotted(value, f"{prefix}{name}.")
        elif prefix:
            found[f"{prefix}{name}"] = value
    return found


def process(function: str, row: Row, where: str) -> dict[str, Any]:
    """The example that the user's function makes of a row. Raises ConfigError, naming `where`, if it fails."""
    user_function = load(function, PROCESSOR)
    says = f"raised {{}} for {where}"
    with config_errors(Exception, SystemExit, says=says, why=raised, key=PROCESSOR, value=function):
        example = user_function(dict(row))
    if not isinstance(example, Mapping) or not isinstance(example.get("prompt"), str | list) or not example["prompt"]:
        problem = f"made {example!r:.200} of {where}; return a dict with `prompt`, text or messages"
        raise ConfigError(problem, key=PROCESSOR, value=function)
    return dict(example)


@dataclass(frozen=True, slots=True)
class Shot:
    """A worked example: a prompt, and its answer as a model would write it."""

    prompt: Text
    answer: str

    @property
    def messages(self) -> list[Message]:
        """The conversation without its system message, which `with_shots` puts first, and a last turn of the data."""
        prompt = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        asked = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        rest = [message for message in asked if message["role"] != "system"]
        return [*rest, {"role": "assistant", "content": self.answer}]

    @property
    def text(self) -> str:
        """The shot as plain text, with an empty line after it."""
        prompt = self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)
        return f"{prompt}{self.answer}\n\n"


def with_shots(prompt: Text, shots: Sequence[Shot]) -> Text:
    """The prompt after the worked examples; its system message stays first."""
    if isinstance(prompt, str):
        return "".join(shot.text for shot in shots) + prompt
    system = [message for message in prompt[:1] if message["role"] == "system"]
    return [*system, *(message for shot in shots for message in shot.messages), *prompt[len(system) :]]


def choose(candidates: Iterable[tuple[Example, str]], n: int, template: str, path: str) -> list[Shot]:
    """Shots from the first n different candidates. A candidate is an example and its name in errors.

    Raises ConfigError for fewer than n + 1 candidates: one must be left to train on.
    """
    shots: dict[int, Shot] = {}
    for example, where in candidates:
        question = text_hash(example["prompt"])
        if question in shots:
            continue
        if len(shots) == n:
            return list(shots.values())
        answer = fill(template, with_one_answer(example), where, "task.shot_template")
        shots[question] = Shot(text_of(example, where), answer)
    problem = f"{path} has {len(shots)} different examples to train on; take {len(shots) - 1} or less"
    raise ConfigError(problem, key="task.shots", value=n)


@dataclass(frozen=True, slots=True)
class RowConverter:
    """Turns rows of the data at `path` into examples, by the keys of a task."""

    task: Jsonl
    path: str
    shots: tuple[Shot, ...] = ()
    """Worked examples before every prompt."""

    @classmethod
    def of(cls, task: Jsonl, columns: Sequence[str], head: Iterable[Row], path: str) -> RowConverter:
        """The converter of a task. head: the first rows, whose objects have columns, too.

        Raises ConfigError if a column that the task names is missing.
        """
        made = cls(task, path)
        columns = list(dict.fromkeys([*columns, *(name for row in head for name in dotted(row))]))
        if task.processor:
            load(task.processor, PROCESSOR)
        else:
            key = "task.prompt_column" if task.prompt_template is None else TEMPLATE
            for column in made.prompt_columns:
                need_columns(columns, {key: column}, path)
            need_columns(columns, {"task.answer_column": task.answer_column}, path, "; or null: it has no answers")
        return made

    @property
    def prompt_columns(self) -> list[str]:
        """Columns that the prompt uses."""
        template = self.task.prompt_template
        return [self.task.prompt_column] if template is None else list(dict.fromkeys(template_fields(template)))

    def where(self, number: int) -> str:
        """The name of a row in errors, counted from 1 as editors count lines."""
        return f"row {number + 1} of {self.path}"

    def example(self, row: Row, number: int) -> Example:
        """The example of a row. Raises ConfigError, naming the row, for unusable values."""
        made = self._bare(row, self.where(number))
        return {**made, "prompt": with_shots(made["prompt"], self.shots)} if self.shots else made

    def _bare(self, row: Row, where: str) -> Example:
        task = self.task
        if task.processor is not None:
            return process(task.processor, row, where)
        row, column = {**dotted(row), **row}, task.answer_column
        if column is not None and (missing := missing_value(row.get(column))):
            hint = "fill it in, remove the row, or give null where no reward needs answers"
            raise ConfigError(f"{where} has {missing} there", key="task.answer_column", value=column, hint=hint)
        row = task.convert(row, where)
        prompt = self._prompt(row, where)
        if column is not None:
            row["answer"] = row[column]
        return {**row, "prompt": prompt}

    def _prompt(self, row: Row, where: str) -> Text:
        """The prompt of a row. Raises ConfigError, naming `where`, for a missing or unusable value."""
        for column in self.prompt_columns:
            if missing := missing_value(row.get(column)):
                problem = f"{where} has {missing} in the column {column!r}"
                raise ConfigError(problem, key="task", hint="fill it in or remove the row")
        template = self.task.prompt_template
        filled = row[self.task.prompt_column] if template is None else fill(template, row, where, TEMPLATE)
        prompt = in_messages(filled, where)
        if isinstance(prompt, str) and prompt.strip():
            return self._from_text(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
            return self._from_messages(prompt, where)
        problem = f"{where} has {prompt!r:.200} there; a prompt is text or a list of messages, and not empty"
        raise ConfigError(problem, key="task.prompt_column", value=self.task.prompt_column)

    def _from_text(self, text: str) -> Text:
        text = self.task.prefix + text
        if self.task.format != "chat" and self.task.system_prompt is None:
            return text
        return [*self._system(), {"role": "user", "content": text}]

    def _from_messages(self, messages: list[dict[str, Any]], where: str) -> Text:
        if self.task.format == "plain" and all(isinstance(message.get("content", ""), str) for message in messages):
            check_last_turn(messages, where)
            return self.task.prefix + "\n".join(str(message.get("content", "")) for message in messages)
        if self.task.prefix:
            problem = f"{where} is a list of messages; put worked examples into them, or choose task.format=plain"
            raise ConfigError(problem, key="task.prefix", value=repr(self.task.prefix))
        if self.task.system_prompt is not None and messages[0].get("role") == "system":
            messages = messages[1:]
        return [*self._system(), *messages]

    def _system(self) -> list[Message]:
        return [] if self.task.system_prompt is None else [{"role": "system", "content": self.task.system_prompt}]


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Any]):
    """Examples that are converted on access. numbers: their rows in the table, ascending."""

    converter: RowConverter
    table: Table
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self.numbers[index]
        return self.converter.example(self.table.rows[number], number)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the table once, which is faster than access row by row."""
        wanted = set(self.numbers)
        for number, row in enumerate(self.table.rows):
            if number in wanted:
                yield self.converter.example(row, number)

    def where(self, index: int) -> str:
        """The name of an example in errors."""
        return self.converter.where(self.numbers[index])

    def without(self, shots: Sequence[Shot]) -> Examples:
        """The examples with `shots` before each prompt, without those that are shots themselves."""
        shown = {text_hash(shot.prompt) for shot in shots}
        numbers = [n for n, one in zip(self.numbers, self, strict=True) if text_hash(one["prompt"]) not in shown]
        return replace(self, numbers=numbers, converter=replace(self.converter, shots=tuple(shots)))


def hold_out(rows: Iterable[Row], columns: Sequence[str], limit: int) -> tuple[list[int], list[int]]:
    """Numbers of the training rows and of the evaluation rows; at least one question each, of two rows or more.

    The values of `columns` are the question, and equal questions go to the same side. The questions with the smallest
    hashes are held out, so the choice needs no seed and is mostly stable when examples are added. If all rows have the
    same question, their positions are hashed instead.
    limit: questions to hold out, at most a fifth of all.
    """
    hashes = [_hash([_question({**dotted(row), **row}.get(c)) for c in columns]) for row in rows]
    if len(set(hashes)) == 1:
        hashes = [_hash(place) for place in range(len(hashes))]
    questions = sorted(set(hashes))
    held_out = set(questions[: min(limit, max(1, len(questions) // 5))])
    train = [i for i, h in enumerate(hashes) if h not in held_out]
    return train, [i for i, h in enumerate(hashes) if h in held_out]


def _question(value: Any) -> Any:
    """A value without the answer that ends it, if it is a conversation: one question may have several answers."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[-1], dict):
        return value
    return value[:-1] if value[-1].get("role") == "assistant" else value


def _hash(values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).digest()
