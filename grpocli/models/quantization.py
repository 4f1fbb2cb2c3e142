"""bitsandbytes: weights in 4 bits, and optimizers with states in 8."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from grpocli.errors import ConfigError

INSTALL = "pip install '.[bitsandbytes]' in a clone of grpocli"

# On a CPU it warns at every import that it has no kernels from the hub, which are not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def check_bitsandbytes(key: str, value: str) -> None:
    """Raise ConfigError if bitsandbytes, which a choice needs, is not installed. Does not import it."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError("needs bitsandbytes, which is not installed", key=key, value=value, hint=INSTALL)


def import_bitsandbytes(key: str, value: str) -> Any:
    """The library. Raises ConfigError if it cannot be imported."""
    check_bitsandbytes(key, value)
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"needs bitsandbytes, which cannot be imported: {cause}", key=key, value=value) from error
    return bitsandbytes
