"""`grpocli -sc query=SHELL`: candidates for completing a command line. Hydra's shell script calls it at each TAB."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping

from grpocli.errors import ConfigError

CONFIGS = {"vllm-serve": "vllm_serve"}
"""The config names of commands whose overrides are not those of `grpocli train`."""
NO_OVERRIDES = ("compare", "rollouts")


def main(argv: list[str], commands: Collection[str], env: Mapping[str, str] = os.environ) -> int:
    """Print the candidates, or Hydra's script for a shell (`install=bash`). Returns the exit code."""
    from grpocli.cli.hydra_app import hydra_app

    line = env.get("COMP_LINE")
    if line is None or not any(word.startswith("query=") for word in argv):
        hydra_app(lambda config: None, "train", argv)
        return 0
    words = _words(line)
    if len(words) < 3:
        print(" ".join(name for name in commands if name.startswith(words[-1])))
    elif words[1] in commands and words[1] not in NO_OVERRIDES:
        os.environ["COMP_LINE"] = " ".join(["grpocli", *_overrides(words[2:])])
        try:
            hydra_app(lambda config: None, CONFIGS.get(words[1], "train"), argv)
        except ConfigError:  # a wrong override: the command reports it when it runs
            return 0
    return 0


def _words(line: str) -> list[str]:
    """The words of a line. The last one, which is being typed, is empty after a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    return [*words, ""] if len(words) < 2 or line[-1:].isspace() else words


def _overrides(words: list[str]) -> list[str]:
    """The rewritten overrides before the word that is being typed, and that word."""
    from grpocli.composition.overrides import rewritten

    return [*rewritten([word for word in words[:-1] if "=" in word and not word.startswith("-")]), words[-1]]
