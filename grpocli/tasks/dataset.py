"""Examples from the rows of a table: templates and processors, worked examples, held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import template_fields
from grpocli.config.user_code import load, raised
from grpocli.errors import ConfigError
from grpocli.rewards.reward import with_one_answer
from grpocli.tasks.loading import Row, Table, missing_value, need_columns
from grpocli.tasks.prompts import TURN, fill, in_messages, settle_last_turn, text_hash, text_of
from grpocli.tasks.task import TableTask
from grpocli.types import Message, Text

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

PROCESSOR, TEMPLATE = "task.processor", "task.prompt_template"


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
    try:
        example = user_function(dict(row))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"raised {raised(error)} for {where}", key=PROCESSOR, value=function) from error
    if not isinstance(example, Mapping) or not isinstance(example.get("prompt"), str | list) or not example["prompt"]:
        problem = f"made {example!r:.200} of {where}; return a dict with `prompt`, text or messages"
        raise ConfigError(problem, key=PROCESSOR, value=function)
    return dict(example)


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Makes the prompt of a row, by the keys of a task."""

    task: TableTask

    @property
    def columns(self) -> list[str]:
        """Columns that the prompt uses."""
        if self.task.prompt_template is None:
            return [self.task.prompt_column]
        return list(dict.fromkeys(template_fields(self.task.prompt_template)))

    def prompt(self, row: Row, where: str) -> Text:
        """The prompt of a row. Raises ConfigError, naming `where`, for a missing or unusable value."""
        for column in self.columns:
            if missing := missing_value(row.get(column)):
                problem = f"{where} has {missing} in the column {column!r}"
                raise ConfigError(problem, key="task", hint="fill it in or remove the row")
        template = self.task.prompt_template
        filled = row[self.task.prompt_column] if template is None else fill(template, row, where, TEMPLATE)
        prompt = in_messages(filled, where)
        if isinstance(prompt, str) and prompt.strip():
            if self.task.format != "plain" and template is None and (turn := TURN.match(prompt)):
                problem = f"{where} is already written by a chat template ({turn[1]})"
                hint = "give its messages, or choose plain, and it stays as it is"
                raise ConfigError(problem, key="task.format", value=self.task.format, hint=hint)
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
            messages = settle_last_turn(messages, self.task.last_turn, where)
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
class Shot:
    """A worked example: a prompt, and its answer as a model would write it."""

    prompt: Text
    answer: str

    @property
    def messages(self) -> Iterator[Message]:
        """The conversation without its system message, which `with_shots` puts first, and a last turn of the data."""
        prompt = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        asked = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        yield from (message for message in asked if message["role"] != "system")
        yield {"role": "assistant", "content": self.answer}

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
    """Turns rows of the data at `path` into examples. shots: worked examples before every prompt."""

    task: TableTask
    path: str
    shots: tuple[Shot, ...] = ()

    @classmethod
    def of(cls, task: TableTask, columns: Sequence[str], head: Iterable[Row], path: str) -> RowConverter:
        """The converter of a task. head: the first rows, whose objects have columns, too.

        Raises ConfigError if a column that the task names is missing.
        """
        columns = list(dict.fromkeys([*columns, *(name for row in head for name in dotted(row))]))
        if task.processor:
            load(task.processor, PROCESSOR)
        else:
            key = "task.prompt_column" if task.prompt_template is None else TEMPLATE
            for column in PromptBuilder(task).columns:
                need_columns(columns, {key: column}, path)
            need_columns(columns, {"task.answer_column": task.answer_column}, path, "; or null: it has no answers")
        return cls(task, path)

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
        prompt = PromptBuilder(task).prompt(row, where)
        if column is not None:
            row["answer"] = row[column]
        return {**row, "prompt": prompt}


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Any]):
    """Examples that are converted on access. numbers: their rows in the table, ascending."""

    converter: RowConverter
    table: Table
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
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
