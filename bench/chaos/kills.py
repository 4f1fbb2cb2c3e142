"""Signals to any process of a run at any moment: nothing is left, and a resumed run equals an uninterrupted one.

Where groups of a resumed run depend on the clock, every prompt is trained, or rejected by the algorithm, exactly once.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.trial import Kind, require, spread
from chaos.workspace import SMALL, START, Command, Workspace, check_equal, metrics, read, require_module
from cli.copied import config_dir

from grpocli.runs.rollouts import read_rollouts

STEPS = 8
ONE_AHEAD = ["rollout.max_staleness=1", "rollout.in_flight=false"]
IN_FLIGHT = ["rollout.max_staleness=2", "algorithm/keep=dynamic", "checkpoint.every=2"]  # versions depend on the clock
RUNS = {
    "engine=transformers": [],
    "engine=transformers, two processes": ["hardware.processes=2"],
    "engine=transformers, two processes with FSDP2": ["hardware.processes=2", "hardware.parallel=fsdp2"],
    "engine=copied, staleness 1": ["engine=copied", *ONE_AHEAD],
    "engine=copied, in flight": ["engine=copied", "engine.slow=0.02", *IN_FLIGHT],
    "engine=vllm": ["engine=vllm"],
    "engine=vllm, staleness 1": ["engine=vllm", *ONE_AHEAD],
}
SHARES = {
    "engine=transformers": 14,
    "engine=transformers, two processes": 10,
    "engine=transformers, two processes with FSDP2": 6,
    "engine=copied, staleness 1": 10,
    "engine=copied, in flight": 8,
    "engine=vllm": 8,
    "engine=vllm, staleness 1": 4,
}
MOMENTS = ("starting", "in a step", "in a step", "saving")
RUN, RANK, GUARD, ENGINE, ALL = "the run", "a trainer process", "a guard", "vLLM's engine", "all named grpocli"


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal to `target`, one of the processes of a run of `RUNS`, `delay` seconds after a moment of step `after`."""

    run: str
    target: str
    number: signal.Signals
    moment: str
    after: int
    delay: float

    attacks = 1

    def __str__(self) -> str:
        when = f"{self.moment} {self.after + 1}" if self.moment == "in a step" else self.moment
        return f"{self.run}: {self.number.name} to {self.target}, {when} + {self.delay:.2f} s"

    def execute(self, workspace: Workspace) -> None:
        if "vllm" in self.run:
            require_module("vllm")
        config_dir(workspace.shared.folder / "conf")
        choices = ["--config-dir", str(workspace.shared.folder / "conf")]
        options = [*choices, *RUNS[self.run], f"train.steps={STEPS}"]
        expected = None if "in flight" in self.run else workspace.finished(*options)
        run = workspace.folder / "run"
        command = workspace.start("train", *SMALL, *options, f"hydra.run.dir={run}", fresh=self.target == ALL)
        try:
            self.wait(command, run)
            targets, memory = self.targets(command), command.tree.memory()
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, self.number)
            ended = command.wait(START)
            require(ended.code is not None, f"it hung after the signal{ended.tail}")
            command.tree.wait_gone()
        finally:
            command.tree.end()
        if self.target != ALL:  # otherwise no guard is left, and the next start removes the memory
            check_removed(memory)
        if ended.code not in (-signal.SIGKILL, 128 + signal.SIGKILL):
            ended.check_readable()
        if self.number != signal.SIGKILL and has_metrics(run):
            require(ended.code in (0, 3), f"after a signal it ended with {ended.code}, not 3{ended.tail}")
        if ended.code != 0:
            workspace.run("train", *choices, f"resume={run}", seconds=START).check(0)
            check_removed(memory)
        if expected:
            check_equal(run, expected)
        else:
            check_groups(run)

    def wait(self, command: Command, run: Path) -> None:
        """Wait for the moment, or the end of the run."""
        if self.moment == "starting":
            command.wait_until((run / "config.yaml").exists, START)
        elif self.moment == "in a step":
            command.wait_until(lambda: lines(run) >= self.after, START)
        else:
            folder = run / "checkpoints"
            command.wait_until(
                lambda: lines(run) >= self.after and any(name.startswith(".tmp") for name in listed(folder)), START
            )
        time.sleep(self.delay)

    def targets(self, command: Command) -> list[int]:
        """The pids that receive the signal; the main process's if the run has no such process."""
        living = command.tree.look()
        if self.target == RUN:
            return [command.pid]
        wanted = {
            RANK: lambda pid: b"RANK=" in read(pid, "environ") and b"grpocli" in read(pid, "cmdline"),
            GUARD: lambda pid: b"processes/reaper.py" in read(pid, "cmdline"),
            ENGINE: lambda pid: b"EngineCore" in read(pid, "cmdline"),
            ALL: lambda pid: b"grpocli" in read(pid, "cmdline"),
        }[self.target]
        found = [pid for pid in living if wanted(pid)] or [command.pid]
        return found if self.target == ALL else found[-1:]


def draw(random: Random, count: int) -> Sequence[Kill]:
    shares = [run for run, share in SHARES.items() for _ in range(share)]
    trials = []
    for run in spread(random, shares, count):
        targets = [RUN, RUN, ALL]
        if "two" in run:
            targets += [RANK, RANK, GUARD]
        if "vllm" in run:
            targets += [GUARD, ENGINE, ALL]
        if run == "engine=vllm, staleness 1":  # a restarted server may sample with newer weights
            targets = [RUN, ALL, GUARD]
        target = random.choice(targets)
        number = random.choice([signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGINT])
        moment = random.choice(MOMENTS)
        delay = random.random() * (4.0 if moment == "starting" else 0.3 if moment == "in a step" else 0.02)
        trials.append(
            Kill(
                run,
                target,
                number if target == RUN else signal.SIGKILL,
                moment,
                random.randint(1, STEPS - 2),
                delay,
            )
        )
    return trials


def check_removed(memory: Iterable[Path]) -> None:
    """Raise PromiseBroken if some of this shared memory is left."""
    left = [path.name for path in memory if path.exists()]
    require(not left, f"it left shared memory: {', '.join(left)}")


def check_groups(run: Path) -> None:
    """Raise PromiseBroken unless each draw of a prompt is in one rollout file, once, and all steps are trained."""
    steps = [row["step"] for row in metrics(run)]
    require(steps == list(range(1, STEPS + 1)), f"the steps are {steps}")
    files = [read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet") for step in steps]
    groups = Counter(int(uid) for rows in files for uid, _ in {(row["uid"], row["group"]) for row in rows})
    wrong = {number: groups[number] for number in range(max(groups) + 1) if groups[number] != 1}
    require(not wrong, f"draws and how often they were trained or rejected: {wrong}")


def has_metrics(run: Path) -> bool:
    return lines(run) > 0 and bool(metrics(run))


def lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  called a hundred times a second
    except OSError:
        return []


KIND = Kind("kills", 60, draw)
