"""`resume=hub:OWNER/NAME`: the folder of a pushed run, with its newest checkpoint, on this machine.

The downloaded config could name any code (`runs_code`). So code outside grpocli must be named again on the
command line. The config is checked before it is composed, because Hydra imports choices of users, and again as a whole,
with its interpolations resolved.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.compose import compose, register_parts
from grpocli.composition.overrides import in_quotes, leaves_of, parse, text_of
from grpocli.composition.resume import Resume, of_hydra
from grpocli.config.environment import OVERRIDES, raw_value, unresolved
from grpocli.config.parts import CLASSES, USER_CODE, is_marked
from grpocli.config.user_code import GROUP, is_spec
from grpocli.config.yaml_text import Leaf, leaves
from grpocli.environments.environment import EnvironmentConfig
from grpocli.environments.tools import READY
from grpocli.errors import ConfigError
from grpocli.files import remove
from grpocli.http import is_loopback
from grpocli.hub import MODEL_FILES, HubPath, hub_api, hub_errors, hub_path
from grpocli.publish.published import ELSEWHERE, HIDDEN
from grpocli.publish.push import TEXTS
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun

KEY = "resume"
STATE = "trainer.json"
CONFIG = "config.yaml"
CHECKPOINT = re.compile(rf"(checkpoints/step_(\d{{6,9}}))/{re.escape(STATE)}")
ROLLOUTS = re.compile(r"rollouts/step_\d{6,9}\.parquet")


def fetched(overrides: Sequence[str], searched: Sequence[str] = ()) -> list[str]:
    """The overrides with the folder of the downloaded run in the place of `resume=hub:...`. searched: `search_path`.

    The folder is that of hydra.run.dir=, or runs/OWNER/NAME. Raises ConfigError if there is no such run, if the folder
    is taken, or if the run needs something that is not given here.
    """
    named = [text_of(text) for text in overrides if text.startswith(f"{KEY}=")][-1]
    place = hub_path(named, KEY)
    assert place is not None
    if place.folder:
        raise ConfigError("expected hub:OWNER/NAME, hub:OWNER/NAME@REVISION", key=KEY, value=named)
    folders = [text_of(text) for text in overrides if text.startswith("hydra.run.dir=")]
    folder = Path(folders[-1]) if folders else Path("runs") / place.repo
    rest = [text for text in overrides if not text.startswith((f"{KEY}=", "hydra.run.dir="))]
    fetch(place, named, folder, rest, searched)
    return [f"{KEY}={in_quotes(str(folder))}", *rest]


def fetch(place: HubPath, named: str, folder: Path, given: Sequence[str], searched: Sequence[str] = ()) -> None:
    """Download a run into a new folder. given: overrides, which may name code and files again."""
    RunDir(folder).check_free()
    print(f"downloading {named} ...", flush=True)
    with hub_errors(KEY, named):
        from huggingface_hub import hf_hub_download, snapshot_download

        api = hub_api()
        commit = api.repo_info(place.repo, revision=place.revision).sha
        files = api.list_repo_files(place.repo, revision=commit)
        if CONFIG not in files:
            raise ConfigError("holds no run of grpocli: there is no config.yaml in it", key=KEY, value=named)
        config = check_config(Path(hf_hub_download(place.repo, CONFIG, revision=commit)), named, given, searched)
        checkpoint = newest_checkpoint(files, named)
        rollouts = filter(ROLLOUTS.fullmatch, files)
        wanted = [*TEXTS, *rollouts, *(f"{checkpoint}/{kind}" for kind in _kinds(given))]
        # of this commit alone: a branch may have moved since an earlier download was interrupted
        partial = folder.with_name(f"{folder.name}.{commit[:12]}.download")
        snapshot_download(place.repo, revision=commit, local_dir=partial, allow_patterns=wanted)
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    (partial / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    if folder.exists():
        remove(folder)  # it is free, so it is empty but for the log of a run that never began
    partial.rename(folder)
    for other in folder.parent.glob(f"{escape(folder.name)}.*.download"):
        remove(other)


def _kinds(given: Sequence[str]) -> list[str]:
    """The kinds of files of a checkpoint: Python files only for a model whose code is trusted again."""
    trusts = any(text.lstrip("+").startswith("model.trust_remote_code=") for text in given)
    return [kind for kind in (*MODEL_FILES, "*.pt") if trusts or kind != "*.py"]


def newest_checkpoint(files: Sequence[str], named: str) -> str:
    """The folder of the newest checkpoint among the files of a repository."""
    whole = {int(found[2]): found[1] for path in files if (found := CHECKPOINT.fullmatch(path))}
    if not whole:
        problem = "holds no checkpoint, from which alone a run resumes"
        hint = "push them with hub.checkpoints=true, or grpocli push RUN --checkpoints"
        raise ConfigError(problem, key=KEY, value=named, hint=hint)
    return whole[max(whole)]


def check_config(path: Path, named: str, given: Sequence[str], searched: Sequence[str] = ()) -> dict[str, Any]:
    """The config that is safe to keep: without code outside grpocli, except for what `given` names again.

    Raises ConfigError if it has such code that is not named again, or files that are not on the hub. Imports none of
    it: Hydra reads the saved overrides only after they have passed.
    """
    register_parts()
    downloaded = SavedRun(path.parent)
    loaded = downloaded.config
    if downloaded.problems:
        raise ConfigError(f"its {downloaded.problems[0]}", key=KEY, value=named)
    saved = [text for text in map(str, loaded.get(OVERRIDES) or []) if not of_hydra(text)]
    repeated = [text for text in saved if _override_is_code(text, named, given)]
    values = {name: node for name, node in loaded.items() if name != OVERRIDES}
    config: dict[str, Any] = _without(values, repeated_code(values, named, given))
    # a later choice of a group replaces an earlier one unread; other overrides Hydra would read, too
    choices = {text.partition("=")[0] for text in given if not {".", "@", "+"} & {*text.partition("=")[0]}}
    config[OVERRIDES] = [text for text in saved if text not in repeated or text.partition("=")[0] in choices]
    with TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(yaml.safe_dump(config))
        resume = Resume(Path(folder), [text for text in given if not of_hydra(text)])
        whole = _composed(resume, named, searched)
    kept = whole.pop(OVERRIDES)[: -len(resume.given) or None]
    repeated_code(whole, named, given)  # an interpolation may have become code
    again = [text for text in given if _name(text) in map(_name, repeated)]
    return config | {OVERRIDES: [*(text for text in kept if text not in repeated), *again]}


def _composed(resume: Resume, named: str, searched: Sequence[str]) -> dict[str, Any]:
    """The plain config of the resumed run, with the values of its interpolations."""
    composed = compose([*searched, *resume.overrides(resume.given)])
    try:
        whole = resume.merged(composed)
        line = raw_value(whole, OVERRIDES)
        whole[OVERRIDES] = []  # it may name a variable that is not set
        return OmegaConf.to_container(whole, resolve=True) | {OVERRIDES: line}  # type: ignore[operator, return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(unresolved(error)) from error
    except ConfigError as error:
        raise error if error.value != resume.folder else ConfigError(error.problem, key=KEY, value=named) from error


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _override_is_code(override: str, named: str, given: Sequence[str]) -> bool:
    """Whether a saved override names code outside grpocli. Raises ConfigError unless `given` replaces it."""
    if (found := parse(override)) is None:
        raise ConfigError(f"its config.yaml is broken: {override}", key=KEY, value=named)
    code = code_in(found)
    if code and _name(override) not in map(_name, given):
        raise _untrusted(_name(override), code[1], named)
    return code is not None


def repeated_code(node: dict[str, Any], named: str, given: Sequence[str]) -> set[str]:
    """The keys of code that `given` names again. Raises ConfigError for code and files that must be given."""
    keys = [_name(text).partition("@")[0].replace("/", ".") for text in given]
    again = set()
    for key, value in leaves(node):
        is_given = any(f"{key}.".startswith(f"{one}.") for one in keys)
        if runs_code(key, value):
            if not is_given:
                raise _untrusted(key, value, named)
            again.add(key)
        if isinstance(value, str) and not is_given:
            _refuse_unpushed(key, value, named)
    return again


def _refuse_unpushed(key: str, value: str, named: str) -> None:
    if value.startswith(f"{ELSEWHERE}/"):
        problem = f"{key} was a file outside of the run, {Path(value.partition('/')[2])}, which is not on the hub"
        raise ConfigError(problem, key=KEY, value=named, hint="give this key again, with its place here")
    if HIDDEN in value:
        problem = f"{key} has a secret, which is not on the hub"
        raise ConfigError(problem, key=KEY, value=named, hint="give this key again")


def _untrusted(key: str, value: object, named: str) -> ConfigError:
    does = "chooses where a key is sent" if SENDS.fullmatch(key) else "runs code outside grpocli"
    problem = f"its config {does}, {key}={value}"
    return ConfigError(problem, key=KEY, value=named, hint="if you trust it, give this key again")


def _without(node: Any, keys: set[str], prefix: str = "") -> Any:
    if not isinstance(node, dict):
        return node
    below = {name: f"{prefix}.{name}".lstrip(".") for name in node}
    return {name: _without(value, keys, below[name]) for name, value in node.items() if below[name] not in keys}


GROUPS = re.compile(rf"{GROUP.pattern}|algorithm|recipe|.*/.*")
VLLM = ("engine.vllm_args.", "engine.speculative.")
"""Options that vLLM takes, some of which name a class or a file of Python."""
IMPORTS = re.compile("module|plugin|cls|middleware|logits.processors")
IMPORTABLE = re.compile(r"[\w-]+([.:][\w-]+)+|.*\.py")
SENDS = re.compile(r".*\.base_url(\..+)?|(engine|reward|algorithm)\.(.*\.)?api_key(_file)?|tracker\.options\..+")
"""The server that gets a key, the variable or the file that holds it, and what a tracker's library takes."""
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
    if not value or value in ("???", HIDDEN):  # HIDDEN has its own error
        return False
    if name in ("trust_remote_code", "unsafe"):
        return True
    text = str(value)
    if ".base_url" in key:
        return not is_loopback(urlsplit(text).hostname or "")
    if SENDS.fullmatch(key):
        return key.endswith("_file") or value not in _defaults()
    if name == "attention":
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
