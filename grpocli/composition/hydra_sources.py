"""Config sources for Hydra: classes, YAML files, parts in user code, and models by folder or hub name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.config import yaml_text
from grpocli.config.parts import choices_of, stored, typed_choice
from grpocli.config.user_parts import ListedNowhere, UserParts, is_spec
from grpocli.errors import ConfigError
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


class Choices(ListedNowhere):
    """Choices that are classes without a YAML file, for example parts of other packages."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-choices"

    def load_config(self, config_path: str) -> ConfigResult:
        """The typed config of a part."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        found = typed_choice(group, name)
        package = found.package or group.replace("/", ".")
        config = OmegaConf.structured(found.node)
        return ConfigResult(config=config, path=name, provider="grpocli", header={"package": package})

    def is_group(self, config_path: str) -> bool:
        return bool(choices_of(config_path))

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name in choices_of(group)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter == ObjectType.GROUP else choices_of(config_path)


class Models(ListedNowhere):
    """`model=OWNER/NAME` and `model=FOLDER`, which mean `model=hf model.path=...`."""

    @staticmethod
    def scheme() -> str:
        return "grpocli-models"

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of `model=hf` with this path."""
        path = _model_path(config_path)
        config = OmegaConf.structured(stored("model")["hf"])
        config.path = path
        return ConfigResult(config=config, path=str(path), provider="user", header={"package": "model"})

    def is_config(self, config_path: str) -> bool:
        return _model_path(config_path) is not None


class CheckedFiles(FileConfigSource):  # type: ignore[misc]
    """Hydra's source of YAML files, which names the file of an error."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of a file. Raises ConfigError if it is broken."""
        try:
            return super().load_config(config_path)
        except (*yaml_text.BROKEN, OmegaConfBaseException) as error:
            file = Path(self.path, self._normalize_file_name(config_path))
            raise ConfigError(f"cannot be read: {yaml_text.reason(error)}", key=str(file), hint="repair it") from error


class SharedStore(StructuredConfigSource):  # type: ignore[misc]
    """Hydra's store of typed configs, without the copy of all of them that Hydra makes for each list of choices."""

    def __deepcopy__(self, memo: dict[int, object]) -> SharedStore:
        return self


# Hydra registers its own sources later; for a scheme that a class of the same name has, it keeps that class.
CheckedFiles.__name__ = FileConfigSource.__name__
SharedStore.__name__ = StructuredConfigSource.__name__


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
    for source in (CheckedFiles, SharedStore):
        SourcesRegistry.instance().types[source.scheme()] = source
