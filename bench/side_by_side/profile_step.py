"""Profile one update and print its time by operation as a Markdown table.

`python bench/side_by_side/profile_step.py [WORKLOAD]`

Profiles an update of `grpocli train` after a few warm-up updates. The own time of an operation counts for the part
that it belongs to (output head, attention, optimizer), otherwise for the operation itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import grpocli_side
from workloads import WORKLOADS, make_model

from grpocli.processes.libraries import shorten_spinning

AT, STEPS = 4, 6
WITHIN = {
    "_Scores": "output head: log-probs and entropies, forward",
    "_ScoresBackward": "output head, backward",
    "Optimizer.step": "AdamW",
    "scaled_dot_product": "attention",
}
KINDS = {
    "matrix products of the layers": ("aten::mm", "aten::addmm", "aten::bmm"),
    "casts and copies": ("aten::copy_", "aten::cat", "aten::clone"),
}
OTHER = "everything else: normalisation, activation, rotation, sums of gradients and their norm"


def place(event: Any) -> str:
    """The part of the update that an operation belongs to."""
    above: Any = event
    while above is not None:
        for name, part in WITHIN.items():
            if name == above.name or (name in above.name and not name.startswith("_Scores")):
                return part
        above = above.cpu_parent
    return next((kind for kind, names in KINDS.items() if event.name in names), OTHER)


def table(events: Any) -> str:
    parts = Counter[str]()
    for event in events:
        parts[place(event)] += event.self_cpu_time_total
    total = sum(parts.values())
    rows = [f"| {part} | {time / 1e6:.2f} s | {time / total:.0%} |" for part, time in parts.most_common()]
    return "\n".join(["| | | |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="W2", choices=WORKLOADS)
    name = parser.parse_args().workload
    shorten_spinning(os.environ)
    # libgomp reads it when torch is loaded
    from torch.profiler import ProfilerActivity, profile

    from grpocli.training.trainer import Trainer

    update, found = Trainer.update, list[str]()

    def profiled(self: Any, rows: Any, n_groups: int) -> None:
        if self.state.step != AT:
            update(self, rows, n_groups)
            return
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            update(self, rows, n_groups)
        found.append(table(seen.events()))

    Trainer.update = profiled  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        make_model(WORKLOADS[name].model, Path(folder))
        sys.argv = ["grpocli_side.py", name, folder, str(STEPS)]
        with redirect_stdout(sys.stderr):
            grpocli_side.main()
    print(found[0])


if __name__ == "__main__":
    main()
