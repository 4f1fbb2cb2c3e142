"""Which values of a config run code outside grpocli or send a key somewhere: of a downloaded config, before anything
of it is imported.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from urllib.parse import urlsplit

from hydra.core.override_parser.types import Override

from grpocli.config.build import Leaf
from grpocli.config.overrides import leaves_of
from grpocli.config.parts import CLASSES, USER_CODE, is_marked
from grpocli.config.user_parts import GROUP, is_spec
from grpocli.environments.environment import EnvironmentConfig
from grpocli.environments.tools import READY
from grpocli.http import is_loopback

GROUPS = re.compile(rf"{GROUP.pattern}|algorithm|recipe|.*/.*")
VLLM = ("engine.vllm_args.", "engine.speculative.")
"""Options that vLLM takes, some of which name a class or a file of Python."""
IMPORTS = re.compile("module|plugin|cls|middleware|logits.processors")
IMPORTABLE = re.compile(r"[\w-]+([.:][\w-]+)+|.*\.py")
SENDS = re.compile(r".*\.base_url(\..+)?|(engine|reward|algorithm)\.(.*\.)?api_key(_file)?")
"""The server that gets a key, and the variable or the file that holds it."""
KERNEL = re.compile(r"(?!kernels-community/).*/.*")
"""Attention that transformers would download as code; its own organization's it trusts itself."""


def code_in(override: Override) -> Leaf | None:
    """The first value of an override that runs code of others: a choice that names code, or the value of a key."""
    is_choice = "." not in override.key_or_group
    for leaf, value in leaves_of(override):
        if runs_code(leaf, value) or (is_choice and _imports(override.key_or_group, value)):
            return leaf, value
    return None


def runs_code(key: str, value: Any) -> bool:
    """Whether a value of a config makes the run execute code that is no part of grpocli."""
    name = key.rpartition(".")[2].replace("-", "_")
    if name == "_target_":
        return bool(foreign_target({"_target_": value}))
    if name == "simple_templates":  # of fsspec: without it, an index of files is a program
        return True
    option = next((key.removeprefix(start) for start in VLLM if key.startswith(start)), None)
    if option is not None and _imported_by_vllm(option, value):
        return True
    if not value or value == "???":
        return False
    if name in ("trust_remote_code", "unsafe"):
        return True
    text = str(value)
    if ".base_url" in key:
        return not is_loopback(urlsplit(text).hostname or "")
    if SENDS.fullmatch(key):
        return key.endswith("_file") or value not in _defaults()
    if name in ("attention", "attn_implementation"):
        return KERNEL.fullmatch(text) is not None
    if key.endswith((".arguments.taskset", ".arguments.env")):  # of the environment of task=verifiers
        return True
    return is_marked(key, USER_CODE) and not key.endswith(".environment.env") and not _is_own(key, text)


def foreign_target(node: Any) -> str:
    """The first `_target_` below a plain config that is not a registered part; "" if there is none."""
    if not isinstance(node, dict):
        return ""
    target = str(node.get("_target_", ""))
    if target and target not in CLASSES:
        return target
    return next((found for child in node.values() if (found := foreign_target(child))), "")


def _imported_by_vllm(option: str, value: Any) -> bool:
    """Whether an option of vLLM may name code. A name with other characters could hold a value on its command line."""
    if re.search(r"[^\w.-]", option):
        return True
    text = value if isinstance(value, str) else ""
    named = bool(text) and IMPORTS.search(option) is not None
    return named or text.startswith(("{", "[")) or IMPORTABLE.fullmatch(text) is not None


def _imports(group: str, choice: Any) -> bool:
    """Whether a choice comes from elsewhere than the config groups. That of a model may be its folder."""
    if not isinstance(choice, str) or not GROUPS.fullmatch(group):
        return False
    elsewhere = "$" in choice or (group != "model" and (".." in choice or choice.startswith("/")))
    return elsewhere or is_spec(choice)


def _is_own(key: str, value: str) -> bool:
    """Whether a value of a key that names code is a choice that comes with grpocli."""
    if key.endswith(".tools"):
        return value in READY or value in READY.values()
    own = {one.name for one in _defaults() if isinstance(one, EnvironmentConfig) and one.name}
    return key.endswith(".environment.name") and value in own


def _defaults() -> list[Any]:
    """The defaults of grpocli's own parts."""
    own = [cls for cls in CLASSES.values() if dataclasses.is_dataclass(cls) and cls.__module__.startswith("grpocli.")]
    return [field.default for cls in own for field in dataclasses.fields(cls)]
