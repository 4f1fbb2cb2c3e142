"""grpocli compared with TRL, with the bare model, and with more and longer rows; see KINDS.

Each workload runs in separate processes. The sides alternate, and every second round starts with the other side. A
figure is the median of a run's steps after the first two; the table has the median, the least and the largest over
rounds. Writes the table between two markers of docs/evidence/benchmarks.md, and all numbers into benchmarks.json
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import ALL, GPU, LINEAR, WHOLE, WORKLOADS, Workload, make_model

from grpocli.processes.libraries import shorten_spinning

HERE = Path(__file__).parent
EVIDENCE = HERE.parents[1] / "docs" / "evidence"
DATA = EVIDENCE / "benchmarks.json"
PEER = HERE.parents[1] / ".venv-parity" / "bin" / "python"
GRPOCLI_SIDE = ("grpocli_side.py", sys.executable)
GIVEN = [name for name, work in WORKLOADS.items() if not work.sampled]
PEAK = {
    **{"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12},
    **{"L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12},
}
"""Dense bfloat16 FLOPs per second, from the data sheets; the first name that matches counts."""
REWARD, IN_A_ROW = 0.95, 10
"""A whole run ends when the mean reward of IN_A_ROW consecutive steps reaches REWARD."""
APART = 0.03
"""Largest relative difference of the norms of two correct gradients in bfloat16."""
WARM = 2
"""First steps of a run that do not count: memory is touched for the first time and kernels are compiled."""


def one(script: str, python: str, name: str, folder: Path, steps: int, *more: str) -> dict[str, Any]:
    """The output of one side for one run."""
    command = [python, str(HERE / script), name, str(folder), str(steps), *more]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    if script != "trl_side.py":
        shorten_spinning(env)  # as `grpocli train` does
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics over rounds."""
    medians = [statistics.median(run["seconds"][WARM:]) for run in runs]
    found = {"seconds": statistics.median(medians), "least": min(medians), "most": max(medians)}
    if "GiB" in runs[0]:
        found["GiB"] = statistics.median(run["GiB"] for run in runs)
    return found


