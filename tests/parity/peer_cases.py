"""Definitions of other trainers that grpocli can express, as their settings and as grpocli's overrides (peers.yaml).

docs/evidence/peers.md lists them, so this file imports no trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

GIVEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("peers.yaml").read_text(encoding="utf-8"))


def overrides(words: str) -> tuple[str, ...]:
    """Hydra's overrides of `ours` in peers.yaml: names of pieces, whole overrides, or those below `algorithm`."""
    found: list[str] = []
    for word in words.split():
        if word in GIVEN["ours"]:
            found += overrides(GIVEN["ours"][word])
        else:
            found.append(word if word.startswith("algorithm") else f"algorithm.{word}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One definition, as the `settings` of a peer and as grpocli's overrides, `ours`."""

    peer: str
    name: str
    settings: dict[str, Any]
    ours: str
    rows: str = "updated"
    """`updated` (policy, old policy and sampler differ), `first` (the first update of a step: old policy = policy),
    `no gap` (sampler = old policy), `near` (no probability differs by more than 0.2) or `one empty` (the last
    completion has no token in the loss)."""
    guard: str = ""
    """Where the peer adds 1e-8 to a denominator, which is then done on our side, too: `rows` (to the tokens of a
    completion), `tokens` (to those of the update), `batch` (to both numbers of a mean over completions)."""
    single: bool = False
    """The peer computes in float32 whatever it is given."""
    value: bool = True
    """Whether the values are equal, too; otherwise only the gradients."""
    distilled: bool = False
    """Without advantages, which is algorithm/advantage=none."""
    limit: float | None = None
    """Of the difference, where a guard cannot be done on our side."""

    @classmethod
    def read(cls, peer: str, name: str, given: dict[str, Any]) -> PeerCase:
        own = {field.name for field in fields(cls)} - {"peer", "name", "settings"}
        settings = {key: value for key, value in given.items() if key not in own}
        return cls(peer, name, settings, **{key: value for key, value in given.items() if key in own})

    def __str__(self) -> str:
        return f"{self.peer}: {self.name}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that a peer and grpocli define in different ways. key: what gives theirs, if anything does."""

    peer: str
    name: str
    theirs: str
    ours: str
    key: str


LOSSES, ADVANTAGES = (
    [PeerCase.read(peer, name, given) for peer, cases in GIVEN[kind].items() for name, given in cases.items()]
    for kind in ("losses", "advantages")
)
DIFFERENCES = {f"{one['peer']}: {one['name']}": Difference(**one) for one in GIVEN["differences"]}
