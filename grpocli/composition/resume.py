"""`resume=RUN_DIR`: the config of an interrupted run, with the keys that the command line changes."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.hydra_errors import known_keys
from grpocli.composition.overrides import expand_task_lists, in_files, in_quotes, text_of, texts_of
from grpocli.config.environment import raw_value, unresolved
from grpocli.config.parts import CLASSES
from grpocli.config.user_code import is_spec, name_of
from grpocli.config.yaml_text import TARGET, flat, leaves
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.saved_run import SavedRun, check_is_run
from grpocli.runs.sessions import accuracy_rewards

logger = logging.getLogger(__name__)

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
        """The saved config: with keys of this version alone, and the new path of user code that has moved."""
        unknown: list[str] = []
        plain = _of_this_version(SavedRun(self.folder).read_config(before=True), "", unknown)
        if unknown:
            typed = plain.get("overrides") or ()
            plain["overrides"] = [o for o in typed if str(o).lstrip("+~").partition("=")[0] not in unknown]
            logger.warning("resume: this version has no %s, so they are left out of the run", ", ".join(unknown))
        moved = moved_files(plain, list(map(texts_of, self.given)))
        with config_errors(OmegaConfBaseException, why=unresolved, key="resume", value=self.folder):
            config: DictConfig = OmegaConf.create(_with_files(plain, moved))
        return config

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
    before = _with_files(before, moved_files(before, after))
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in SESSION_KEYS:
            found |= _changed(str(key), before.get(key), after.get(key))
    was, now = (list(one.get("reward") or ()) for one in (before, after))
    measured = [accuracy_rewards(one) for one in (before, after)]
    return found | ({"reward": (was, now)} if measured[0] != measured[1] and was != now else {})


def moved_files(saved: Any, again: Any) -> dict[str, str]:
    """{old file: new file} of user code in a saved config whose file is gone, and of which `again` has a name."""
    known = set(_user_code(saved))
    gone, new = {one for one in known if not Path(one[0]).is_file()}, set(_user_code(again)) - known
    count = Counter(name for _, name in [*gone, *new])
    return {
        old: place
        for (old, name), (place, same) in product(gone, new)
        if name == same and (count[name] == 2 or Path(old).name == Path(place).name)  # one of several of that name
    }


def _user_code(node: Any) -> list[tuple[str, str]]:
    """(file, name) of each FILE.py:NAME among the values of a plain config."""
    found = [str(value).rpartition(":") for key, value in leaves(node) if key != "overrides"]
    return [(place, name) for place, _, name in found if place.endswith(".py")]


def _with_files(node: Any, files: Mapping[str, str]) -> Any:
    """A plain config with user code in other files; its overrides, too."""
    if isinstance(node, Mapping):
        return {key: _with_files(value, files) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_files(value, files) for value in node]
    place, _, name = str(node).rpartition(":")
    return f"{files[place]}:{name}" if place in files else in_files(node, files) if isinstance(node, str) else node


def _changed(key: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get(TARGET) == new.get(TARGET):
        names = dict.fromkeys([*old, *new])
        found: dict[str, tuple[Any, Any]] = {}
        for name in names:
            found |= _changed(f"{key}.{name}", old.get(name), new.get(name))
        return found
    return {} if old == new else {key: (_named(key, old), _named(key, new))}


def _named(key: str, value: Any) -> Any:
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
    """The keys of replaced choices: `engine`, or `reward.format` if `reward=[math,format]` becomes `[math]`."""
    group = key.replace("/", ".")
    old, new = (set(texts_of(f"{key}={choice}")) for choice in (before, now))
    if not before.startswith("["):
        moved = group == "model" and "/" in before and "/" in now  # another folder, but no other choice
        return [group] if old != new and not moved else []
    return [f"{group}.{name_of(one)}" for one in sorted(old - new)]


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


def _of_this_version(node: Any, key: str, unknown: list[str]) -> Any:
    """A plain config without the keys that its parts have no longer; they are appended to `unknown`."""
    if not isinstance(node, Mapping):
        return node
    cls, names = CLASSES.get(str(node.get(TARGET))), {*node}
    if cls is not None and dataclasses.is_dataclass(cls):
        names = {TARGET, *(f.name for f in dataclasses.fields(cls))}
    unknown += [f"{key}{name}" for name in node if name not in names]
    return {name: _of_this_version(one, f"{key}{name}.", unknown) for name, one in node.items() if name in names}
