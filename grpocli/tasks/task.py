"""Where prompts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Example = dict[str, Any]
"""`prompt` (a string, or a list of messages with `role` and `content`) and any further columns."""


class Task(Protocol):
    """A choice of the config group `task`."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; random access, the same at every call.

        Raises ConfigError, naming the key, where the data cannot be read, lacks a column, or is empty.
        """
        ...
