"""Write docs/evidence/peers.md from the compared definitions: `python -m parity.peer_page FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parity.peer_cases import ADVANTAGES, DIFFERENCES, LOSSES, PeerCase, overrides

from grpocli.files import write_atomic
from grpocli_tools.explain.render import table

INTRODUCTION = """\
# The same loss in other trainers

`make docs` writes this page from the cases of `make parity`, which calls the own functions of other trainers with the
same random tensors, 20 times, in float64. It loads single source files: of verl 0.9.1 and SkyRL 0.3.0, which it
installs, and of NeMo RL, slime and prime-rl if `GRPOCLI_PEERS` is a folder with checkouts of NVIDIA-NeMo/RL,
THUDM/slime and PrimeIntellect-ai/prime-rl; without one, their cases are skipped. All cases hold for NeMo RL 7ea279abf
(2026-08-22), slime 624b824a8 and prime-rl 559b44772 (2026-08-21). For TRL see
[algorithm](../../grpocli/algorithm/README.md#differences-from-trl) and [from-trl.md](../from-trl.md).

- [Equal losses](#equal-losses)
- [Equal advantages](#equal-advantages)
- [Different by definition](#different-by-definition)
"""
LOSSES_TITLE = """\
## Equal losses

Values and gradients differ by at most 1e-10, or 1e-5 where the other trainer computes in float32 (single). A KL term
and a `clip_ratio_c` are off where they are not named, other settings have the trainer's defaults. The overrides follow
`algorithm=grpo algorithm/kl=none`, except where a row begins with `algorithm=`.
"""
NOTES = {
    "first": "in the first update of a step",
    "no gap": "where μ = π_old",
    "one empty": "also where a completion has no token in the loss",
    "near": "where no probability falls by more than 0.2",
}


def document() -> str:
    """The whole page."""
    losses = [(c.peer, _code(_pairs(c)), _code(_ours(c)), _note(c)) for c in LOSSES]
    scores = [(c.peer, _code(_pairs(c)), _code(_ours(c)), "single" * c.single) for c in ADVANTAGES]
    columns = ("trainer", "settings", "grpocli", "note")
    differences = [(d.peer, d.name, d.theirs, d.ours, d.key) for d in DIFFERENCES.values()]
    pieces = [
        INTRODUCTION,
        LOSSES_TITLE,
        *table(columns, losses),
        "## Equal advantages\n",
        *table(columns, scores),
        "## Different by definition\n",
        "Each difference is measured, and is gone once grpocli's tensors are changed by the other definition.\n",
        *table(("trainer", "what", "theirs", "grpocli", "how to have theirs"), differences),
    ]
    return "\n".join(pieces)


def _pairs(case: PeerCase) -> list[str]:
    return [f"{name}={value}" for name, value in _flat(case.settings)]


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def _ours(case: PeerCase) -> list[str]:
    return [override for override in overrides(case.ours) if override not in overrides("GRPO")]


def _code(words: Sequence[str]) -> str:
    return f"`{' '.join(words)}`" if words else "none"


def _note(case: PeerCase) -> str:
    notes = [NOTES.get(case.rows, ""), "" if case.value else "only the gradient", "single" * case.single]
    return "; ".join(note for note in notes if note)


if __name__ == "__main__":
    write_atomic(Path(sys.argv[1]), document())
