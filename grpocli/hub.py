"""The model hub: whether it is reachable, and checks of names and of model folders."""

from __future__ import annotations

import os
import re
import sys
import threading
from functools import lru_cache
from pathlib import Path

from grpocli.errors import ConfigError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
CREDENTIALS = re.compile(r"//[^/@\s]*@")
CONNECT_SECONDS = 3.0
READ_SECONDS = 0.5
"""Seconds to wait for an answer. None is needed: the connection shows that the hub is reachable."""
WITHIN_SECONDS = 4.0
"""Seconds for the whole check, because a connection timeout does not cover a silent name server."""


@lru_cache(maxsize=1)
def why_unreachable() -> str:
    """The reason why the hub is unreachable, as a phrase for the user; "" if it answers.

    Any answer counts, including a proxy's. Without one the hub's libraries are switched to offline mode. In offline
    mode (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE) there is no check, and the result is "".
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return ""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(ask(constants.ENDPOINT)), name="hub", daemon=True)
    asking.start()
    asking.join(WITHIN_SECONDS)
    problem = found[0] if found else f"no answer within {WITHIN_SECONDS:g} s"
    if problem:
        _go_offline()
    return f"{constants.ENDPOINT}: {problem}" if problem else ""


def ask(url: str) -> str:
    """Why a server does not answer, as a phrase; "" if it does, also with an error."""
    import httpx

    try:
        httpx.head(url, timeout=httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS))
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        return str(error) or type(error).__name__
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError) as error:  # of the server or of a proxy
        return f"not a valid address: {CREDENTIALS.sub('//', str(error))}"
    except httpx.HTTPError:
        pass  # the server is there; the libraries report this problem
    return ""


def _go_offline() -> None:
    """Switch imported libraries to offline mode, and through the environment later imports and child processes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):
        if module := sys.modules.get(name):
            vars(module)["HF_HUB_OFFLINE"] = True


def check_folder(key: str, path: str) -> None:
    """Raise ConfigError for `key` unless `path` is a folder with a model or a possible name on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _check_files(key, path, folder)
    if folder.exists():
        raise ConfigError("is a file; give the folder that holds config.json", key=key, value=path)
    if not HUB_ID.fullmatch(path) or path.startswith("."):
        raise ConfigError("there is no such folder", key=key, value=path)


def _check_files(key: str, path: str, folder: Path) -> None:
    needs = {"config.json": ("config.json",), "weights (*.safetensors)": WEIGHTS, "tokenizer files": TOKENIZER}
    for what, patterns in needs.items():
        if not any(True for pattern in patterns for _ in folder.glob(pattern)):
            raise ConfigError(f"the folder has no {what}; give one that transformers saved", key=key, value=path)
