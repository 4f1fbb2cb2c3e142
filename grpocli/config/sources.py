"""Sources of configs for Hydra: the parts in a user's code, and models by folder or hub name."""

from __future__ import annotations

import re
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from grpocli.config.parts import stored
from grpocli.config.user_parts import UserParts, is_spec

MODEL = re.compile(r"model/(.+)")


class Models(ConfigSource):  # type: ignore[misc]
    """`model=OWNER/NAME` and `model=FOLDER`, which mean `model=hf model.path=...`."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-models"

    def load_config(self, config_path: str) -> ConfigResult:
        """`model=hf` with its path."""
        path = _path(config_path)
        config = OmegaConf.structured(stored("model")["hf"])
        config.path = path
        return ConfigResult(config=config, path=str(path), provider="user", header={"package": "model"})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return _path(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _path(config_path: str) -> str | None:
    """The folder or hub name of `model/...`; None for what can only be the name of a choice."""
    found = MODEL.fullmatch(config_path.removesuffix(".yaml"))
    if not found or is_spec(found[1]):
        return None
    return found[1] if "/" in found[1] or (Path(found[1]) / "config.json").is_file() else None


class OwnSources(SearchPathPlugin):  # type: ignore[misc]
    """Puts both last into the search path: names of choices come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in (UserParts, Models):
            search_path.append("grpocli", f"{source.scheme()}://")


def extend_hydra() -> None:
    """Register the sources with Hydra. Idempotent."""
    for plugin in (UserParts, Models, OwnSources):
        Plugins.instance().register(plugin)
