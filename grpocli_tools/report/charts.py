"""The charts of a page: `page/charts.yaml` says which metrics of metrics.jsonl share a chart, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from grpocli.config import yaml_text
from grpocli_tools.report.curves import HIGH, LOW
from grpocli_tools.report.page_data import Chart, ChartLine

OTHER = "Other metrics"


@cache
def specs() -> dict[str, list[dict[str, Any]]]:
    """{section: charts} of charts.yaml."""
    text = files("grpocli_tools.report").joinpath("page", "charts.yaml").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = yaml_text.load(text)
    return found


def charts(
    metrics: Iterable[str], constants: Mapping[str, float] | None = None, copies: frozenset[str] = frozenset()
) -> list[Chart]:
    """The charts that have data, then one for each metric in none of them, so that every metric can be seen.

    constants: the metrics with one value in all steps. Charts that say nothing with it are left out. copies: metrics
    that another one repeats; a chart of nothing else is left out.
    """
    constants = constants or {}
    names = {name for name in metrics if not name.endswith((LOW, HIGH))}
    limits = set(metrics) - names
    used: set[str] = set()
    found = []
    for section, spec in ((section, spec) for section, charts in specs().items() for spec in charts):
        lines = [line for pattern, label in spec["lines"].items() for line in _lines(pattern, label, names, limits)]
        used |= {line.metric for line in lines}
        if all(line.metric in copies for line in lines):
            continue  # also without a line
        if not ("idle" in spec and all(constants.get(line.metric) == spec["idle"] for line in lines)):
            known = {key: value for key, value in spec.items() if key not in ("lines", "idle")}
            found.append(Chart(section=section, lines=lines, **known))
    rest = [Chart(f"other_{i}", name, OTHER, [ChartLine(name, name)]) for i, name in enumerate(sorted(names - used))]
    return [*found, *rest]


def _lines(pattern: str, label: str, names: set[str], limits: set[str]) -> list[ChartLine]:
    regex = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
    matches = [(name, match) for name in sorted(names) if (match := regex.fullmatch(name))]
    return [
        ChartLine(
            name,
            label.replace("*", match[1]) if match.groups() else label,
            *(name + end if name + end in limits else "" for end in (LOW, HIGH)),
        )
        for name, match in matches
    ]
