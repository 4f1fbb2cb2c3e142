"""Files are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpocli.files import (
    STALE_TRIES,
    QuietFileHandler,
    atomic_folder,
    clear_leftovers,
    full_disk_as_oserror,
    read_shared,
    write_atomic,
)


def test_a_write_replaces_the_content_or_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "newer")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.processes
def test_a_write_on_a_full_disk_leaves_nothing(full_disk: Path) -> None:
    before = set(full_disk.iterdir())
    with pytest.raises(OSError, match="No space left"):
        write_atomic(full_disk / "a.txt", "new" * 10_000)
    assert set(full_disk.iterdir()) == before


@pytest.mark.processes
@pytest.mark.parametrize("delay", [True, False])
def test_a_log_on_a_full_disk_is_silent(full_disk: Path, capsys: pytest.CaptureFixture[str], delay: bool) -> None:
    logged(QuietFileHandler(full_disk / "run.log", delay=delay), "x" * 100_000)
    assert capsys.readouterr().err == ""


def logged(handler: QuietFileHandler, text: str, *arguments: object) -> None:
    logger = logging.Logger("a run's")
    logger.addHandler(handler)
    logger.info(text, *arguments)
    handler.close()


def test_a_log_is_silent_about_files_and_not_about_wrong_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(QuietFileHandler(tmp_path / "nowhere" / "run.log", delay=True), "lost")
    logged(QuietFileHandler(tmp_path / "run.log"), "a text \ud800 of a model")
    assert (tmp_path / "run.log").read_text() == "a text \\ud800 of a model\n"
    assert capsys.readouterr().err == ""
    logged(QuietFileHandler(tmp_path / "run.log", delay=True), "a mistake in the %s of a call", "arguments", "!")
    assert "Logging error" in capsys.readouterr().err


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "step_1"
    with atomic_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("w")
        assert not target.exists()
    assert (target / "inner" / "weights").read_text() == "w"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_whose_writing_fails_is_removed(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_folder(tmp_path / "step_1") as folder:
            (folder / "half").write_text("h")
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        write()
    assert list(tmp_path.iterdir()) == []
    # the main process, which makes the folder, was killed
    with pytest.raises(RuntimeError, match="connection closed"), full_disk_as_oserror(tmp_path / "no" / "step_1"):
        raise RuntimeError("connection closed")


def test_a_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("old", "new"):
        with atomic_folder(target, replace=True) as folder:
            (folder / text).touch()
    assert [p.name for p in target.iterdir()] == ["new"]
    with pytest.raises(FileExistsError), atomic_folder(target):
        pass
    assert [p.name for p in target.iterdir()] == ["new"]


@pytest.mark.processes
def test_a_full_disk_is_reported_although_libraries_raise_other_errors(full_disk: Path) -> None:
    before = set(full_disk.iterdir())
    with pytest.raises(OSError, match="No space left") as caught, atomic_folder(full_disk / "step_1"):
        raise RuntimeError("writer failed")  # torch.save and safetensors raise their own errors
    assert caught.value.errno == errno.ENOSPC
    assert set(full_disk.iterdir()) == before


@pytest.mark.parametrize("message", ["I/O error: No space left on device (os error 28)", "Disk quota exceeded"])
def test_a_full_disk_is_recognised_in_a_librarys_message(tmp_path: Path, message: str) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), atomic_folder(tmp_path / "step_1"):
        raise RuntimeError(message)


def test_leftovers_of_a_killed_process_are_cleared_and_other_hidden_files_kept(tmp_path: Path) -> None:
    kept = {".old-foo", ".old-", ".tmp-notes", ".hidden-7", "step_000001", "my-model"}
    for name in (*kept - {"my-model"}, ".tmp-step_000002-77", ".old-step_000001-77", ".old-my-model-77"):
        (tmp_path / name).mkdir()
    for name in (".tmp-step_000002-77/half", ".tmp-metrics.jsonl-77", ".old-my-model-77/weights"):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (tmp_path / "my-model" / "weights").exists(), "restored after an interrupted swap"


def test_the_target_of_a_symbolic_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".tmp-step_000001-77", ".old-step_000002-77", "step_000002"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    clear_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    with atomic_folder(folder / "step_000002", replace=True) as made:
        (made / "weights").touch()
    assert not (folder / "step_000002").is_symlink()
    assert (tmp_path / "elsewhere").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(("stale", "read"), [(3, True), (STALE_TRIES + 1, False)])
def test_a_file_that_another_machine_replaces_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: int, read: bool
) -> None:
    (tmp_path / "place").write_text("here")
    read_text, times = Path.read_text, []

    def over_nfs(path: Path) -> str:
        times.append(path)
        if len(times) <= stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", over_nfs)
    if read:
        assert read_shared(tmp_path / "place") == "here"
    else:
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            read_shared(tmp_path / "place")


def test_two_machines_with_one_process_number_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has written its temporary file and not renamed it yet when the other writes."""
    sync, wrote = os.fsync, []

    def meanwhile(handle: int) -> None:
        sync(handle)
        if not wrote:
            wrote.append(True)
            write_atomic(tmp_path / "file", "theirs")

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomic(tmp_path / "file", "ours")
    assert (tmp_path / "file").read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
