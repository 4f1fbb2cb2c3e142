"""The equivalent of a name of TRL, NeMo RL or verl, with both defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.explain.choice_files import spelled
from grpocli_tools.explain.keys import ReferenceIndex, keys_of
from grpocli_tools.explain.render import entry_markdown, entry_text
from grpocli_tools.porting.equivalent import UNSTATED, Equivalent
from grpocli_tools.porting.nemo_rl_names import NEMO_RL
from grpocli_tools.porting.trl_names import ALIASES, LORA_CONFIG, TRAINER, TRL
from grpocli_tools.porting.verl_names import VERL

TABLES = {
    "TRL": TRL | {f"GRPOTrainer({name}=)": one for name, one in TRAINER.items()},
    "PEFT": {f"LoraConfig({name}=)": one for name, one in LORA_CONFIG.items()},
    "NeMo RL": NEMO_RL,
    "verl": VERL,
    "other names": ALIASES,
}


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A name of another trainer, and its value if one is given. ours: (key or group, its default here)."""

    trainer: str
    name: str
    value: str | None
    equivalent: Equivalent
    ours: tuple[tuple[str, str], ...]

    @property
    def default(self) -> str:
        """The default there; "" if it is not stated."""
        return "" if self.equivalent.default is UNSTATED else spelled(self.equivalent.default)

    @property
    def overrides(self) -> list[str]:
        """The overrides for the value, or with VALUE in its place."""
        return self.equivalent.written("VALUE" if self.value is None else self.value)


def find(word: str, reference: ReferenceIndex) -> list[ForeignName]:
    """The names that are a word, or end in it. A word may be NAME=VALUE. Raises ConfigError for an unknown name."""
    name, equals, value = word.strip().lstrip("-+").partition("=")
    if not name:
        raise ConfigError("the name is empty", key="--from-trl", hint="grpocli explain --from-trl num_generations")
    plain = name.replace("-", "_")
    every = [(trainer, known) for trainer, names in TABLES.items() for known in names]
    exact = [(trainer, known) for trainer, known in every if plain in (known, _argument(known))]
    found = exact or [(trainer, known) for trainer, known in every if known.endswith(f".{plain}")]
    if not found:
        close = nearest(plain, [known for _, known in every])
        if reference.has(name):
            raise ConfigError("is a key of grpocli", key=name, hint=f"grpocli explain {name}")
        raise ConfigError(f"no name of TRL, NeMo RL or verl is called {name}{close}", key="--from-trl")
    return [of(trainer, known, reference, value if equals else None) for trainer, known in found]


def _argument(name: str) -> str:
    """`model` of `GRPOTrainer(model=)`."""
    return name.partition("(")[2].removesuffix("=)")


def of(trainer: str, name: str, reference: ReferenceIndex, value: str | None = None) -> ForeignName:
    """A name of a trainer's table."""
    equivalent = TABLES[trainer][name]
    ours = [(key, here) for key in keys_of(equivalent) if (here := default_here(key, reference)) is not None]
    return ForeignName(trainer, name, value, equivalent, tuple(ours))


def default_here(name: str, reference: ReferenceIndex) -> str | None:
    """The default of a key or group in a run with a model of one's own; None for an unknown key."""
    if name in reference.keys:
        return reference.keys[name].variants[0].default
    return reference.files.defaults.get(name)


def rows(shown: ForeignName) -> Iterator[tuple[str, str]]:
    """(label, text) of everything known about a name."""
    yield "of", shown.trainer
    if shown.default:
        yield "default", shown.default
    yield "here", " ".join(shown.overrides) or "-"
    for key, default in shown.ours:
        yield "default here", f"{key}={default}"
    if shown.equivalent.why:
        yield "difference", shown.equivalent.why
    if shown.equivalent.values and shown.value is None:
        for value, overrides in shown.equivalent.values.items():
            yield f"={value}", overrides or "-"
    if shown.equivalent.note:
        yield "note", shown.equivalent.note


def text(shown: ForeignName) -> str:
    """For a terminal."""
    return entry_text(shown.name if shown.value is None else f"{shown.name}={shown.value}", "", rows(shown))


def markdown(shown: ForeignName) -> str:
    """A heading and a table."""
    return entry_markdown(shown.name, "", rows(shown))


def as_json(shown: ForeignName) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "name": shown.name,
        "trainer": shown.trainer,
        "default": None if shown.equivalent.default is UNSTATED else shown.equivalent.default,
        "overrides": shown.overrides,
        "values": dict(shown.equivalent.values),
        "default_here": dict(shown.ours),
        "difference": shown.equivalent.why,
        "note": shown.equivalent.note,
        "counterpart": not shown.equivalent.lacks,
    }
