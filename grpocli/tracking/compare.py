"""`grpocli compare FOLDER ...`: a table of the runs below some folders."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.tracking.metrics import read

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")
IGNORED = ("seed", "resume", "tracker")
RESULTS = ("steps", "before", "accuracy", "change", "reward", "seconds", "exit")


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: what was chosen, and what came of it."""

    path: Path
    settings: dict[str, Any]
    results: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns the exit code."""
    cli = argparse.ArgumentParser(prog="grpocli compare", description=__doc__)
    cli.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or any folder of runs")
    cli.add_argument("--format", choices=["table", "markdown", "csv", "json"], default="table")
    cli.add_argument("--sort", choices=["change", "accuracy", "path"], default="accuracy")
    args = cli.parse_args(argv)
    rows = [row for folder in args.folders for row in find(folder)]
    if not rows:
        raise ConfigError(f"there is no run below {', '.join(map(str, args.folders))}: no folder has a config.yaml")
    rows.sort(key=lambda r: str(r.path) if args.sort == "path" else -(r.results[args.sort] or -1.0))
    PRINTERS[args.format](tables(rows))
    return 0


def find(folder: Path) -> list[RunRow]:
    """The runs below a folder. Raises ConfigError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    configs = sorted(p for p in folder.rglob("config.yaml") if ".hydra" not in p.parts and "model" not in p.parts)
    return [read_run(config.parent) for config in configs]


def read_run(path: Path) -> RunRow:
    """A run's settings and results; what is not there yet is None."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    chosen = _choices(path)
    settings = {g: chosen[g] for g in GROUPS if g in chosen}
    settings["reward"] = "+".join(config.get("reward", {}))  # type: ignore[union-attr]
    settings |= {k: v for k, v in _leaves(config).items() if k.split(".")[0] != "hydra"}
    return RunRow(path, settings, _results(path))


def _choices(path: Path) -> dict[str, str]:
    """The group choices that Hydra saved beside the run."""
    from omegaconf import OmegaConf

    saved = path / ".hydra" / "hydra.yaml"
    if not saved.is_file():
        return {}
    return {k: str(v) for k, v in OmegaConf.load(saved).hydra.runtime.choices.items()}


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    rows: dict[str, Any] = {}
    for name, value in node.items():
        if name != "_target_":
            rows |= _leaves(value, f"{prefix}{name}.")
    return rows


def _results(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    if (path / "summary.json").is_file():
        summary = json.loads((path / "summary.json").read_text())
    metrics = read(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
    rewards = [m["reward"] for m in metrics[-10:] if m.get("reward") is not None]
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy")
    return {
        "steps": metrics[-1]["step"] if metrics else 0,
        "before": before,
        "accuracy": after,
        "change": None if before is None or after is None else after - before,
        "reward": statistics.mean(rewards) if rewards else None,
        "seconds": summary.get("seconds"),
        "exit": str(summary.get("exit", "unfinished"))[:40],
    }


Table = tuple[str, list[str], list[list[Any]]]


def tables(rows: Sequence[RunRow]) -> list[Table]:
    """A table of the runs, and where they differ by seed one of means over seeds."""
    keys = differing(rows)
    runs = [[_name(r, rows), *[r.settings.get(k, "") for k in keys], *r.results.values()] for r in rows]
    found: list[Table] = [("runs", ["run", *keys, *RESULTS], runs)]
    others = [k for k in keys if k != "seed"]
    if "seed" in keys and len(_by(rows, others)) < len(rows):
        found.append(_over_seeds(rows, others))
    return found


def differing(rows: Sequence[RunRow]) -> list[str]:
    """Settings in which runs differ. Where a group's choice differs, the many keys below it say nothing more."""
    keys = dict.fromkeys(k for r in rows for k in r.settings)
    differ = [k for k in keys if len({str(r.settings.get(k)) for r in rows}) > 1]
    chosen = [k for k in differ if k in (*GROUPS, "reward")]
    return [
        k for k in differ if (k == "seed" or k not in IGNORED) and not any(k.startswith(f"{c}.") for c in chosen)
    ]


def _by(rows: Sequence[RunRow], keys: Sequence[str]) -> dict[tuple[str, ...], list[RunRow]]:
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.settings.get(k, "")) for k in keys), []).append(row)
    return groups


def _over_seeds(rows: Sequence[RunRow], keys: Sequence[str]) -> Table:
    body = []
    for values, group in _by(rows, keys).items():
        cells: list[Any] = [*values, len(group)]
        for result in ("before", "accuracy", "change"):
            numbers = [r.results[result] for r in group if r.results[result] is not None]
            spread = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
            cells.append(f"{statistics.mean(numbers):.3f}{spread}" if numbers else None)
        body.append(cells)
    return "mean over seeds", [*keys, "runs", "before", "accuracy", "change"], body


def _name(row: RunRow, rows: Sequence[RunRow]) -> str:
    """The part of a path in which runs differ."""
    common = Path(os.path.commonpath([r.path for r in rows])) if len(rows) > 1 else row.path.parent
    return str(row.path.relative_to(common))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _print_rich(found: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    for title, header, body in found:
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in header:
            table.add_column(column, overflow="fold")
        for cells in body:
            table.add_row(*[_cell(c) for c in cells])
        console.print(table)


def _print_markdown(found: Sequence[Table]) -> None:
    for title, header, body in found:
        lines = [header, ["---"] * len(header), *[[_cell(c) for c in cells] for cells in body]]
        print(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")


def _print_csv(found: Sequence[Table]) -> None:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(found[0][1])
    writer.writerows(found[0][2])
    sys.stdout.write(out.getvalue())


def _print_json(found: Sequence[Table]) -> None:
    _, header, body = found[0]
    print(json.dumps([dict(zip(header, cells, strict=True)) for cells in body], indent=2))


PRINTERS = {"table": _print_rich, "markdown": _print_markdown, "csv": _print_csv, "json": _print_json}
