"""The page of results: expectation, measured, verdict. Texts of results are data: no HTML, no control characters."""

from __future__ import annotations

import html
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from experiment import EXPECTED, EXPERIMENTS, FAILED, NOT_RUN, STAGES, UNEXPECTED, Experiment, Results, in_order, limit

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
DATA, PAGE = EVIDENCE / "gpu.json", EVIDENCE / "gpu.md"
BEGIN, END = "<!-- gpu proof -->", "<!-- end of gpu proof -->"
HOLDS = {True: "as expected", False: "**not as expected**", None: "not checked"}


def table(results: Results) -> str:
    """The summary, what has still to be seen, and a table for each stage."""
    parts = [summary(results)]
    for stage, about in STAGES.items():
        rows = [row for one in in_order() if one.stage == stage for row in rows_of(one, results)]
        head = ["| experiment | expected | measured | verdict |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {stage}: {about}", "", *head, *rows]))
    return "\n\n".join(parts)


def summary(results: Results) -> str:
    """How many experiments have which verdict, on which machines, and which have still to be seen."""
    ran = {name: results.experiments[name] for name in EXPERIMENTS if results.has(name)}
    if not ran:
        return "None of the experiments has run."
    counts = Counter(found["verdict"] for found in ran.values())
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (EXPECTED, UNEXPECTED, FAILED) if counts[verdict])
    machines = "; ".join(dict.fromkeys(_line(machine_of(found)) for found in ran.values()))
    left = [one.name for one in in_order() if one.name not in ran]
    unseen = f" Still to be seen: {', '.join(f'`{name}`' for name in left)}." if left else ""
    return f"{len(ran)} of {len(in_order())} experiments have run: {said}. {machines}.{unseen}"


def machine_of(found: dict[str, Any]) -> str:
    """`NVIDIA H100 80GB HBM3, driver 580, torch 2.11.0, vLLM 0.32.0, commit 1234567`."""
    names = {"device": "", "driver": "driver ", "torch": "torch ", "vllm": "vLLM ", "commit": "commit "}
    words = [f"{name}{found['machine'][key]}" for key, name in names.items() if found["machine"].get(key)]
    return ", ".join(words) + (" (small sizes: a test of the script)" if found["size"] == "small" else "")


def rows_of(one: Experiment, results: Results) -> list[str]:
    """A row for each law of an experiment; the first has its name and question."""
    found = results.experiments.get(one.name, {"verdict": NOT_RUN, "reason": "", "laws": []})
    by_figure = {law["figure"]: law for law in found["laws"]}
    commits = {known["machine"].get("commit") for known in results.experiments.values()}  # an earlier one may be kept
    rows = []
    for number, law in enumerate(one.laws):
        seen = by_figure.get(law.figure, {})
        first = f"`{one.name}`: {one.question}" if number == 0 else ""
        why = f": {found['reason']}" if found["reason"] else ""
        measured, struck = shown(seen.get("measured")), found.get("struck", {}).get(law.figure)
        if not found["laws"]:
            verdict = f"{found['verdict']}{why}" if number == 0 else ""
        elif struck:
            measured, verdict = f"~~{measured}~~" if measured else "", f"not judged: {struck}"
        elif not seen:
            verdict = "not run: its law is newer"
        elif any(seen[end] != limit(getattr(law, end)) for end in ("low", "high")):
            verdict = "measured before its law changed"
        elif measured or (law.gpu and found["size"] == "small"):
            verdict = HOLDS[seen.get("holds")]
        else:
            verdict = "**no figure**"
        if number == 0 and one.name in results.experiments and len(commits) > 1:
            verdict += f" ({found['machine'].get('commit')})"
        verdict = _line(verdict).replace("|", "\\|")
        rows.append(f"| {first} | {law.text}: {law.range} | {measured} | {verdict} |")
    return rows


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def plain(text: str) -> str:
    """A text without control characters but newlines, and without HTML and links in Markdown."""
    shown = "".join(c for c in text if c == "\n" or not unicodedata.category(c).startswith("C"))
    return html.escape(shown, quote=False).replace("](", "] (")


def write_page(results: Results, path: Path) -> None:
    """A page of its own beside the results, with the figures that no law checks."""
    parts = ["# GPU proof", table(results)]
    for one in in_order():
        found = results.experiments.get(one.name)
        if found and found["measured"]:
            lines = [f"- {_line(f'{name}: {value}')}" for name, value in found["measured"].items()]
            parts.append("\n".join([f"## {one.name}", "", *lines]))
        if found and found["log"]:
            log = "\n".join(f"    {line}" for line in plain(found["log"]).splitlines())
            parts.append(f"## {one.name}: the end of its output\n\n{log}")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def render(files: list[Path]) -> None:
    """Add results of a GPU to docs/evidence/gpu.json and write the table of gpu.md. Raises SystemExit for a CPU's."""
    known = Results(DATA)
    for file in files:
        found = Results(file).experiments
        if any(result["size"] == "small" or result["machine"].get("device") == "CPU" for result in found.values()):
            raise SystemExit(f"{file} has results of a CPU, which test the script and say nothing about a GPU")
        for name, result in found.items():
            if result["verdict"] != NOT_RUN or not known.has(name):
                known.experiments[name] = result
    if files:
        known.save()
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")


def rendered(text: str, results: Results) -> str:
    """The page with the table between its markers."""
    (before, _, rest), new = text.partition(BEGIN), f"{BEGIN}\n{table(results)}\n{END}"
    return before + new + rest.partition(END)[2]
