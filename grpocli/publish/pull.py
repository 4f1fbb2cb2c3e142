"""`resume=hub:OWNER/NAME`: the folder of a pushed run, with its newest checkpoint, on this machine.

The downloaded config could name any code. So what it may set is listed (`is_accepted`), and everything else must be
named again on the command line. The config is checked before it is composed, because Hydra imports choices of users,
and again as a whole, with its interpolations resolved.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from functools import cache
from glob import escape
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.compose import compose, register_parts
from grpocli.composition.overrides import in_quotes, leaves_of, parse, text_of
from grpocli.composition.resume import Resume, of_hydra
from grpocli.config.environment import OVERRIDES, raw_value, unresolved
from grpocli.config.parts import CLASSES
from grpocli.config.user_code import GROUP, is_spec
from grpocli.config.yaml_text import Leaf, leaves
from grpocli.environments.tools import READY
from grpocli.errors import ConfigError
from grpocli.files import remove
from grpocli.hub import MODEL_FILES, HubPath, hub_api, hub_errors, hub_path
from grpocli.publish.published import ELSEWHERE, HIDDEN
from grpocli.publish.push import TEXTS
from grpocli.runs.run_dir import RunDir, step_of
from grpocli.runs.saved_run import SavedRun

KEY = "resume"
STATE = "trainer.json"
CONFIG = "config.yaml"


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
        wanted = [*TEXTS, "rollouts/step_*.parquet", *(f"{checkpoint}/{kind}" for kind in _kinds(given))]
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
    folders = [path.parent for path in map(PurePosixPath, files) if path.name == STATE]
    whole = {step_of(path): str(path) for path in folders if path.parent.name == "checkpoints" and step_of(path) >= 0}
    if not whole:
        problem = "holds no checkpoint, from which alone a run resumes"
        hint = "push them with hub.checkpoints=true, or grpocli push RUN --checkpoints"
        raise ConfigError(problem, key=KEY, value=named, hint=hint)
    return whole[max(whole)]


def check_config(path: Path, named: str, given: Sequence[str], searched: Sequence[str] = ()) -> dict[str, Any]:
    """The config that is safe to keep: with accepted keys alone, except for what `given` names again.

    Raises ConfigError for another key that is not named again, and for files that are not on the hub. Imports no code
    of others: Hydra reads the saved overrides only after they have passed.
    """
    register_parts()
    downloaded = SavedRun(path.parent)
    loaded = downloaded.config
    if downloaded.problems:
        raise ConfigError(f"its {downloaded.problems[0]}", key=KEY, value=named)
    saved = [text for text in map(str, loaded.get(OVERRIDES) or []) if not of_hydra(text)]
    repeated = [text for text in saved if _is_repeated(text, named, given)]
    values = {name: node for name, node in loaded.items() if name != OVERRIDES}
    config: dict[str, Any] = _without(values, repeated_keys(values, named, given))
    # a later choice of a group replaces an earlier one unread; other overrides Hydra would read, too
    choices = {text.partition("=")[0] for text in given if not {".", "@", "+"} & {*text.partition("=")[0]}}
    config[OVERRIDES] = [text for text in saved if text not in repeated or text.partition("=")[0] in choices]
    with TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(yaml.safe_dump(config))
        resume = Resume(Path(folder), [text for text in given if not of_hydra(text)])
        whole = _composed(resume, named, searched)
    kept = whole.pop(OVERRIDES)[: -len(resume.given) or None]
    repeated_keys(whole, named, given)  # an interpolation may have become code
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


def _is_repeated(override: str, named: str, given: Sequence[str]) -> bool:
    """Whether a saved override is not accepted, and `given` replaces it. Raises ConfigError unless it does."""
    if (found := parse(override)) is None:
        raise ConfigError(f"its config.yaml is broken: {override}", key=KEY, value=named)
    refused = not_accepted(found)
    if refused and _name(override) not in map(_name, given):
        raise _untrusted(_name(override), refused[1], named)
    return refused is not None


def repeated_keys(node: dict[str, Any], named: str, given: Sequence[str]) -> set[str]:
    """The keys that are not accepted, which `given` names again. Raises ConfigError for those that must be given."""
    keys = [_name(text).partition("@")[0].replace("/", ".") for text in given]
    again = set()
    for key, value in leaves(node):
        is_given = any(f"{key}.".startswith(f"{one}.") for one in keys)
        if isinstance(value, str) and not is_given:
            _refuse_unpushed(key, value, named)
        if not is_accepted(key, value):
            if not is_given:
                raise _untrusted(key, value, named)
            again.add(key)
    return again


def _refuse_unpushed(key: str, value: str, named: str) -> None:
    if value.startswith(f"{ELSEWHERE}/"):
        problem = f"{key} was a file outside of the run, {Path(value.partition('/')[2])}, which is not on the hub"
        raise ConfigError(problem, key=KEY, value=named, hint="give this key again, with its place here")
    if HIDDEN in value:
        problem = f"{key} has a secret, which is not on the hub"
        raise ConfigError(problem, key=KEY, value=named, hint="give this key again")


def _untrusted(key: str, value: object, named: str) -> ConfigError:
    problem = f"its config sets {key}={value}, which may run code or send a key"
    return ConfigError(problem, key=KEY, value=named, hint="if you trust it, give this key again")


def _without(node: Any, keys: set[str], prefix: str = "") -> Any:
    if not isinstance(node, dict):
        return node
    below = {name: f"{prefix}.{name}".lstrip(".") for name in node}
    return {name: _without(value, keys, below[name]) for name, value in node.items() if below[name] not in keys}


GROUPS = re.compile(rf"{GROUP.pattern}|algorithm|recipe|.*/.*")
CHOICE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")
"""A choice of a config group: neither code nor a file elsewhere."""
ACCEPTED = {
    "algorithm": "combine divergence drop informative_only level mask_truncated model on_exhausted on_policy over"
    " revision reward scale scope surplus weigh",
    "engine": "completions enforce_eager quantization sleep",
    "eval": "reward stop_at.metric",
    "hardware": "device parallel rollout_devices train_devices",
    "hub": "checkpoints private push revision rollouts",
    "model": "chat_template compile date dtype head_dtype lora.path lora.target_modules operation path quantization"
    " response_template revision thinking",
    "optim": "betas nesterov scale schedule",
    "reward": "answer_column device dtype key model only_right partial path pattern per_group process prompt"
    " require_evaluated revision reward system",
    "rollout": "in_flight long_prompts regex stop",
    "sync": "canary",
    "task": "action allow_overlap answer_column difficulty_column environment.env environment.stateful environment.stop"
    " eval_path eval_split format instructions last_turn name observation operation order path prefix prompt_column"
    " prompt_template rewards shot_template split streaming system_prompt target_template task_name",
    "tracker": "kind project",
    "train": "activation_offload gradient_checkpointing packed",
    "": "callbacks_strict name resume resume_fallback resume_other_weights tags",
}
"""{section: fields} of texts and switches that a downloaded run may set: none names code or the receiver of a key."""
NESTED = ("environment", "lora", "stop_at")
VALUES = {
    r"(algorithm\.kl\.model|model\.chat_template_arguments)\..+": r"(?s).*",
    r"(optim\.schedule_arguments|rollout\.json_schema)\..+": r"(?s).*",
    r"engine\.speculative\.model": r"[\w-]+/[\w.-]+",
    r"engine\.speculative\.(method|num_speculative_tokens|prompt_lookup_(min|max))": r"\w+",
    r"engine\.vllm_args\.(async_scheduling|block_size|chat_template_content_format|dtype|enable_chunked_prefill"
    r"|enable_prefix_caching|kv_cache_dtype|max_\w+|seed)": r"\w+",
    r"model\.attention": r"\w+|kernels-community/[\w-]+",
    r"task(\.\w+)?\.(config|environment\.arguments|resets)\.[\w.]+": r"[\d.e+-]+|True|False",
    r"task(\.\w+)?\.environment\.name": r"grpocli\.(environments\.(calculator:Calculator|sliding_puzzle:SlidingPuzzle)"
    r"|library_environments\.(openenv:OpenEnv|verifiers:Verifiers))",
    r"task(\.\w+)?\.storage_options\.anon": "True|False",
    r"task(\.\w+)?\.tools": "|".join(map(re.escape, (*READY, *READY.values()))),
}
"""{pattern of keys: pattern of values} that a downloaded run may set beside these."""


def not_accepted(override: Override) -> Leaf | None:
    """The first choice or value of an override that a downloaded run may not set."""
    group = override.key_or_group
    is_choice = GROUPS.fullmatch(group) and not isinstance(override.value(), dict)
    for leaf, value in leaves_of(override):
        if is_choice and value is not None:
            ok = CHOICE.fullmatch(value) or (group == "model" and "$" not in value and not is_spec(value))
        else:
            ok = is_accepted(leaf, value)
        if not ok:
            return leaf, value
    return None


def is_accepted(key: str, value: Any) -> bool:
    """Whether a downloaded run may set a key: registered parts, numbers, defaults, ACCEPTED and VALUES."""
    *above, name = key.split(".")
    if name == "_target_":
        return value in CLASSES
    for keys, values in VALUES.items():
        if re.fullmatch(keys, key) and value is not None:
            return re.fullmatch(values, str(value)) is not None
    fields = _fields()
    mappings = {field.name for field in fields if field.default_factory is dict}
    if mappings & {*above[1:]}:
        return False
    if value in (None, "", "???", HIDDEN) or any((name, value) == (field.name, field.default) for field in fields):
        return True
    kinds = [str(field.type) for field in fields if field.name == name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    becomes_number = kinds and str(value).startswith("${")  # OmegaConf refuses an interpolation of another type
    if (is_number or becomes_number) and all(map(NUMBER.fullmatch, kinds)):
        return True
    nested = f"{above[-1]}.{name}" if above and above[-1] in NESTED else name
    return nested in ACCEPTED.get(above[0] if above else "", "").split()


NUMBER = re.compile(r"(int|float)( \| None)?")


@cache
def _fields() -> list[dataclasses.Field[Any]]:
    """The fields of grpocli's own parts."""
    own = [cls for cls in CLASSES.values() if dataclasses.is_dataclass(cls) and cls.__module__.startswith("grpocli.")]
    return [field for cls in own for field in dataclasses.fields(cls)]
