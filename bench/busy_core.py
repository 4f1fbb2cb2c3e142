"""Step times of the default run, alone and beside a program that keeps one core busy: `python bench/busy_core.py`.

Compares grpocli's setting for waiting threads (a short spin) with libgomp's default, in alternating runs, and prints
Markdown rows of median seconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))
WAITING = {"libgomp's default": {"GOMP_SPINCOUNT": "300000"}, "grpocli": {}}
TURNS, STEPS = 3, 20


@contextmanager
def busy_core() -> Iterator[None]:
    """A program that keeps one core busy."""
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


def seconds_a_step(env: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ["eval.problems=0", f"train.steps={STEPS}", f"hydra.run.dir={folder}/run"]
        subprocess.run([GRPOCLI, "train", *options], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env})
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return float(statistics.median(json.loads(line)["time/step"] for line in lines))


def row(name: str) -> str:
    medians = {how: statistics.median(seconds_a_step(env) for _ in range(TURNS)) for how, env in WAITING.items()}
    ratio = medians["libgomp's default"] / medians["grpocli"]
    return f"| {name} | {' | '.join(f'{s:.3f} s' for s in medians.values())} | {ratio:.2f} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"| | {' | '.join(WAITING)} | ratio |\n|---|---|---|---|")
    print(row("alone"))
    with busy_core():
        print(row("one core busy"))


if __name__ == "__main__":
    main()
