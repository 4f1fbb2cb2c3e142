"""State that a reward changes in the trainer process is restored, and its random numbers are reproducible."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.scorer import call


def reward(does: Callable[[], float]) -> BaseReward:
    class Mine(BaseReward):
        def __call__(self, samples: list[Sample]) -> list[Score]:  # type: ignore[override]
            return [does() for _ in samples]

    return Mine()


def drawn() -> float:
    return random.random() + float(np.random.random()) + torch.rand(()).item()


def settings() -> tuple[bool, torch.dtype, int]:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ],
)
def test_settings_of_torch_are_restored(change: Callable[[], None], sample, caplog: pytest.LogCaptureFixture) -> None:
    def disturb() -> float:
        change()
        return 1.0

    before = settings()
    with caplog.at_level(logging.WARNING):
        assert call(reward(disturb), [sample("a")]) == [1.0]
    assert settings() == before
    assert "Mine changed torch's" in caplog.text
    assert "for the whole process, which was undone" in caplog.text


def test_settings_are_restored_after_an_error(sample) -> None:
    def disturb() -> float:
        torch.set_grad_enabled(False)
        random.seed(1)
        raise KeyError("oops")

    state = random.getstate()
    assert isinstance(call(reward(disturb), [sample("a")])[0], Failure)
    assert torch.is_grad_enabled()
    assert random.getstate() == state


def test_random_numbers_depend_on_the_samples_and_do_not_affect_others(sample) -> None:
    def seeded() -> float:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        return 1.0

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = drawn()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    call(reward(seeded), [sample("a")])
    assert drawn() == expected
    first, again, other = (call(reward(drawn), [sample("a", tokens=n)])[0] for n in (1, 1, 2))
    assert first == again != other


def test_os_exit_in_a_reward_fails_its_samples(sample) -> None:
    leave = os._exit
    (failure,) = call(reward(lambda: os._exit(3)), [sample("a")])
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(
        "it raised SystemExit: os._exit(3), which would have ended the run without an error ("
    )
    assert "test_isolate_state.py" in failure.reason
    assert os._exit is leave


def test_exec_in_a_reward_fails_its_samples(sample) -> None:
    (failure,) = call(reward(lambda: os.execlp("true", "true")), [sample("a")])  # type: ignore[arg-type,return-value]
    assert isinstance(failure, Failure)
    assert "which would have ended the run without an error" in failure.reason


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_a_reward_forks_may_call_os_exit(sample) -> None:
    def forks() -> float:
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(4,))
        child.start()
        child.join(20)
        return float(child.exitcode or 0)

    assert call(reward(forks), [sample("a")]) == [4.0]


def test_alarms_handlers_and_the_working_directory_are_restored(
    sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def disturb() -> float:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(600)
        os.chdir(tmp_path)
        return 1.0

    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM), Path.cwd()
    try:
        with caplog.at_level(logging.WARNING):
            assert call(reward(disturb), [sample("a")]) == [1.0]
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM), Path.cwd()) == before
        assert "Mine changed the working directory, alarms, handlers of signals" in caplog.text
    finally:
        signal.alarm(0)
        os.chdir(before[2])


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[IO[str]]:
    """A lock of a run."""
    with (tmp_path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def held(tmp_path: Path) -> bool:
    with (tmp_path / ".lock").open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_closed_descriptors_are_restored(sample, lock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def disturb() -> float:
        for file in (1, 2, lock.fileno()):
            os.close(file)
        os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)  # gets the number of the first closed descriptor
        return 1.0

    before = [os.fstat(file).st_ino for file in (0, 1, 2, lock.fileno())]
    with caplog.at_level(logging.WARNING):
        assert call(reward(disturb), [sample("a")]) == [1.0]
    assert [os.fstat(file).st_ino for file in (0, 1, 2, lock.fileno())] == before
    assert held(tmp_path)
    assert f"Mine closed or replaced descriptors [1, 2, {lock.fileno()}], which was undone" in caplog.text


BREAKS = """
import os, sys
from grpocli.rewards.scorer import call
from grpocli.rewards.reward import BaseReward, Sample
from grpocli.rewards.isolate_state import ProcessDamaged

class Mine(BaseReward):
    def __call__(self, samples):
        if self.does is os.closerange:
            return [self.does(3, 4096)]
        child = os.fork()
        if child == 0:
            return [self.does()]
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

lock = open(sys.argv[1], "w")
for does in (lambda: 1, lambda: 1 / 0, lambda: sys.exit(3), os.closerange):
    Mine.does = staticmethod(does)
    try:
        print(call(Mine(), [Sample("", "", "", {}, [], 1, False)]), flush=True)
    except ProcessDamaged as damage:
        print(damage, lock.fileno())
"""


@pytest.mark.processes
def test_a_forked_process_does_not_train_and_lost_descriptors_end_the_run(tmp_path: Path) -> None:
    run = [sys.executable, "-c", BREAKS, str(tmp_path / ".lock")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    returned, failed, exited, lost = done.stdout.splitlines()
    assert (returned, failed, exited) == ("[70.0]", "[70.0]", "[3.0]")
    file = lost.split()[-1]
    assert lost == f"Mine closed files of the run (descriptors {file}) {file}"
    assert done.stderr == 2 * "grpocli: Mine forked a process that returned from it; grpocli ended that process\n"


LEAVING = """import atexit, sys, threading, time
from concurrent import futures
from grpocli.processes import threads as leaving
leaving.GRACE, leaving.EXIT_GRACE = 0.2, 0.2
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='mine').start()", "mine"),
        ("futures.ThreadPoolExecutor(1, thread_name_prefix='mine').submit(time.sleep, 600)", "mine_0"),
    ],
)
def test_a_thread_that_does_not_end_is_abandoned(start: str, name: str) -> None:
    code = f"{LEAVING}{start}\nleaving.end_process(4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr.startswith(f"grpocli: a thread ({name}) that your code started in this process did not end")


@pytest.mark.processes
def test_an_exit_handler_that_does_not_end_is_abandoned() -> None:
    code = f"{LEAVING}atexit.register(time.sleep, 600)\nleaving.end_process(4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr.startswith("grpocli: an exit handler did not end within 0.4 s, and was left behind; look for")


@pytest.mark.processes
def test_objects_are_not_freed_one_by_one_at_the_end() -> None:
    """Which takes seconds where torch is loaded."""
    code = f"{LEAVING}class Model:\n    def __del__(self): print('freed')\nmodel = Model()\nleaving.end_process(4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")


@pytest.mark.processes
def test_exit_handlers_run_to_their_end_if_all_threads_have_ended() -> None:
    code = (
        f"{LEAVING}leaving.EXIT_GRACE = 600\natexit.register(lambda: (time.sleep(0.6), print('handled')))\n"
        "threading.Thread(target=time.sleep, args=(0.05,)).start()\nleaving.end_process(4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (4, "handled\n", "")
