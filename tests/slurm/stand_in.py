#!/usr/bin/env python3
"""Stands in for `python -m grpocli train resume=RUN` and `python -m grpocli.launch.rollout_node RUN` in a job.

It only does what the batch script relies on: a "step" takes 0.2 s, `stop` or SIGTERM makes a "checkpoint" and leaves
`again`, and the last step ends the rollout nodes. `RUN/orders.json` changes the behaviour of a part by its name.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

part = "rollout" if sys.argv[2].endswith("rollout_node") else "train"
run = Path(sys.argv[-1].removeprefix("resume="))
rank = int(os.environ["SLURM_PROCID"])
orders = json.loads((run / "orders.json").read_text()) if (run / "orders.json").exists() else {}
mine = orders.get(part, {})
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))

place = {"part": part, "rank": rank, "host": socket.gethostname(), "argv": sys.argv[1:]}
place |= {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT")}
with (run / "places.jsonl").open("a") as file:
    file.write(json.dumps(place) + "\n")
print(f"{part} {rank} on {place['host']}", flush=True)


def leave(code: int) -> None:
    with (run / "ends.jsonl").open("a") as file:
        file.write(json.dumps({"part": part, "rank": rank, "code": code, "signals": asked}) + "\n")
    sys.exit(code)


def step() -> int:
    path = run / "step"
    return int(path.read_text()) if path.exists() else 0


while True:
    time.sleep(0.2)
    if "fail" in mine and step() >= mine["fail"]:
        print(f"grpocli: error: the {part} part was told to fail", file=sys.stderr, flush=True)
        leave(7)
    if part == "rollout":
        if (run / "engine" / "over").exists() or asked:
            leave(0)
    elif rank == 0:
        # Some tests kill it at any time, and the next start reads what this one wrote.
        (run / "step.new").write_text(str(step() + 1))
        (run / "step.new").replace(run / "step")
        if (run / "stop").exists() or (asked and not mine.get("deaf")):
            (run / "again").touch()
            leave(3)
        if step() >= orders.get("steps", 10):
            (run / "engine").mkdir(exist_ok=True)
            (run / "engine" / "over").touch()
            (run / "summary.json").write_text(json.dumps({"exit": "done", "eval/accuracy": 0.5}))
            leave(0)
    elif (run / "again").exists() or (run / "engine" / "over").exists():
        leave(3 if (run / "again").exists() else 0)
