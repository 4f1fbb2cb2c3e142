"""Time and memory of a user's first commands: `python bench/limits.py [--run]`.

Runs each command several times as a process. Prints the median and largest time, and the peak memory of the largest
descendant, as a Markdown row. `--run` adds the default training run with an empty cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))


def measure(command: list[str], times: int, env: dict[str, str] | None = None) -> tuple[list[float], float]:
    """Seconds of each run, and GiB of the largest process."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return seconds, peak


def row(name: str, limit: str, seconds: list[float], peak: float) -> str:
    return f"| `{name}` | {limit} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {peak:.2f} GiB |"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--run", action="store_true", help="also the default training run")
    cli.add_argument("--times", type=int, default=5)
    args = cli.parse_args()
    print("| command | limit | median | slowest | peak memory so far |\n|---|---|---|---|---|")
    print(row("grpocli --help", "0.5 s", *measure([GRPOCLI, "--help"], args.times)))
    print(row("grpocli train --cfg job", "1.5 s", *measure([GRPOCLI, "train", "--cfg", "job"], args.times)))
    if args.run:
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "GRPOCLI_CACHE": f"{folder}/cache"}
            command = [GRPOCLI, "train", f"hydra.run.dir={folder}/run"]
            print(row("grpocli train", "180 s, 2 GB", *measure(command, 1, env)))


if __name__ == "__main__":
    main()
