"""The model hub: whether it is reachable, names on it, downloads from it, and checks of model folders.

The token is the one that huggingface_hub finds: HF_TOKEN, or that of `hf auth login`. grpocli neither reads nor stores
it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from grpocli.errors import ConfigError, config_errors
from grpocli.text import CREDENTIALS

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
PREFIX = "hub:"
PUSH_KEY = "hub.push"
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_PATH = re.compile(rf"{PREFIX}(?P<repo>{REPO.pattern})(@(?P<revision>[\w./-]+))?")
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""The files of a model: no pickled weights. Python files run only with trust_remote_code."""
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
    if problem:  # imported libraries go offline, and through the environment later imports and child processes
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):
            if module := sys.modules.get(name):
                vars(module)["HF_HUB_OFFLINE"] = True
    return f"{constants.ENDPOINT}: {problem}" if problem else ""


def ask(url: str) -> str:
    """Why a server does not answer, as a phrase; "" if it does, also with an error."""
    import httpx

    try:
        httpx.head(url, timeout=httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS))
    except (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError):  # the server is there
        return ""
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # of the server or of a proxy
        return CREDENTIALS.sub("//", str(error)) or type(error).__name__
    return ""


def check_folder(key: str, path: str) -> None:
    """Raise ConfigError for `key` unless `path` is a folder with a model or a possible name on the hub."""
    if hub_path(path, key):
        return None
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


class HubPath(NamedTuple):
    """`hub:OWNER/NAME@REVISION`."""

    repo: str
    revision: str | None = None


def hub_path(text: str, key: str) -> HubPath | None:
    """The place that a text beginning with `hub:` names; None for another text. Raises ConfigError if it is no name."""
    if not text.startswith(PREFIX):
        return None
    found = HUB_PATH.fullmatch(text)
    if not found or ".." in text:
        raise ConfigError("expected hub:OWNER/NAME[@REVISION]", key=key, value=text)
    return HubPath(found["repo"], found["revision"])


def model_folder(text: str, key: str, revision: str | None = None) -> str:
    """The path of a model to load: for `hub:...` the folder of its downloaded files, else the text itself.

    revision: of a name without `@REVISION`. Raises ConfigError for `key` if the download fails, or if the model has no
    safetensors.
    """
    place = hub_path(text, key)
    if place is None:
        return text
    others = ["checkpoints/*", "rollouts/*"]  # of a pushed run, which have files of models, too
    with hub_errors(key, text, cached=True):
        from huggingface_hub import snapshot_download

        folder: str = snapshot_download(
            place.repo, revision=place.revision or revision, allow_patterns=[*MODEL_FILES], ignore_patterns=others
        )
    _check_files(key, text, Path(folder))
    return folder


@contextmanager
def hub_errors(key: str, value: object, cached: bool = False) -> Iterator[None]:
    """A block of requests whose errors become a ConfigError for `key`, in one sentence.

    cached: whether the block may work without the hub, from the cache.
    """
    reason = why_unreachable()
    silent = f"the hub does not answer ({reason})"
    if reason and not cached:
        raise ConfigError(silent, key=key, value=value)
    why = f"is not in the cache, and {silent}" if reason else "{}"
    with config_errors(Exception, says=why, why=request_problem, key=key, value=value):
        yield


def request_problem(error: BaseException) -> str:
    """What went wrong in a request to the hub, as one sentence without its address."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the hub does not accept the token, or wants one: export HF_TOKEN, or `hf auth login`"
    if status == 403:
        return "the token may not do this: choose one with write permission for this name"
    if error.__cause__ is not None and status is None:  # the client names the file, and its cause the reason
        return f"{error}".rstrip(".") + f": {request_problem(error.__cause__)}"
    said = getattr(error, "server_message", None) or str(error)
    cause = next((line.strip() for line in str(said).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {CREDENTIALS.sub('//', cause)}"[:300]


def hub_api() -> Any:
    """A client of the hub, with the token that huggingface_hub finds."""
    from huggingface_hub import HfApi

    from grpocli.version import __version__

    return HfApi(library_name="grpocli", library_version=__version__)


@lru_cache
def check_may_push(key: str, repo: str, revision: str | None, *, private: bool) -> None:
    """Create the repository, and the branch, unless they exist. Raises ConfigError if the token may not write to it."""
    api = hub_api()
    with hub_errors(key, repo):
        api.create_repo(repo, private=private, exist_ok=True)
        api.auth_check(repo, write=True)  # create_repo accepts a repository that exists and may not be written
        if private and not api.repo_info(repo).private:
            print(f"warning: {repo} is a public repository, and hub.private=true does not change it", file=sys.stderr)
        if revision and revision not in [branch.name for branch in api.list_repo_refs(repo).branches]:
            empty = api.list_repo_commits(repo)[-1].commit_id  # a branch of the newest commit would have its files
            api.create_branch(repo, branch=revision, revision=empty, exist_ok=True)
