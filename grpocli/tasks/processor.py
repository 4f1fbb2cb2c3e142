"""task.processor: a function of the user's that makes an example of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpocli.config.user_code import load
from grpocli.errors import ConfigError
from grpocli.rewards.deadline import within
from grpocli.tasks.loading import Row
from grpocli.user_frames import where as at

PROCESSOR = "task.processor"


def processed(function: str, timeout: float, row: Row, where: str) -> dict[str, Any]:
    """The example. Raises ConfigError, with `where` the row is, for what is none."""
    process = load(function, PROCESSOR)
    try:
        example = within(timeout, f"no example within {timeout:g} s ({PROCESSOR}_timeout)", lambda: process(dict(row)))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        what = f"raised {type(error).__name__} for {where}: {' '.join(str(error).split())}{at(error)}"
        raise ConfigError(what, key=PROCESSOR, value=function) from error
    if not isinstance(example, Mapping) or not isinstance(example.get("prompt"), str | list) or not example["prompt"]:
        found = f"{example!r}"[:200]
        raise ConfigError(
            f"made {found} of {where}; return a dict with `prompt`, text or messages", key=PROCESSOR, value=function
        )
    return dict(example)
