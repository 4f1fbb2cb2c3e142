"""Config sources for Hydra: classes, YAML files, parts in user code, and models by folder or hub name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.config import yaml_text
from grpocli.config.parts import CHOICES, CLASSES, SCHEMAS, choices_of, config_node
from grpocli.config.user_code import CHOICE, config_of, is_spec
from grpocli.errors import config_errors
from grpocli.version import PACKAGE

MODEL = re.compile(r"model/(.+)")


def conf_dir() -> str:
    """The folder of the config groups: inside an installed package, at the top level of a checkout."""
    installed = PACKAGE / "conf"
    return str(installed if installed.is_dir() else PACKAGE.parent / "conf")


@contextmanager
def composer(config_name: str) -> Iterator[Any]:
    """An object of Hydra's that composes, beside the one of a caller that may be a Hydra app itself."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(conf_dir(), job_name=config_name, version_base="1.3"):
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = before


class ListedNowhere(ConfigSource):  # type: ignore[misc]
    """A config source whose choices `--help` does not list."""

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class UserParts(ListedNowhere):
    """The choices FILE.py:NAME and module:NAME of every config group."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-user-parts"

    def load_config(self, config_path: str) -> ConfigResult:
        """The part's config. Raises ConfigError if there is no such part."""
        group, spec = CHOICE.fullmatch(config_path.removesuffix(".yaml")).groups()  # type: ignore[union-attr]
        config, package = config_of(group, spec)
        return ConfigResult(config=config, path=spec, provider="user", header={"package": package})

    def is_config(self, config_path: str) -> bool:
        return CHOICE.fullmatch(config_path.removesuffix(".yaml")) is not None


class Choices(ListedNowhere):
    """The schemas of all parts, with which their YAML files begin, and choices that are classes without a YAML file."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-choices"

    def load_config(self, config_path: str) -> ConfigResult:
        """The typed config of a part."""
        group, name = self._key(config_path)
        cls, package = CHOICES[group, name]
        if package is None and not config_path.startswith(SCHEMAS):
            package = group.replace("/", ".")
        return ConfigResult(config=config_node(cls), path=name, provider="grpocli", header={"package": package})

    def is_group(self, config_path: str) -> bool:
        return bool(choices_of(config_path))

    def is_config(self, config_path: str) -> bool:
        return self._key(config_path) in CHOICES

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter == ObjectType.GROUP else choices_of(config_path)

    def _key(self, config_path: str) -> tuple[str, str]:
        group, _, name = config_path.removesuffix(".yaml").removeprefix(f"{SCHEMAS}/").rpartition("/")
        return group, name


class Models(ListedNowhere):
    """`model=OWNER/NAME` and `model=FOLDER`, which mean `model=hf model.path=...`."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-models"

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of `model=hf` with this path."""
        path = _model_path(config_path)
        config = config_node(CLASSES["model/hf"])
        config.path = path
        return ConfigResult(config=config, path=str(path), provider="user", header={"package": "model"})

    def is_config(self, config_path: str) -> bool:
        return _model_path(config_path) is not None


class CheckedFiles(FileConfigSource):  # type: ignore[misc]
    """Hydra's source of YAML files, read by the C loader, which names the file of an error."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of a file. Raises ConfigError if it is broken."""
        file = Path(self.path, self._normalize_file_name(config_path))
        kinds, says = (*yaml_text.BROKEN, OmegaConfBaseException), "cannot be read: {}"
        with config_errors(*kinds, says=says, why=yaml_text.reason, key=str(file), hint="repair it"):
            text = file.read_text(encoding="utf-8")
            config, header = OmegaConf.create(yaml_text.load(text) or {}), self._get_header_dict(text)
            return ConfigResult(config=config, path=f"file://{self.path}", provider=self.provider, header=header)


# Hydra registers its own source later, and keeps this one if it has the same name.
CheckedFiles.__name__ = FileConfigSource.__name__


def _model_path(config_path: str) -> str | None:
    """The folder or hub name of `model/...`; None if it can only be a choice."""
    found = MODEL.fullmatch(config_path.removesuffix(".yaml"))
    if not found or is_spec(found[1]):
        return None
    return found[1] if "/" in found[1] or (Path(found[1]) / "config.json").is_file() else None


class GrpocliSources(SearchPathPlugin):  # type: ignore[misc]
    """Appends the sources to the search path, so that a YAML file wins over a class of the same name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in (Choices, UserParts, Models):
            search_path.append("grpocli", f"{source.scheme()}://")


def extend_hydra() -> None:
    """Register the sources with Hydra. Safe to call again."""
    for plugin in (Choices, UserParts, Models, GrpocliSources):
        Plugins.instance().register(plugin)
    SourcesRegistry.instance().types[CheckedFiles.scheme()] = CheckedFiles
