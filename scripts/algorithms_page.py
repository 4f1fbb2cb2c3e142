"""Write docs/algorithms.md from the code of the parts: `python scripts/algorithms_page.py FILE`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpocli.algorithm.algorithm import PARTS
from grpocli.composition.compose import build_run, compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.parts import CLASSES, choices_of
from grpocli.files import write_atomic
from grpocli.runs.sessions import as_typed
from grpocli_tools.explain.explanation import Explanation, compared, explanation, part_section
from grpocli_tools.explain.formulas import field_docs, summary
from grpocli_tools.explain.render import code, comparison_markdown, explanation_markdown, right_lines, table

ALGORITHMS = ("grpo", "dapo", "drgrpo", "dgpo")
EXAMPLE = "docs/examples/own_trainer.py"
MORE = ("gspo", "luspo", "cispo", "sapo", "gmpo", "rloo", "reinforce_pp", "maxrl", "dppo", "opd")
"""Algorithms that the page shows by their differences from grpo."""
TITLES = (*ALGORITHMS, *MORE, "Parts", "In your own trainer")
VARIANTS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("keep", "all"): [{"mask_truncated": True}],
    ("keep", "dynamic"): [{"reward": "score", "surplus": "carry", "on_exhausted": "error"}],
    ("advantage", "leave_one_out"): [{"scale": "others"}],
    ("advantage", "reinforce_pp"): [{"over": "tokens"}],
    ("objective", "clip"): [{"level": "sequence"}, {"dual": 3.0}, {"delta": 4.0}, {"drop_above": 0.1}],
    ("objective", "cispo"): [{"low": 0.2}],
    ("objective", "dppo"): [{"divergence": "kl"}, {"drift": 0.001}],
    ("objective", "mirror"): [{"tau": 0.0}],
    ("correction", "auto"): [{"max_staleness": 1}],
    ("kl", "reverse"): [{"model": "FOLDER"}],
    ("kl", "k3"): [{"on_policy": True, "sync_every": 64}, {"beta": 0.0}],
    ("aggregate", "token_mean"): [{"informative_only": True}, {"scope": "group"}, {"scope": "micro_batch"}],
}

INTRODUCTION = """\
# Algorithms

`make docs` writes this page from the code of the parts. `grpocli explain` prints the same for any config, and
`grpocli explain A vs B` prints the differences of two configs. Values below are those of the default run.

A step samples completions o_1 … o_G for each of P questions and scores them. The scores become advantages A_i, and the
loss is a weighted sum over completions i and their tokens t. mean_G, std_G, min_G and Σ_G run over the completions of
o_i's question, r is a ratio of policies, sg[ ] stops the gradient, and |o_i| is the number of o_i's tokens in the loss.
Counts run over all micro-batches and processes of an update, so the gradient does not depend on the split.
"""

OWN_TRAINER = """\
## In your own trainer

`grpocli.build_algorithm(*overrides)` composes an algorithm from overrides as on the command line. Only the `algorithm`
keys matter, and `rollout.max_completion_tokens` for `algorithm/aggregate=constant` without a length. It reads no files
but the config of the package. All arguments below are tensors.

- `algorithm.advantages(rewards, weights=None, accuracy=None)` returns `[P, G]`. rewards: `{name: [P, G]}`, finite, or
  NaN where a reward does not apply. accuracy: for each question, the name of its accuracy reward (the first).
- `algorithm.kept(rewards, weights=None, accuracy=None)` returns the questions to train on, `[P]` (bool).
- `algorithm.totals(advantages, mask, group_ids=None, micro_batches=1)` returns the counts of a whole update from
  `[B]`, `[B, T]` and `[B]`; pass them to the `loss` of each micro-batch.
