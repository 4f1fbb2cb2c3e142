"""The root cause is named when several processes fail."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed

from grpocli.errors import ConfigError, RunError, Stopped
from grpocli.processes.reports import (
    DONE,
    ExitReport,
    Heartbeat,
    HeartbeatWriter,
    exit_reports,
    heartbeats,
    is_lost_peer,
    report_failure,
    root_cause,
)

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38475"
TIMEOUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 20000ms for recv operation"


def heartbeat(rank: int, stage: str, ago: float, step: int = 3) -> Heartbeat:
    return Heartbeat(rank, 100 + rank, os.uname().nodename, stage, step, time.time() - ago)


LOST = ExitReport(1, 0, 1, GLOO, lost_peer=True)
LATE = ExitReport(1, 0, 1, TIMEOUT, lost_peer=True)
NO_ARRIVAL = "did not arrive within hardware.timeout=60 s"
BROKEN = [LOST, ExitReport(2, 1, 2, "reward.python: broken"), ExitReport(3, 2, 1, "later")]
KILLED = "process 1 (pid 101) ended without an error message at 'train' of step 3"
HANGING = [heartbeat(1, "reward", 61), heartbeat(2, "gather", 60)]
BEHIND = [heartbeat(1, "gather", 70, step=4), heartbeat(2, "train", 65, step=3)]
CAUSES: dict[str, tuple[list[ExitReport], list[Heartbeat], list[Heartbeat], list[str]]] = {
    "an own error": (BROKEN, [], [], ["reward.python: broken"]),
    "a killed process": ([LOST], [heartbeat(1, "train", 2)], [], [KILLED]),
    "a hanging process": ([LATE], [], HANGING, ["process 1 (pid 101)", NO_ARRIVAL, "'reward' of step 3 for"]),
    "an aborted peer": ([], [heartbeat(0, "gather", 75)], [heartbeat(1, "reward", 80)], ["process 1", NO_ARRIVAL]),
    "a process a step behind": ([LATE], [], BEHIND, ["process 2", NO_ARRIVAL]),
    "lost connections alone": ([LOST], [], [], [GLOO]),
    "a stop": ([ExitReport(1, 0, 3, "SIGTERM after step 3")], [], [], ["SIGTERM"]),
}
KINDS: dict[str, type[Exception]] = {"an own error": ConfigError, "a stop": Stopped}


@pytest.mark.parametrize("what", CAUSES)
def test_the_cause_is_named_rather_than_its_consequences(what: str) -> None:
    said, dead, living, parts = CAUSES[what]
    error = root_cause(said, dead, living, 60)
    assert isinstance(error, KINDS.get(what, RunError))
    assert all(part in str(error) for part in parts), error


def test_without_failures_there_is_no_cause() -> None:
    assert root_cause([], [], [heartbeat(0, "train", 5), heartbeat(1, DONE, 1)], 60) is None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for send operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (torch.distributed.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer, says my reward"), False),
        (RunError("the reward server closed its connection"), False),
    ],
)
def test_which_errors_mean_a_lost_peer(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def test_heartbeats_and_reports_pass_through_files(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path, 1)
    writer.step = 4
    writer.enter("rollout")
    HeartbeatWriter(tmp_path, 0).enter(DONE)
    assert [(p.rank, p.stage, p.step, p.pid, p.here) for p in heartbeats(tmp_path)] == [
        (0, DONE, 0, os.getpid(), True),
        (1, "rollout", 4, os.getpid(), True),
    ]
    report_failure(tmp_path, 1, RunError("first"))
    report_failure(tmp_path, 0, RunError("then"), lost_peer=True)
    report_failure(tmp_path, 1, RunError("a consequence"))
    assert [(f.rank, f.message, f.lost_peer) for f in exit_reports(tmp_path)] == [
        (1, "first", False),
        (0, "then", True),
    ]


def test_another_thread_does_not_hide_the_main_one(tmp_path: Path) -> None:
    """With rollout.max_staleness other threads continue for a while when the update hangs."""
    writer = HeartbeatWriter(tmp_path, 0)
    writer.enter("train")
    sampler = threading.Thread(target=writer.enter, args=("reward",))
    sampler.start()
    sampler.join()
    assert [heartbeat.stage for heartbeat in heartbeats(tmp_path)] == ["train beside reward"]
    writer.enter(DONE)
    assert [heartbeat.stage for heartbeat in heartbeats(tmp_path)] == [DONE]


def test_files_of_an_earlier_session_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a connection does not know that the job was requeued without it."""
    for name, value in {"JOB_ID": "7", "PROCID": "0", "NTASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    report_failure(tmp_path, 1, RunError("cut off"))
    HeartbeatWriter(tmp_path, 1).enter("rollout")
    assert len(heartbeats(tmp_path)) == len(exit_reports(tmp_path)) == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert heartbeats(tmp_path) == exit_reports(tmp_path) == []
    report_failure(tmp_path, 1, RunError("current"))
    HeartbeatWriter(tmp_path, 1).enter("train")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    report_failure(tmp_path, 1, RunError("cut off, later"))
    HeartbeatWriter(tmp_path, 1).enter("rollout")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [f.message for f in exit_reports(tmp_path)] == ["current"]
    assert [heartbeat.stage for heartbeat in heartbeats(tmp_path)] == ["train"]
