"""What `grpocli watch` costs a run: `python bench/watch_cost.py [--steps 3000] [--block 20]`, on a quiet machine.

Trains the default run once beside a server. In every second block of seconds a page asks the server every two seconds,
as the page's script does; in the others the server's process is stopped. The order is alone, watched, watched, alone,
so a drift of the step's time cancels. Prints JSON: the change of the mean `time/step` from a block alone to the watched
one beside it, in percent, with its 95 % interval over the pairs, and the server's CPU seconds per watched minute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

WARM_UP = 20
"""Steps before the first block."""
EVERY = 2.0
"""Seconds between two questions of a page."""
ORDER = (False, True, True, False)
"""Whether the page asks, in four blocks after each other."""


class Server:
    """`grpocli watch` with one page that is open."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "grpocli", "watch", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        found = next(at for line in self.process.stdout if (at := re.search(r":(\d+)(/\?token=\S+)", line)))
        self.port, self.cookie, self.tag, self.answers = int(found[1]), "", "", 0
        self.cookie = self.get(found[2])[1].partition(";")[0]

    def get(self, path: str) -> tuple[int, str, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", path, headers={"Cookie": self.cookie} if self.cookie else {})
        answer = connection.getresponse()
        return answer.status, answer.headers["set-cookie"] or "", answer.read()

    def ask(self) -> None:
        """Do what the page's script does."""
        status, _, body = self.get(f"/data?known={self.tag}")
        if status == 200:
            news = json.loads(body)
            self.tag = news["tag"]
            self.answers += 1

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def step_seconds(folder: Path) -> list[float]:
    """`time/step` of the steps that are written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["time/step"] for line in lines]


def wait(run: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait, and return whether the run still goes on."""
    try:
        run.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def block_means(run: subprocess.Popen[bytes], server: Server, folder: Path, seconds: float) -> list[tuple[bool, float]]:
    """Whether the page asked, and the mean `time/step`, of every whole block."""
    blocks: list[tuple[bool, float]] = []
    while True:
        watched = ORDER[len(blocks) % len(ORDER)]
        server.process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
        first, end = len(step_seconds(folder)) + 1, time.monotonic() + seconds  # + 1: the step of the change
        while (left := end - time.monotonic()) > 0:
            if watched:
                server.ask()
            if not wait(run, max(0.0, min(EVERY, left))):
                server.process.send_signal(signal.SIGCONT)
                return blocks
        if times := step_seconds(folder)[first:]:
            blocks.append((watched, statistics.fmean(times)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--block", type=float, default=20.0, help="seconds")
    parser.add_argument("overrides", nargs="*", help="of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "grpocli", "train", f"hydra.run.dir={folder}", f"train.steps={args.steps}"]
        run = subprocess.Popen([*command, *args.overrides], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(folder)
        try:
            while len(step_seconds(folder)) < WARM_UP and wait(run, 0.5):
                pass
            server.ask()
            before = server.cpu_seconds()
            blocks = block_means(run, server, folder, args.block)
            cpu = server.cpu_seconds() - before
        finally:
            server.process.kill()
            run.kill()
            server.process.communicate()
            run.wait()
    pairs = [sorted(pair) for pair in zip(blocks[::2], blocks[1::2], strict=False)]  # alone first
    if len(pairs) < 2:
        raise SystemExit("fewer than two pairs of blocks: more --steps, or a shorter --block")
    changes = [100 * (watched / alone - 1) for (_, alone), (_, watched) in pairs]
    mean, error = statistics.fmean(changes), statistics.stdev(changes) / math.sqrt(len(changes))
    minutes = args.block * sum(watched for watched, _ in blocks) / 60
    result = {
        "alone_seconds": statistics.fmean(seconds for watched, seconds in blocks if not watched),
        "watched_seconds": statistics.fmean(seconds for watched, seconds in blocks if watched),
        "change_percent": mean,
        "change_interval_percent": [mean - 1.96 * error, mean + 1.96 * error],
        "pairs": len(pairs),
        "server_cpu_seconds_per_minute": cpu / minutes,
        "answers_with_news": server.answers,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
