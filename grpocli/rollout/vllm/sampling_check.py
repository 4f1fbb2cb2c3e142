"""What vLLM is asked before training starts: whether it takes the run's sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grpocli.errors import ConfigError, EngineError
from grpocli.types import Request, Sampling

REASON = 300  # characters of vLLM's reason: it may print all of its parser's state


def check_sampling(sampling: Sampling, ask: Callable[[Request, Sampling], Any]) -> None:
    """Have one token sampled where only vLLM can tell: its grammar decides which regex or JSON schema it takes.

    ask: sends a request, and raises EngineError where vLLM refuses it. Raises ConfigError that names the key.
    """
    name = sampling.structure
    if not name:
        return
    try:
        ask(Request([0], 1, seed=0), replace(sampling, max_tokens=1))
    except EngineError as error:
        reason = " ".join(str(error).split())[:REASON]
        raise ConfigError(
            f"vLLM cannot use it: {reason}", key=f"rollout.{name}", value=getattr(sampling, name)
        ) from error
