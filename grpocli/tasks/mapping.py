"""From a row of somebody's table to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpocli.config.parts import nearest, template_fields
from grpocli.errors import ConfigError
from grpocli.tasks.loading import Row, need_columns, nothing_in, short
from grpocli.types import Message, Text


@dataclass(frozen=True, slots=True)
class Mapping:
    """How a row becomes a prompt; see Jsonl for the fields."""

    prompt_column: str
    prompt_template: str | None
    prefix: str
    system_prompt: str | None
    format: str

    @property
    def columns(self) -> list[str]:
        """The columns that a prompt is made of."""
        if self.prompt_template is None:
            return [self.prompt_column]
        return list(dict.fromkeys(template_fields(self.prompt_template)))

    def check(self, columns: Sequence[str], path: str) -> None:
        """Raise ConfigError unless the table has what the prompt is made of."""
        if self.prompt_template is None:
            need_columns(columns, {"task.prompt_column": self.prompt_column}, path)
        for column in self.columns:
            if column not in columns:
                raise ConfigError(
                    f"there is no column {column!r}; {path} has {', '.join(columns)}{nearest(column, columns)}",
                    key="task.prompt_template",
                    value=repr(self.prompt_template),
                )

    def prompt(self, row: Row, where: str) -> Text:
        """The prompt of `row`. Raises ConfigError, with `where` it is, for a missing or unusable value."""
        for column in self.columns:
            if missing := nothing_in(row[column]):
                raise ConfigError(f"task: {where} has {missing} in the column {column!r}; fill it in or remove the row")
        prompt = self._fill(row, where) if self.prompt_template is not None else row[self.prompt_column]
        if isinstance(prompt, str) and prompt.strip():
            return self._from_text(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
            return self._from_messages(prompt, where)
        raise ConfigError(
            f"{where} has {short(prompt)} there; a prompt is text or a list of messages, and not empty",
            key="task.prompt_column",
            value=self.prompt_column,
        )

    def _fill(self, row: Row, where: str) -> str:
        assert self.prompt_template is not None
        try:
            return self.prompt_template.format(**{column: row[column] for column in self.columns})
        except ValueError as error:
            raise ConfigError(
                f"cannot be filled with {where}: {error}", key="task.prompt_template", value=repr(self.prompt_template)
            ) from error

    def _from_text(self, text: str) -> Text:
        text = self.prefix + text
        if self.format != "chat" and self.system_prompt is None:
            return text
        return [*self._system(), {"role": "user", "content": text}]

    def _from_messages(self, messages: list[dict[str, Any]], where: str) -> Text:
        # a table gives every message the keys of all of them, and chat templates take a None for a value
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if self.format == "plain":
            return self.prefix + "\n".join(str(message.get("content", "")) for message in messages)
        if self.prefix:
            raise ConfigError(
                f"{where} is a list of messages; put worked examples into them, or choose task.format=plain",
                key="task.prefix",
                value=repr(self.prefix),
            )
        if self.system_prompt is not None and messages[0].get("role") == "system":
            messages = messages[1:]
        return [*self._system(), *messages]

    def _system(self) -> list[Message]:
        return [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