def same_gradient(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Relative difference of the gradient norms of the first steps, which have the same weights and data."""
    one, other = (side["logs"][0]["grad_norm"] for side in (ours, theirs))
    apart = float(abs(one - other) / other)
    if apart > APART:
        raise SystemExit(f"the gradient norms are {one} and {other}: not the same work is measured")
    return apart


def peer_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| | grpocli, s | TRL, s | ratio | GiB | TRL | ratio | gradient norm |", f"|{'---|' * 8}"]
    for name, sides in found.items():
        ours, theirs = figures(sides["ours"]), figures(sides["theirs"])
        same = (
            "sampled" if WORKLOADS[name].sampled else f"{same_gradient(sides['ours'][0], sides['theirs'][0]):.1%} apart"
        )
        alone = WORKLOADS[name].engine != "vllm"  # otherwise the server's memory is missing
        ratio = f"{ours['GiB'] / theirs['GiB']:.2f}" if alone else ""
        rows.append(
            f"| {name}: {WORKLOADS[name].about} | {_spread(ours)} | {_spread(theirs)} | "
            f"**{ours['seconds'] / theirs['seconds']:.2f}** | {ours['GiB']:.2f}{'' if alone else ' and the server'} | "
            f"{theirs['GiB']:.2f} | {ratio} | {same} |"
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


def gpu_table(found: dict[str, dict[str, Any]]) -> str:
    """Cells of a workload: tokens of all completions, and the FLOPs that the update needs, which are the same for
    both sides.
    """
    one = "s | tokens/s | needed FLOPs | GiB"
    rows = [f"| | grpocli, {one} | TRL, {one} | ratio |", f"|{'---|' * 10}"]
    for name, sides in found.items():
        same_gradient(sides["ours"][0], sides["theirs"][0])
        cells = [_on_a_gpu(GPU[name], runs) for runs in sides.values()]
        ratio = figures(sides["ours"])["seconds"] / figures(sides["theirs"])["seconds"]
        rows.append(f"| {name}: {GPU[name].about} | {' | '.join(cells)} | **{ratio:.2f}** |")
    return "\n".join(rows)


def _on_a_gpu(work: Workload, runs: list[dict[str, Any]]) -> str:
    """The cells of one side."""
    steps = range(WARM, len(runs[0]["seconds"]))
    seconds = statistics.mean(sum(run["seconds"][WARM:]) for run in runs)
    tokens, flops = (sum(map(of, steps)) for of in (lambda step: sum(work.lengths(step)), work.flops))
    peak = next((most for name, most in PEAK.items() if name in runs[0]["device"]), None)
    share = f"{flops / seconds / peak:.0%}" if peak else "unknown"
    one = figures(runs)
    return f"{_spread(one)} | {tokens / seconds:,.0f} | {share} | {one['GiB']:.2f}"


def reached(run: dict[str, Any]) -> int:
    """Steps until the mean reward of IN_A_ROW was REWARD."""
    rewards = [log["reward"] for log in run["logs"]]
    for k in range(IN_A_ROW, len(rewards) + 1):
        if statistics.mean(rewards[k - IN_A_ROW : k]) >= REWARD:
            return k
    raise SystemExit(f"a mean reward of {REWARD} was not reached in {len(rewards)} steps: run more (--steps)")


def whole_table(found: dict[str, dict[str, Any]]) -> str:
    """Seconds of all these steps, slow first ones included."""
    rows = [f"| | steps to a mean reward of {REWARD} | s | s a step |", f"|{'---|' * 4}"]
    for sides in found.values():
        for name, runs in (("grpocli", sides["ours"]), ("TRL", sides["theirs"])):
            steps = [reached(run) for run in runs]
            seconds = [sum(run["seconds"][:k]) for run, k in zip(runs, steps, strict=True)]
            rows.append(
                f"| {name} | {statistics.median(steps):.0f} ({min(steps)} to {max(steps)}) | "
                f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | "
                f"{sum(seconds) / sum(steps):.2f} |"
            )
    return "\n".join(rows)


def _spread(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


def measured(mark: str) -> dict[str, Any]:
    """The numbers in docs/evidence/benchmarks.json."""
    known: dict[str, dict[str, Any]] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return known.get(mark, {})


def write(mark: str, table: str, found: dict[str, Any]) -> None:
    """Write the table between its markers, and the numbers into the JSON file."""
    page = EVIDENCE / "benchmarks.md"
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    text = page.read_text(encoding="utf-8")
    inner = re.escape(begin) + ".*?" + re.escape(end)
    if not re.search(inner, text, re.DOTALL):
        raise SystemExit(f"{page} has no {begin} ... {end} to write into")
    page.write_text(re.sub(inner, lambda _: f"{begin}\n{table}\n{end}", text, flags=re.DOTALL), encoding="utf-8")
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (known | {mark: found}).items())
    DATA.write_text(f"{{\n{lines}\n}}\n")


@dataclass(frozen=True)
class Kind:
    """A comparison. mark: the marker of its table. other_script: the script of the other side; None: grpocli alone.

    options: config keys of grpocli's side, in which MODEL is the folder of the model. other_options: of the other side.
    """

    about: str
    mark: str
    names: list[str]
    other_script: str | None
    table: Callable[[dict[str, dict[str, Any]]], str]
    options: tuple[str, ...] = ()
    other_options: tuple[str, ...] = ()


KINDS = {
    "peer": Kind("steps beside TRL's", "beside TRL", list(WORKLOADS), "trl_side.py", peer_table),
    "limit": Kind("updates beside the bare model's", "bare model", GIVEN, "limit.py", limit_table),
    "distillation": Kind(
        "updates of distillation beside the bare student's and teacher's",
        "distillation",
        ["W2", "W3", "W4"],
        "limit.py",
        limit_table,
        ("algorithm/advantage=none", "algorithm/kl=reverse", "algorithm.kl.beta=1", "algorithm.kl.model=MODEL"),
        ("teacher",),
    ),
    "linear": Kind("with more rows, and with longer ones", "linear", list(LINEAR), None, linear_table),
    "whole": Kind(
        "TRL and grpocli until they reach the same reward", "whole run", list(WHOLE), "trl_side.py", whole_table
    ),
    "gpu": Kind("updates of models of 0.5B and 1.5B parameters", "on a GPU", list(GPU), "trl_side.py", gpu_table),
}


def _lengths(found: dict[str, dict[str, Any]]) -> str:
    """The rounds and steps of the workloads: `3 rounds of 7 steps (W1: 3 of 28).`"""
    each = {name: (len(sides["ours"]), len(sides["ours"][0]["seconds"])) for name, sides in found.items()}
    usual = statistics.mode(each.values())
    others = [f"{name}: {rounds} of {steps}" for name, (rounds, steps) in each.items() if (rounds, steps) != usual]
    return rounds_of(*usual) + (f" ({', '.join(others)})" if others else "") + "."


def rounds_of(rounds: int, steps: int) -> str:
    """`3 rounds of 7 steps`."""
    return f"{rounds} round{'s' if rounds > 1 else ''} of {steps} step{'s' if steps > 1 else ''}"


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report which measurement runs."""
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if args.steps <= WARM:
        parser.error(f"--steps {args.steps}: more than {WARM}, the first ones do not count")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, help="; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items()))
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help="some of them, whose rows in the docs are replaced; all by default",
    )
    parser.add_argument("--peer", metavar="PYTHON", default=str(PEER), help="of TRL's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--print", action="store_true", help="leave the docs alone")
    args = parser.parse_args()
    kind: Kind = KINDS[args.kind]
    check(parser, args)
    if kind.other_script == "trl_side.py" and not Path(args.peer).exists():
        parser.error(
            f"there is no {args.peer}: `make bench` makes TRL's environment, --peer names the Python of another"
        )
    if others := set(args.workloads) - set(kind.names):
        parser.error(f"{args.kind} has {', '.join(kind.names)}, not {', '.join(others)}")
    sides = {"ours": GRPOCLI_SIDE}
    if kind.other_script:
        sides["theirs"] = (kind.other_script, args.peer if kind.other_script == "trl_side.py" else sys.executable)
    found: dict[str, dict[str, Any]] = {name: {side: [] for side in sides} for name in args.workloads or kind.names}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            for name, runs in found.items():
                folder = Path(scratch) / ALL[name].model.replace(" ", "-")
                if not folder.exists():
                    make_model(ALL[name].model, folder)
                for side in sorted(sides, reverse=number % 2 == 0):  # the other side starts the first round
                    steps = args.steps * ALL[name].times
                    keys = kind.options if side == "ours" else kind.other_options
                    keys = tuple(key.replace("MODEL", str(folder)) for key in keys)
                    runs[side].append(one(*sides[side], name, folder, steps, f"seed={number}", *keys))
                    median = statistics.median(runs[side][-1]["seconds"][WARM:])
                    print(f"round {number + 1}: {name} {side} {median:.2f} s", file=sys.stderr, flush=True)
    known = {} if args.print else measured(kind.mark)
    found = {name: found.get(name) or known[name] for name in kind.names if name in found or name in known}
    table = f"{kind.table(found)}\n\n{_lengths(found)}"
    print(table)
    if not args.print:
        write(kind.mark, table, found)


if __name__ == "__main__":
    main()
