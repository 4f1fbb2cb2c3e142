"""grpocli beside TRL, `make bench`; beside the bare model, `make bench-limit`; and with more rows and longer ones.

Each workload runs in processes of its own, in turn, in every second round the other way round. A figure is the median
of a run's steps after the first two; the table has the medians over rounds, and the least and the most of them. Written
between two marks of docs/benchmarks.md, with every number in docs/benchmarks.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import ALL, LINEAR, WORKLOADS, make_model

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
OURS = ("ours.py", sys.executable)
GIVEN = [name for name, work in WORKLOADS.items() if not work.sampled]
WARM = 2
"""First steps that do not count: memory is touched for the first time, kernels are made."""


def one(script: str, python: str, name: str, folder: Path, steps: int) -> dict[str, Any]:
    """What a side prints of one run."""
    command = [python, str(HERE / script), name, str(folder), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over rounds."""
    medians = [statistics.median(run["seconds"][WARM:]) for run in runs]
    found = {"seconds": statistics.median(medians), "least": min(medians), "most": max(medians)}
    if "GiB" in runs[0]:
        found["GiB"] = statistics.median(run["GiB"] for run in runs)
    return found


def same_gradient(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """How far the gradient norms of the first steps are apart, relative: both had the same weights and data."""
    one, other = (side["logs"][0]["grad_norm"] for side in (ours, theirs))
    return float(abs(one - other) / other)


def peer_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| | grpocli, s | TRL, s | ratio | GiB | TRL | ratio | gradient norm |", f"|{'---|' * 8}"]
    for name, sides in found.items():
        ours, theirs = figures(sides["ours"]), figures(sides["theirs"])
        same = (
            "sampled" if WORKLOADS[name].sampled else f"{same_gradient(sides['ours'][0], sides['theirs'][0]):.1%} apart"
        )
        rows.append(
            f"| {name}: {WORKLOADS[name].about} | {_spread(ours)} | {_spread(theirs)} | "
            f"**{ours['seconds'] / theirs['seconds']:.2f}** | {ours['GiB']:.2f} | {theirs['GiB']:.2f} | "
            f"{ours['GiB'] / theirs['GiB']:.2f} | {same} |"
        )
    return "\n".join(rows)


def limit_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| | grpocli, s | bare model, s | ratio |", f"|{'---|' * 4}"]
    for name, sides in found.items():
        ours, bare = figures(sides["ours"]), figures(sides["theirs"])
        rows.append(
            f"| {name}: {WORKLOADS[name].about} | {_spread(ours)} | {_spread(bare)} | "
            f"**{ours['seconds'] / bare['seconds']:.2f}** |"
        )
    return "\n".join(rows)


def linear_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| | tokens | s | s for 1,000 tokens |", f"|{'---|' * 4}"]
    for name, sides in found.items():
        ours, parts = figures(sides["ours"]), sides["ours"][0]["parts"]
        work = LINEAR[name]
        tokens = work.groups * work.prompt + parts["tokens/trained"][-1]
        rows.append(f"| {name}: {work.about} | {tokens:,} | {_spread(ours)} | {1000 * ours['seconds'] / tokens:.2f} |")
    return "\n".join(rows)


def _spread(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


def write(mark: str, table: str, found: dict[str, Any]) -> None:
    """Into the docs: the table between its marks, the numbers beside it."""
    page, data = DOCS / "benchmarks.md", DOCS / "benchmarks.json"
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    text = page.read_text(encoding="utf-8")
    inner = re.escape(begin) + ".*?" + re.escape(end)
    if not re.search(inner, text, re.DOTALL):
        raise SystemExit(f"{page} has no {begin} ... {end} to write into")
    page.write_text(re.sub(inner, lambda _: f"{begin}\n{table}\n{end}", text, flags=re.DOTALL), encoding="utf-8")
    known = json.loads(data.read_text()) if data.exists() else {}
    data.write_text(json.dumps(known | {mark: found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--peer", metavar="PYTHON", help="of TRL's environment; without it: against the bare model")
    parser.add_argument("--linear", action="store_true", help="grpocli alone, with more rows and longer ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--print", action="store_true", help="leave the docs alone")
    args = parser.parse_args()
    if args.linear:
        sides, names, mark, table_of = {"ours": OURS}, list(LINEAR), "linear", linear_table
    elif args.peer:
        sides, names = {"ours": OURS, "theirs": ("theirs.py", args.peer)}, list(WORKLOADS)
        mark, table_of = "beside TRL", peer_table
    else:
        sides, names = {"ours": OURS, "theirs": ("limit.py", sys.executable)}, GIVEN
        mark, table_of = "bare model", limit_table
    names = args.workloads or names
    found: dict[str, dict[str, Any]] = {name: {side: [] for side in sides} for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            for name in names:
                folder = Path(scratch) / ALL[name].model.replace(" ", "-")
                if not folder.exists():
                    make_model(ALL[name].model, folder)
                for side in sorted(sides, reverse=number % 2 == 0):  # the other first in the first round
                    found[name][side].append(one(*sides[side], name, folder, args.steps * ALL[name].times))
                    median = statistics.median(found[name][side][-1]["seconds"][WARM:])
                    print(f"round {number + 1}: {name} {side} {median:.2f} s", file=sys.stderr, flush=True)
    table = table_of(found)
    print(table)
    if not args.print:
        write(mark, table, found)


if __name__ == "__main__":
    main()
