"""What `grpocli watch` costs a run: `python bench/watch_cost.py [--steps 300] [--times 3]`, on a quiet machine.

Trains the default run alone and with a server that one page asks every two seconds, alternately, and prints JSON: the
median `time/step` of each run's metrics.jsonl without its first steps, the difference of the medians in percent, and
the server's CPU seconds per minute.
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
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

WARM_UP = 10
EVERY = 2.0
"""Seconds between two questions of a page."""


class Server:
    """`grpocli watch` with one page that is open."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "grpocli", "watch", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        found = next(at for line in self.process.stdout if (at := re.search(r":(\d+)(/\?token=\S+)", line)))
        self.port, self.cookie, self.answers = int(found[1]), "", 0
        self.cookie = self.get(found[2])[1].partition(";")[0]
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.ask)
        self.thread.start()
        self.start, self.before = time.monotonic(), self.cpu_seconds()

    def get(self, path: str) -> tuple[int, str, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", path, headers={"Cookie": self.cookie} if self.cookie else {})
        answer = connection.getresponse()
        return answer.status, answer.headers["set-cookie"] or "", answer.read()

    def ask(self) -> None:
        """Do what the page's script does."""
        cursor = ""
        while not self.stop.wait(EVERY):
            status, _, body = self.get(f"/data?since={cursor}" if cursor else "/data")
            if status == 200:
                news = json.loads(body)
                cursor = "" if news.get("reload") else news["cursor"]
                self.answers += 1

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> tuple[float, int]:
        """CPU seconds per minute, and answers with news."""
        rate = (self.cpu_seconds() - self.before) / (time.monotonic() - self.start) * 60
        self.stop.set()
        self.thread.join()
        self.process.terminate()
        self.process.communicate()
        return rate, self.answers


def step_seconds(folder: Path, steps: int, overrides: list[str]) -> float:
    """Train in `folder`, and return the median seconds of a step."""
    command = [sys.executable, "-m", "grpocli", "train", f"hydra.run.dir={folder}", f"train.steps={steps}"]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/step"] for row in rows[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of the run")
    args = parser.parse_args()
    alone, watched, rates, answers = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.times):
            alone.append(step_seconds(Path(name) / f"alone{number}", args.steps, args.overrides))
            folder = Path(name) / f"watched{number}"
            server = Server(folder)
            watched.append(step_seconds(folder, args.steps, args.overrides))
            rate, count = server.end()
            rates.append(rate)
            answers.append(count)
    result: dict[str, Any] = {
        "alone_seconds": alone,
        "watched_seconds": watched,
        "change_percent": 100 * (statistics.median(watched) / statistics.median(alone) - 1),
        "server_cpu_seconds_per_minute": rates,
        "answers_with_news": answers,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