- `algorithm.loss(logp, old_logp, advantages, mask, *, group_ids, ref_logp, rollout_logp, entropy, selected, totals)`
  returns a scalar and metrics. Log-probs and mask are `[B, T]`; `advantages` and the integers `group_ids` are `[B]`.
  Losses and metrics of micro-batches add up to those of the update, except `clip_ratio/low_min` and
  `clip_ratio/high_max`, which are the minimum and the maximum. Without `totals` the rows are the whole update.
  `ref_logp` is required if `algorithm.needs_reference`, and `entropy` if `algorithm.needs_entropy_gradient` or
  `algorithm.tokens.needs_entropy`.

A complete loop, with two micro-batches per update:
"""


def document() -> str:
    """The whole page."""
    shown = {name: _explained(name) for name in ALGORITHMS}
    pieces = [INTRODUCTION, "".join(f"- [{title}](#{title.lower().replace(' ', '-')})\n" for title in TITLES)]
    for name, one in shown.items():
        pieces.append(f"## {name}\n\n{_paper(name)}.\n\n{explanation_markdown(one)}")
        if name != "grpo":
            pieces.append(f"### {name} against grpo\n\n{comparison_markdown(compared(shown['grpo'], one))}")
    for name in MORE:
        differences = comparison_markdown(compared(shown["grpo"], _explained(name)))
        pieces.append(f"## {name}\n\n{_paper(name)}. Against grpo:\n\n{differences}")
    pieces.append("## Parts\n\nEvery choice of every part, with its keys and their defaults.\n")
    pieces += ["\n".join(_reference(kind)) for kind in PARTS]
    example = Path(conf_dir()).parent / EXAMPLE
    pieces.append(OWN_TRAINER + "\n" + "\n".join(code(example.read_text().splitlines(), "python")))
    return "\n".join(piece.rstrip() + "\n" for piece in pieces)


def _explained(name: str) -> Explanation:
    overrides = [f"algorithm={name}"]
    config = compose(overrides)
    return explanation(build_run(config), config, overrides)


def _paper(name: str) -> str:
    """The first line of an algorithm's YAML."""
    return (Path(conf_dir()) / "algorithm" / f"{name}.yaml").read_text().splitlines()[0].lstrip("# ")


def _reference(kind: str) -> Iterator[str]:
    yield f"### {kind}\n"
    for choice in sorted(choices_of(f"algorithm/{kind}")):
        yield from _choice(kind, choice, CLASSES[f"algorithm/{kind}/{choice}"])


def _choice(kind: str, choice: str, made: type[Any]) -> Iterator[str]:
    """A choice with its defaults, then with other values, its keys and its source."""
    changes = VARIANTS.get((kind, choice), [])
    section, *variants = (part_section(f"algorithm/{kind}", made(**changed)) for changed in ({}, *changes))
    yield f"#### `algorithm/{kind}={choice}`\n"
    yield from code(right_lines(section)) if section.lines else [f"{summary(made)}\n"]
    for changed, variant in zip(changes, variants, strict=True):
        keys = ", ".join(f"`{field}={as_typed(value)}`" for field, value in changed.items())
        yield f"With {keys}:\n"
        yield from code(right_lines(variant))
    symbols = {symbol.key: symbol.name for one in (section, *variants) for symbol in one.symbols}
    yield from table(["key", "symbol", "default", "meaning"], _fields(f"algorithm.{kind}", made, symbols))
    if section.source:
        yield f"Source: {'; '.join(section.source)}.\n"


def _fields(prefix: str, made: type[Any], symbols: dict[str, str]) -> list[list[str]]:
    described = field_docs(made)
    return [
        [f"`{prefix}.{f.name}`", symbols.get(f"{prefix}.{f.name}", ""), f"`{_default(f)}`", described.get(f.name, "")]
        for f in dataclasses.fields(made)
    ]


def _default(f: dataclasses.Field[Any]) -> str:
    followed = f.metadata.get("interpolate")
    return f"${{{followed}}}" if followed else as_typed(f.default)


def main(argv: list[str]) -> int:
    """Write the page to a file."""
    write_atomic(Path(argv[0]), document())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
