"""Code of the user's, named in a config as FILE.py:NAME or module:NAME."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError


def load(function: str, key: str) -> Callable[..., Any]:
    """The function or class that FILE.py:NAME or module:NAME names.

    Raises ConfigError, naming `key`, where there is none.
    """
    place, _, name = function.rpartition(":")
    try:
        module = _file(Path(place).expanduser().resolve(), key) if place.endswith(".py") else _module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError.of(key, function, f"importing it raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError.of(key, function, f"{place} has no function {name}{nearest(name, vars(module))}")
    result: Callable[..., Any] = found
    return result


def _module(name: str) -> Any:
    _reachable(Path.cwd())
    return importlib.import_module(name)


def _reachable(folder: Path) -> None:
    """Let imports find what is in a folder, after everything that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@lru_cache(maxsize=16)
def _file(path: Path, key: str) -> Any:
    if not path.is_file():
        raise ConfigError.of(key, path, "there is no such file")
    _reachable(path.parent)  # as if it were run as a script
    name = f"grpocli_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a module up by its name
    spec.loader.exec_module(module)
    return module
