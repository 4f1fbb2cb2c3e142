"""Ablation benchmark: step time and memory with and without each optimization.

`python bench/side_by_side/optimizations.py`

Alternates steps of grpocli with and without one optimization. Writes a table between two markers of
docs/evidence/benchmarks.md, as `run.py` does. `--with` and `--without OPTIMIZATION ...` run one side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from run import WARM, check, measured, write
from workloads import ALL, make_model

from grpocli.processes.libraries import shorten_spinning

MARK = "savings"


def no_skipping() -> None:
    from grpocli.training.update import Updater

    Updater.is_computed = lambda self, row: True  # type: ignore[method-assign]


def whole_logits() -> None:
    from grpocli.training import trials

    def none(policy: Any, world: Any) -> bool:
        policy.at_head = False
        return False

    trials.find_head = none


def scored_before() -> None:
    from grpocli.training.update import Updater

    score = Updater._score_before_updates  # only the first window is not scored under the old policy

    def score_as_later_window(self: Any, window: Any) -> None:
        score(self, replace(window, number=max(1, window.number)))

    Updater._score_before_updates = score_as_later_window  # type: ignore[method-assign]


def one_padded_batch() -> None:
    from grpocli.training import packing

    packing.PADDING = 1.0


def any_size() -> None:
    from grpocli.training import packing

    packing.rounded = lambda n, bits=5: n


def freed_memory_given_back() -> None:
    import grpocli.launch.trainer_process as worker

    worker.keep_freed_memory = lambda: False


def growing_cache() -> None:
    import grpocli.rollout.sampler as sampler

    sampler.preallocate = lambda cache, tokens, dtype: None


def sampled_in_bfloat16() -> None:
    from contextlib import nullcontext

    import grpocli.rollout.sampler as sampler

    sampler.float32_attention = lambda model: nullcontext()


@dataclass(frozen=True)
class Optimization:
    """How to switch an optimization off: config keys, or a change to the code.

    with_it: config keys of the side with the optimization; both: of both sides.
    """

    workload: str
    options: tuple[str, ...] = ()
    change: Callable[[], None] = lambda: None
    with_it: tuple[str, ...] = ()
    both: tuple[str, ...] = ()


OPTIMIZATIONS = {
    "prompts once": Optimization("W3", ("train.packed=false",)),
    "no padding": Optimization("W4", ("train.packed=false",), one_padded_batch),
    "no rows without a gradient": Optimization("W5", change=no_skipping),
    "no logits": Optimization("W6", change=whole_logits),
    "no forward twice": Optimization("W2", change=scored_before),
    "the sampler as old policy": Optimization(
        "2 x rows", with_it=("algorithm/correction=sampler",), both=("train.minibatches=4",)
    ),
    "bfloat16": Optimization("W2", ("model.dtype=float32",)),
    "freed memory is kept": Optimization("W2", change=freed_memory_given_back),
    "few sizes": Optimization("W4", change=any_size),
    "a cache with room": Optimization("W1", change=growing_cache),
    "tokens attend in float32": Optimization("W1", change=sampled_in_bfloat16),
}


def side(name: str, folder: str, steps: str, without: bool) -> None:
    """One run in this process, with the output of grpocli_side.py."""
    import grpocli_side

    optimization = OPTIMIZATIONS[name]
    if without:
        optimization.change()
    options = optimization.options if without else optimization.with_it
    sys.argv = ["grpocli_side.py", optimization.workload, folder, steps, *optimization.both, *options]
    grpocli_side.main()


def run(name: str, folder: Path, steps: int, without: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--without" if without else "--with", name, str(folder), str(steps)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    shorten_spinning(env)  # some changes load torch before grpocli sets it
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": statistics.median(found["seconds"][WARM:]), "GiB": found["GiB"]}


def middle(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The medians over rounds."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def row(name: str, sides: dict[str, list[dict[str, Any]]]) -> str:
    """One row of the table."""
    with_it, without = (middle(sides[side]) for side in ("with", "without"))
    change = with_it["seconds"] / without["seconds"] - 1
    return (
        f"| {name} | {OPTIMIZATIONS[name].workload} | {with_it['seconds']:.2f} | {without['seconds']:.2f} | "
        f"**{abs(change):.0%} {'less' if change <= 0 else 'more'}** | {with_it['GiB']:.2f} | {without['GiB']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "optimizations",
        nargs="*",
        metavar="OPTIMIZATION",
        help=f"of {', '.join(OPTIMIZATIONS)}, whose rows in the docs are replaced; all by default",
    )
    for which in ("--with", "--without"):
        parser.add_argument(which, nargs=3, metavar=("OPTIMIZATION", "FOLDER", "STEPS"), dest=which.strip("-"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="leave the docs alone")
    args = parser.parse_args()
    for without in (True, False):
        if given := getattr(args, "without" if without else "with"):
            side(*given, without)
            return
    check(parser, args)
    if unknown := set(args.optimizations) - set(OPTIMIZATIONS):
        parser.error(f"there are {', '.join(OPTIMIZATIONS)}, not {', '.join(unknown)}")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.optimizations or OPTIMIZATIONS:
            work = ALL[OPTIMIZATIONS[name].workload]
            folder = Path(scratch) / work.model.replace(" ", "-")
            if not folder.exists():
                make_model(work.model, folder)
            sides: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
            for number in range(args.rounds):
                for which in sorted(sides, reverse=number % 2 == 0):
                    sides[which].append(run(name, folder, args.steps * work.times, without=which == "without"))
            found[name] = sides
            print(row(name, found[name]), file=sys.stderr, flush=True)
    known = {} if args.print else measured(MARK)
    found = {name: found.get(name) or known[name] for name in OPTIMIZATIONS if name in found or name in known}
    rows = [row(name, runs) for name, runs in found.items()]
    table = "\n".join(["| | | s with it | without | | GiB with it | without |", f"|{'---|' * 7}", *rows])
    print(table)
    if not args.print:
        write(MARK, table, found)


if __name__ == "__main__":
    main()
