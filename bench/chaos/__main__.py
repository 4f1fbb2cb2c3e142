"""`make chaos`: random kills, faults, damages and attacks, and a table of the results."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos.runner import KINDS, Outcome, run_trials, select
from chaos.table import as_markdown, replaced
from chaos.workspace import Shared


def main(argv: list[str]) -> int:
    """The exit code: 0 if no trial failed."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trials = select(args.only, args.seed, args.count, args.trial)
    folder = Path(tempfile.mkdtemp(prefix="grpocli-chaos-", dir=args.folder))
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    shared = Shared(folder)
    start, outcomes = time.monotonic(), []
    try:
        for outcome in run_trials(trials, shared, args.workers, deadline):
            outcomes.append(outcome)
            _print(outcome, len(outcomes), len(trials))
    except KeyboardInterrupt:
        print("\ninterrupted")
    finally:
        shared.close()
    took = (time.monotonic() - start) / 60
    head = f"Seed {args.seed}, {args.workers} at a time, {took:.0f} minutes."
    table = f"{head}\n\n{as_markdown(trials, outcomes)}"
    print(f"\n{table}")
    if args.write:
        args.write.write_text(replaced(args.write.read_text(), table))
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        print(f"\nthe folders of the failed trials are in {folder}; --trial KIND:NUMBER repeats one")
    return 1 if failed else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, help="start no trial after this many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names))
    parser.add_argument("--count", type=int, help="most trials of each kind")
    parser.add_argument("--trial", nargs="+", default=[], metavar="KIND:NUMBER", help="run only these")
    parser.add_argument("--workers", type=int, default=2, help="trials at a time")
    parser.add_argument("--folder", type=Path, help="working folder; default: the temporary folder")
    parser.add_argument("--write", type=Path, help="replace the table of a page: docs/evidence/reliability.md")
    return parser.parse_args(argv)


def _print(outcome: Outcome, done: int, count: int) -> None:
    text = f"[{done}/{count}] {outcome.word:<8} {outcome.numbered.name:<16} {outcome.numbered.trial}"
    print(text + (f"\n    {outcome.reason}" if outcome.reason else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
