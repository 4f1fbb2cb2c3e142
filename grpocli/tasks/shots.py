"""task.shots: worked examples before every prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.tasks.task import Example
from grpocli.tasks.text import text_hash, text_of
from grpocli.types import Message, Text


@dataclass(frozen=True, slots=True)
class Shot:
    """An example's prompt, with its answer as a model would write it."""

    prompt: Text
    answer: str

    @property
    def question(self) -> int:
        """A hash of the prompt."""
        return text_hash(self.prompt)

    @property
    def messages(self) -> Iterator[Message]:
        """A conversation without its system message, which comes once."""
        asked = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        yield from (message for message in asked if message["role"] != "system")
        yield {"role": "assistant", "content": self.answer}

    @property
    def text(self) -> str:
        """As plain text, with an empty line after it."""
        asked = self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)
        return f"{asked}{self.answer}\n\n"

    @classmethod
    def of(cls, example: Example, template: str, where: str) -> Shot:
        """Raises ConfigError, saying `where`, for a column of the template's that is missing or empty."""
        from grpocli.config.parts import template_fields

        fields = dict.fromkeys(template_fields(template, "task.shot_template"))
        for column in fields:
            if example.get(column) is None:
                columns = [name for name, value in example.items() if value is not None]
                problem = f"{where} has nothing in the column {column!r}; it has {', '.join(columns)}"
                raise ConfigError(problem + nearest(column, columns), key="task.shot_template", value=repr(template))
        values: dict[str, Any] = {column: example[column] for column in fields}
        try:
            return cls(text_of(example, where), template.format(**values))
        except ValueError as error:
            raise ConfigError(
                f"cannot be filled with {where}: {error}", key="task.shot_template", value=repr(template)
            ) from error


def with_shots(prompt: Text, shots: Sequence[Shot]) -> Text:
    """Messages: the system's, the worked examples, the rest. Plain text: after the worked examples."""
    if isinstance(prompt, str):
        return "".join(shot.text for shot in shots) + prompt
    system = [message for message in prompt[:1] if message["role"] == "system"]
    return [*system, *(message for shot in shots for message in shot.messages), *prompt[len(system) :]]


def choose(candidates: Iterable[tuple[Example, str]], n: int, template: str, path: str) -> list[Shot]:
    """Of the first n different examples, each with `where` it is; there has to be another one besides.

    Raises ConfigError where there are not as many.
    """
    shots: dict[int, Shot] = {}
    for example, where in candidates:
        question = text_hash(example["prompt"])
        if question in shots:
            continue
        if len(shots) == n:
            return list(shots.values())
        shots[question] = Shot.of(example, template, where)
    found = len(shots)
    raise ConfigError(
        f"{path} has {found} different examples to train on; take {found - 1} or less", key="task.shots", value=n
    )
