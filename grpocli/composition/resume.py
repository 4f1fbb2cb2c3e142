"""`resume=RUN_DIR`: the config of an interrupted run, with the keys that the command line changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.hydra_errors import known_keys
from grpocli.composition.overrides import expand_task_lists, in_quotes, text_of, texts_of
from grpocli.config.environment import raw_value, unresolved
from grpocli.config.user_code import is_spec, name_of
from grpocli.config.yaml_text import TARGET, flat
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.saved_run import SavedRun, check_is_run
from grpocli.runs.sessions import accuracy_rewards

FOLLOWS = re.compile(r"\$\{([\w.]+)\}")
"""A value that refers to another key: `${KEY}`."""
SESSION_KEYS = ("resume", "resume_other_weights", "overrides")
"""Keys of the start of a session, which do not change the run."""
FIXED = (*(f"model.lora.{key}" for key in ("rank", "alpha", "target_modules", "path")), "model.quantization")
"""Keys that determine the tensors of a checkpoint or its reference, so a resume cannot change them."""


@dataclass
class Resume:
    """A run to resume."""

    folder: Path
    """The run's."""
    given: list[str] = field(default_factory=list)
    """The overrides given now, which alone change the saved config."""

    @classmethod
    def requested(cls, overrides: list[str]) -> Resume | None:
        """The run that `resume=` names; None without it. Raises ConfigError if the folder has no run."""
        named = [o for o in overrides if o.startswith("resume=")]
        if not named or named[-1] in ("resume=", "resume=null"):
            return None
        name = text_of(named[-1])
        check_is_run(Path(name), f"resume={name}")
        folder = Path(name).resolve()
        for other in (text_of(o) for o in overrides if o.startswith("hydra.run.dir=")):
            if Path(other).resolve() != folder:
                problem = "a resume continues in the run's own folder"
                hint = "leave it out, or resume a copy of the folder"
                raise ConfigError(problem, key="hydra.run.dir", value=other, hint=hint)
        return cls(folder, [o for o in expand_task_lists(overrides) if not o.startswith(("resume=", "hydra."))])

    def overrides(self, given: list[str]) -> list[str]:
        """The overrides that compose the run again in its own folder. given: the whole command line."""
        folder = in_quotes(str(self.folder))
        hydra = [o for o in given if o.startswith("hydra.") and not o.startswith("hydra.run.dir=")]
        start = [f"resume={folder}", f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
        return [*self._saved(), *self.given, *hydra, *start]

    def _saved(self) -> list[str]:
        """The saved overrides, without the keys of parts that are replaced now."""
        saved = _overrides(self.saved)
        before, now = (dict(o.split("=", 1) for o in some if "=" in o) for some in (saved, self.given))
        replaced = [part for key, choice in now.items() for part in _replaced(key, before.get(key, choice), choice)]
        dropped = ("resume=", *(f"{part}." for part in replaced), *(f"{part}@" for part in replaced))
        # Hydra accepts each addition only once
        additions = {o.partition("=")[0] for o in self.given if o.startswith("+") and "@" in o}
        kept = [o for o in saved if not o.lstrip("+~").startswith(dropped) and o.partition("=")[0] not in additions]
        return self._with_sections(kept) if any("." not in key for key in now) else kept

    def _with_sections(self, saved: list[str]) -> list[str]:
        """The saved overrides whose section exists with the choices given now.

        For example, `algorithm=dapo` adds `reward.overlong`, which `algorithm=grpo` does not have.
        """
        keys = set(known_keys([*saved, *self.given], "train"))
        sections = {o: o.lstrip("+~").partition("=")[0].rpartition(".")[0] for o in saved}
        return [o for o in saved if not keys or not sections[o] or sections[o] in keys or "@" in o]

    def merged(self, composed: DictConfig) -> DictConfig:
        """The saved config with the keys given now, whose values are taken from `composed`.

        Raises ConfigError if the saved config does not fit the schema.
        """
        says = "its config does not fit: {}"
        with config_errors(OmegaConfBaseException, says=says, why=unresolved, key="resume", value=self.folder):
            return self._merged(composed, self.saved.copy())

    @cached_property
    def saved(self) -> DictConfig:
        """The saved config."""
        with config_errors(OmegaConfBaseException, why=unresolved, key="resume", value=self.folder):
            return OmegaConf.create(SavedRun(self.folder).read_config(before=True))

    def _merged(self, composed: DictConfig, saved: DictConfig) -> DictConfig:
        keys = [o.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for o in self.given]
        _refuse_changes(saved, composed, keys)
        for key in [*keys, *_followers(composed, saved, keys), "resume"]:
            OmegaConf.update(saved, key, _as_composed(composed, key), merge=False)
        saved.resume_other_weights = "resume_other_weights" in keys and composed.resume_other_weights
        saved.overrides = [*self._saved(), *self.given]
        _keep_choices(composed, saved)
        return OmegaConf.merge(composed, saved)  # type: ignore[return-value]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (old value, new value)} of two saved configs; for a replaced part its choices."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in SESSION_KEYS:
            found |= _changed(str(key), before.get(key), after.get(key))
    was, now = (list(one.get("reward") or ()) for one in (before, after))
    measured = [accuracy_rewards(one) for one in (before, after)]
    return found | ({"reward": (was, now)} if measured[0] != measured[1] and was != now else {})


def _changed(key: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get(TARGET) == new.get(TARGET):
        names = dict.fromkeys([*old, *new])
        found: dict[str, tuple[Any, Any]] = {}
        for name in names:
            found |= _changed(f"{key}.{name}", old.get(name), new.get(name))
        return found
    return {} if old == new else {key: (_named(old), _named(new))}


def _named(value: Any) -> Any:
    """A part by its choice, for example `vllm` for `engine`; other values unchanged."""
    if not isinstance(value, Mapping) or TARGET not in value:
        return value
    target = str(value[TARGET])
    return target if is_spec(target) else re.split(r"[./]", target)[-1]


def _followers(composed: DictConfig, saved: DictConfig, given: list[str]) -> list[str]:
    """Keys that follow a key given now: their default is an interpolation of it, and their saved values were equal."""
    values = flat(OmegaConf.to_container(composed, resolve=False)).items()
    targets = {key: match[1] for key, value in values if (match := FOLLOWS.fullmatch(str(value)))}
    return [
        key
        for key, target in targets.items()
        if target in given and OmegaConf.select(saved, key) == OmegaConf.select(saved, target)
    ]


def _keep_choices(composed: DictConfig, saved: DictConfig) -> None:
    """Replace parts of `composed` by the saved ones if their choices differ, as after a change of the default choice.

    Groups of several choices, such as rewards, get the saved ones.
    """
    if TARGET not in composed:
        with open_dict(composed):
            for name in [name for name in composed if name not in saved]:
                del composed[name]
            for name in [name for name in saved if name not in composed]:
                composed[name] = saved[name]
    for name in [str(key) for key in composed]:
        if OmegaConf.is_missing(composed, name) or OmegaConf.is_interpolation(composed, name):
            continue
        mine, theirs = composed[name], saved.get(name)
        if not isinstance(mine, DictConfig) or not isinstance(theirs, DictConfig):
            continue
        if mine.get(TARGET) == theirs.get(TARGET):
            _keep_choices(mine, theirs)
        else:
            with open_dict(composed):
                composed[name] = theirs


def _replaced(key: str, before: str, now: str) -> list[str]:
    """The keys of replaced choices: `engine`, or `reward.format` if `reward=[math,format]` becomes `[math]`.

    A folder of another name, or a function or class of the same name in another file, is no other choice.
    """
    group = key.replace("/", ".")
    old, new = ({name_of(one) for one in texts_of(f"{key}={choice}")} for choice in (before, now))
    if before.startswith("["):
        return [f"{group}.{name}" for name in sorted(old - new)]
    return [group] if old != new and not (group == "model" and "/" in before and "/" in now) else []


def _as_composed(composed: DictConfig, key: str) -> Any:
    """The value of a key as it is saved: its interpolation if it has one."""
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(composed, section) if section else composed
    is_there = isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, name)
    return raw_value(node, name) if is_there else OmegaConf.select(composed, key)


def _refuse_changes(saved: Any, composed: DictConfig, given: list[str]) -> None:
    """Raise ConfigError if a key given now changes a key of FIXED."""
    for key in FIXED:
        old, new = OmegaConf.select(saved, key), OmegaConf.select(composed, key)
        if old != new and any(f"{key}.".startswith(f"{g}.") for g in given):
            raise ConfigError(f"the run so far has {old}", key=key, value=new, hint="keep that, or start a new run")


def _overrides(saved: Any) -> list[str]:
    """The saved command line of a run; empty without one. It determines types and choices, the config has the values.

    Keys of Hydra belong to a session, so a run saves none of them. In a config of somebody else they could name code.
    """
    kept = saved.get("overrides")
    texts = map(str, raw_value(kept, slice(None))) if OmegaConf.is_list(kept) else ()
    return [text for text in texts if not of_hydra(text)]


def of_hydra(override: str) -> bool:
    """Whether an override changes Hydra's own keys, also by `GROUP@hydra.PACKAGE=`."""
    key, _, package = override.partition("=")[0].strip(" +~").partition("@")
    return re.match(r"hydra(?![\w-])", key) is not None or "hydra" in re.split(r"[./:]", package)
