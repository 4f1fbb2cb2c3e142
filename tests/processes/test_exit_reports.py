"""Of several processes that fail, the one that began it is named."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed

from grpocli.errors import ConfigError, RunError, Stopped
from grpocli.processes.exit_reports import Failure, failures, is_lost_peer, report_failure, verdict
from grpocli.processes.heartbeat import DONE, Board, Place, places

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38475"
TIMEOUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 20000ms for recv operation"


def place(rank: int, stage: str, ago: float, step: int = 3) -> Place:
    return Place(rank, 100 + rank, os.uname().nodename, stage, step, time.time() - ago)


def test_nothing_is_wrong() -> None:
    assert verdict([], [], [place(0, "train", 5), place(1, DONE, 1)], 60) is None


def test_an_error_of_its_own_counts_before_lost_connections() -> None:
    said = [Failure(1, 0, 1, GLOO, lost=True), Failure(2, 1, 2, "reward.python: broken"), Failure(3, 2, 1, "later")]
    error = verdict(said, [], [], 60)
    assert isinstance(error, ConfigError)
    assert str(error) == "reward.python: broken"


def test_one_that_was_killed_is_named_not_those_that_lost_it() -> None:
    error = verdict([Failure(1, 0, 1, GLOO, lost=True)], [place(1, "train", 2)], [], 60)
    assert "process 1 (pid 101) ended without a word at 'train' of step 3" in str(error)


def test_one_that_hangs_is_named_with_its_stage() -> None:
    error = verdict([Failure(1, 0, 1, TIMEOUT, lost=True)], [], [place(1, "reward", 61), place(2, "gather", 60)], 60)
    assert "process 1 (pid 101) did not come within hardware.timeout=60 s" in str(error)
    assert "'reward' of step 3 for 61 s" in str(error)


def test_nccl_kills_who_has_waited_too_long() -> None:
    """Its watchdog aborts the process: no word, and not the one to blame."""
    error = verdict([], [place(0, "gather", 75)], [place(1, "reward", 80)], 60)
    assert "process 1" in str(error)
    assert "did not come within hardware.timeout=60 s" in str(error)


def test_a_process_a_step_behind_is_the_one_that_hangs() -> None:
    living = [place(1, "gather", 70, step=4), place(2, "train", 65, step=3)]
    assert "process 2" in str(verdict([Failure(1, 0, 1, TIMEOUT, lost=True)], [], living, 60))


def test_lost_connections_alone_are_told_as_they_are() -> None:
    assert str(verdict([Failure(1, 0, 1, GLOO, lost=True)], [], [], 60)) == GLOO


def test_stopping_is_no_failure_of_anyone() -> None:
    assert isinstance(verdict([Failure(1, 0, 3, "SIGTERM after step 3")], [], [], 60), Stopped)


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
def test_which_errors_blame_another_process(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def test_what_is_told_through_files(tmp_path: Path) -> None:
    board = Board(tmp_path, 1)
    board.step = 4
    board.enter("rollout")
    Board(tmp_path, 0).enter(DONE)
    assert [(p.rank, p.stage, p.step, p.pid, p.here) for p in places(tmp_path)] == [
        (0, DONE, 0, os.getpid(), True),
        (1, "rollout", 4, os.getpid(), True),
    ]
    report_failure(tmp_path, 1, RunError("first"))
    report_failure(tmp_path, 0, RunError("then"), lost=True)
    report_failure(tmp_path, 1, RunError("what came of it"))
    assert [(f.rank, f.message, f.lost) for f in failures(tmp_path)] == [(1, "first", False), (0, "then", True)]


def test_a_thread_beside_the_main_one_does_not_hide_it(tmp_path: Path) -> None:
    """rollout.max_staleness: what is sampled ahead goes on for a while where the update hangs."""
    board = Board(tmp_path, 0)
    board.enter("train")
    sampler = threading.Thread(target=board.enter, args=("reward",))
    sampler.start()
    sampler.join()
    assert [place.stage for place in places(tmp_path)] == ["train beside reward"]
    board.enter(DONE)
    assert [place.stage for place in places(tmp_path)] == [DONE]


def test_what_a_session_before_still_writes_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was cut off does not know that the job was queued again without it."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    report_failure(tmp_path, 1, RunError("cut off"))
    Board(tmp_path, 1).enter("rollout")
    assert len(places(tmp_path)) == len(failures(tmp_path)) == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert places(tmp_path) == failures(tmp_path) == []
    report_failure(tmp_path, 1, RunError("of now"))
    Board(tmp_path, 1).enter("train")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    report_failure(tmp_path, 1, RunError("cut off, and late"))
    Board(tmp_path, 1).enter("rollout")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [f.message for f in failures(tmp_path)] == ["of now"]
    assert [place.stage for place in places(tmp_path)] == ["train"]
