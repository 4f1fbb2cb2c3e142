"""Restores the state of a test's process after a command that ran in it."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from grpocli import text
from grpocli.composition.compose import register_parts
from grpocli.config.parts import CLASSES, MARKED

PYTEST_VARIABLE = "PYTEST_CURRENT_TEST"

registered = functools.cache(register_parts)  # registered parts stay


@contextmanager
def isolated(made_here: Path) -> Iterator[None]:
    """A block after which parts, imported modules of the folder `made_here`, `sys.path`, `sys.argv`, the working
    directory, the environment, Hydra's config, masked secrets and the root logger's level are as before."""
    registered()
    store = ConfigStore.instance()
    repo, marked = _copied(store.repo), {kind: set(keys) for kind, keys in MARKED.items()}
    classes = dict(CLASSES)
    path, argv, known, folder, environ = list(sys.path), sys.argv, set(sys.modules), Path.cwd(), dict(os.environ)
    hydra, level, secrets = HydraConfig.instance().cfg, logging.root.level, dict(text._shown)
    try:
        yield
    finally:
        store.repo, sys.path[:], sys.argv = repo, path, argv
        HydraConfig.instance().cfg = hydra
        logging.root.setLevel(level)
        text._shown.clear()
        text._shown.update(secrets)
        MARKED.update(marked)
        CLASSES.clear()
        CLASSES.update(classes)
        for name in set(sys.modules) - known:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{made_here}{os.sep}"):
                del sys.modules[name]
        os.chdir(folder)
        for name in set(os.environ) - set(environ) - {PYTEST_VARIABLE}:
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if name != PYTEST_VARIABLE})


def _copied(repo: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(inner) if isinstance(inner, dict) else inner for name, inner in repo.items()}
