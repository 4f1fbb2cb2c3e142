"""The folder of a run: checks before a start, locks, and errors."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match="No space left on device") as caught:
        RunDir(tmp_path).check_writable(resuming=False)
    assert caught.value.key == "hydra.run.dir"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_another_run_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="holds a run already; continue it with resume="):
        RunDir(tmp_path).check_writable(resuming=False)
    RunDir(tmp_path).check_writable(resuming=True)


def test_a_resume_removes_the_leftovers_of_a_killed_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for folder in (run.path, run.checkpoints, run.path / "rollouts"):
        folder.mkdir(exist_ok=True)
        (folder / ".tmp-half-77").touch()
    run.check_writable(resuming=True)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_the_folder_of_a_run_that_never_began_is_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    (run.path / ".hydra").mkdir(parents=True)
    run.log.touch()
    run.remove_unstarted()
    assert not run.path.exists()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.locked():
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        stays = context.Process(target=lambda: (begun.set(), time.sleep(600)))
        stays.start()
        assert begun.wait(60)
        assert run.is_running()
    try:
        assert stays.is_alive()
        assert not run.is_running()
    finally:
        stays.kill()
        stays.join()


@pytest.mark.parametrize(
    ("code", "inside", "said"),
    [
        (errno.ENOSPC, True, r"^no space left on the disk while writing .*metrics\.jsonl; free some, then resume="),
        (errno.EACCES, False, r"^/etc/shadow: Permission denied; fix that, then resume="),
        (errno.ENOENT, True, r"metrics\.jsonl: No such file or directory; fix that, "),
    ],
)
def test_an_os_error_during_a_run_has_a_remedy(tmp_path: Path, code: int, inside: bool, said: str) -> None:
    RunDir(tmp_path).config.touch()
    where = tmp_path / "metrics.jsonl" if inside else Path("/etc/shadow")
    error = RunDir(tmp_path).run_error(OSError(code, os.strerror(code), str(where)))
    assert error.exit_code == 1
    with pytest.raises(type(error), match=said):
        raise error


@pytest.mark.parametrize(("problem", "goes_on"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: int, goes_on: bool
) -> None:
    def flock(*_: object) -> None:
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(fcntl, "flock", flock)
    with nullcontext() if goes_on else pytest.raises(OSError, match=os.strerror(problem)), RunDir(tmp_path).locked():
        assert "a second process is not kept out" in caplog.text


@pytest.mark.slow
def test_a_resume_waits_for_trainer_processes_that_outlive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    monkeypatch.setattr("grpocli.runs.run_dir.WORKERS_WITHIN", 1.0)
    still = pytest.raises(ConfigError, match="trainer processes of an earlier start still run in it")
    with run.worker_lock(), run.worker_lock(), still, run.locked():
        pass
    monkeypatch.setattr("grpocli.runs.run_dir.WORKERS_WITHIN", 30.0)
    left = ExitStack()
    left.enter_context(run.worker_lock())
    ended = threading.Event()
    left.callback(ended.set)  # callbacks run in reverse order
    threading.Timer(0.5, left.close).start()
    with run.locked(), run.worker_lock():
        assert ended.is_set()
