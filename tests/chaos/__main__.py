"""`make chaos`: random kills, faults, damages and attacks, and a table of what held."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos.kinds import KINDS
from chaos.place import Shared
from chaos.table import as_markdown, replaced
from chaos.tries import Outcome, chosen, tried


def main(argv: list[str]) -> int:
    """The exit code: 0 where everything that was tried held."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trials = chosen(args.only, args.seed, args.count, args.trial)
    folder = Path(tempfile.mkdtemp(prefix="grpocli-chaos-", dir=args.folder))
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    shared = Shared(folder)
    began, outcomes = time.monotonic(), []
    try:
        for outcome in tried(trials, shared, args.workers, deadline):
            outcomes.append(outcome)
            _tell(outcome, len(outcomes), len(trials))
    except KeyboardInterrupt:
        print("\nbroken off")
    finally:
        shared.close()
    took = (time.monotonic() - began) / 60
    words = f"Seed {args.seed}, {args.workers} at once, {took:.0f} minutes."
    table = f"{words}\n\n{as_markdown(trials, outcomes)}"
    print(f"\n{table}")
    if args.write:
        args.write.write_text(replaced(args.write.read_text(), table))
    lost = [outcome for outcome in outcomes if outcome.lost]
    if lost:
        print(f"\nthe folders of the lost ones are in {folder}; one is repeated by --trial KIND:NUMBER")
    return 1 if lost else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, help="begin no trial after so many; those are counted as not tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names))
    parser.add_argument("--count", type=int, help="trials of each kind, where that is fewer than its usual number")
    parser.add_argument("--trial", nargs="+", default=[], metavar="KIND:NUMBER", help="only these")
    parser.add_argument("--workers", type=int, default=2, help="trials at once")
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced, such as docs/reliability.md")
    return parser.parse_args(argv)


def _tell(outcome: Outcome, done: int, count: int) -> None:
    text = f"[{done}/{count}] {outcome.word:<8} {outcome.numbered.name:<16} {outcome.numbered.trial}"
    print(text + (f"\n    {outcome.reason}" if outcome.reason else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
