"""`resume=RUN_DIR`: the config of an interrupted run, with what the command line changes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from grpocli.config.complaints import flat_keys
from grpocli.config.task_list import spread
from grpocli.errors import ConfigError
from grpocli.tracking.files import write_atomic

FIXED = ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")
"""What a checkpoint's tensors depend on: other values would make it another run."""


@dataclass(slots=True)
class Resume:
    """A run folder, and the overrides given now. The saved config is the truth; only these change it."""

    folder: Path
    given: list[str] = field(default_factory=list)

    @classmethod
    def asked_for(cls, overrides: list[str]) -> Resume | None:
        """The run that an override `resume=` names."""
        named = [o.partition("=")[2] for o in overrides if o.startswith("resume=")]
        if not named or named[-1] in ("", "null"):
            return None
        folder = Path(named[-1].strip("'\"")).resolve()
        for name in ("config.yaml", ".hydra/overrides.yaml"):
            if not (folder / name).is_file():
                raise ConfigError.of("resume", named[-1], f"holds no run of grpocli: {name} is missing")
        return cls(folder, [o for o in spread(overrides) if not o.startswith(("resume=", "hydra."))])

    def overrides(self, given: list[str]) -> list[str]:
        """The overrides that compose the run again, in its own folder."""
        hydra = [o for o in given if o.startswith("hydra.") and not o.startswith("hydra.run.dir=")]
        return [
            *self._saved(),
            *self.given,
            *hydra,
            f"resume='{self.folder}'",
            f"hydra.run.dir='{self.folder}'",
            "hydra.output_subdir=null",
        ]

    def remember(self) -> None:
        """Keep the overrides given now for the next resume, which composes the same choices again."""
        path = self.folder / ".hydra" / "overrides.yaml"
        write_atomic(path, OmegaConf.to_yaml(OmegaConf.create([*self._saved(), *self.given])))

    def _saved(self) -> list[str]:
        """The run's own overrides, without the keys of a part that another is chosen for now."""
        saved = [str(o) for o in _load(self.folder / ".hydra" / "overrides.yaml")]
        before = dict(o.split("=", 1) for o in saved if "=" in o)
        now = dict(o.split("=", 1) for o in self.given if "=" in o)
        gone = [part for key, choice in now.items() for part in _left(key, before.get(key, choice), choice)]
        left = ("resume=", *(f"{part}." for part in gone), *(f"{part}@" for part in gone))
        again = {o for o in self.given if o.startswith("+") and "@" in o}  # Hydra takes an addition once
        return [o for o in saved if not o.lstrip("+~").startswith(left) and o not in again]

    def merged(self, composed: DictConfig) -> DictConfig:
        """The saved config, with the keys given now taken from `composed`.

        Raises ConfigError if the saved config no longer fits the schema.
        """
        from omegaconf.errors import OmegaConfBaseException

        saved = _load(self.folder / "config.yaml")
        keys = [o.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for o in self.given]
        _refuse_changes(saved, composed, keys)
        for key in [*keys, *_followers(composed, saved, keys), "resume"]:
            OmegaConf.update(saved, key, OmegaConf.select(composed, key), merge=False)
        _keep_choices(composed, saved)
        try:
            return OmegaConf.merge(composed, saved)  # type: ignore[return-value]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError.of("resume", self.folder, f"its config does not fit: {reason}") from error


def _followers(composed: DictConfig, saved: DictConfig, given: list[str]) -> list[str]:
    """Keys whose default is the value of a key given now, and whose saved value was it: they follow it still."""
    plain = OmegaConf.to_container(composed, resolve=False)
    targets = {key: _target(plain, key) for key in flat_keys(plain)}
    return [
        key
        for key, target in targets.items()
        if target in given and OmegaConf.select(saved, key) == OmegaConf.select(saved, target)
    ]


def _target(plain: Any, key: str) -> str | None:
    """`a.b` where the value of `key` is `${a.b}`."""
    for name in key.split("."):
        plain = plain[name]
    match = re.fullmatch(r"\$\{([\w.]+)\}", plain) if isinstance(plain, str) else None
    return match[1] if match else None


def _keep_choices(composed: DictConfig, saved: DictConfig) -> None:
    """Where the default choice of a part has changed since the run began, there is nothing to merge the saved one with.

    Replaces it in `composed`.
    """
    for name in [str(key) for key in composed]:
        if OmegaConf.is_missing(composed, name) or OmegaConf.is_interpolation(composed, name):
            continue
        mine, theirs = composed[name], saved.get(name)
        if not isinstance(mine, DictConfig) or not isinstance(theirs, DictConfig):
            continue
        if mine.get("_target_") == theirs.get("_target_"):
            _keep_choices(mine, theirs)
        else:
            with open_dict(composed):
                composed[name] = theirs


def _left(key: str, before: str, now: str) -> list[str]:
    """The keys of what was chosen before and is not now: `engine`, or `reward.format` of `reward=[math,format]`."""
    group = key.replace("/", ".")
    if not before.startswith("["):
        return [group] if before != now else []
    chosen, still = ({name.strip() for name in choice.strip("[]").split(",")} for choice in (before, now))
    return [f"{group}.{name}" for name in sorted(chosen - still)]


def _refuse_changes(saved: Any, composed: DictConfig, given: list[str]) -> None:
    """Raise ConfigError where a key given now changes one of FIXED."""
    for key in FIXED:
        old, new = OmegaConf.select(saved, key), OmegaConf.select(composed, key)
        if old != new and any(f"{key}.".startswith(f"{g}.") for g in given):
            raise ConfigError.of(key, new, f"the run so far has {old}; keep that, or start a new run")


def _load(path: Path) -> Any:
    """A saved YAML. Raises ConfigError where it is damaged."""
    try:
        return OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError.of("resume", path, f"cannot be read: {' '.join(str(error).split())[:200]}") from error
