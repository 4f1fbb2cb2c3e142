"""Restores the state of a test's process after a command that ran in it."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from grpocli import text
from grpocli.composition.compose import register_parts
from grpocli.config.parts import CHOICES, CLASSES

PYTEST_VARIABLE = "PYTEST_CURRENT_TEST"

registered = functools.cache(register_parts)  # registered parts stay


@contextmanager
def isolated(made_here: Path) -> Iterator[None]:
    """A block after which parts, imported modules of the folder `made_here`, `sys.path`, `sys.argv`, the working
    directory, the environment, Hydra's config, masked secrets and the root logger's level are as before."""
    registered()
    choices, classes = dict(CHOICES), dict(CLASSES)
    path, argv, known, folder, environ = list(sys.path), sys.argv, set(sys.modules), Path.cwd(), dict(os.environ)
    hydra, level, secrets = HydraConfig.instance().cfg, logging.root.level, dict(text._shown)
    try:
        yield
    finally:
        sys.path[:], sys.argv = path, argv
        HydraConfig.instance().cfg = hydra
        logging.root.setLevel(level)
        text._shown.clear()
        text._shown.update(secrets)
        for registry, before in ((CHOICES, choices), (CLASSES, classes)):
            registry.clear()
            registry.update(before)
        for name in set(sys.modules) - known:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{made_here}{os.sep}"):
                del sys.modules[name]
        os.chdir(folder)
        for name in set(os.environ) - set(environ) - {PYTEST_VARIABLE}:
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if name != PYTEST_VARIABLE})
