"""Files and folders are whole or absent."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from grpocli.errors import ConfigError, RunError
from grpocli.tracking.files import atomic_folder, write_atomic
from grpocli.tracking.run_dir import RunDir


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "step_000001"
    with pytest.raises(RuntimeError), atomic_folder(path) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not path.exists()
    assert (path / "sub" / "file").read_text() == "x"


def test_a_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for content in ("one", "two"):
        with atomic_folder(path, replace=True) as folder:
            (folder / "file").write_text(content)
    assert (path / "file").read_text() == "two"
    with pytest.raises(FileExistsError), atomic_folder(path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.check_writable(resuming=False)
    run.metrics.write_text("{}")
    with pytest.raises(ConfigError, match=r"hydra.run.dir=.*: holds a run already; go on with resume="):
        run.check_writable(resuming=False)
    run.check_writable(resuming=True)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"hydra.run.dir=.*cannot be written: Not a directory"):
        RunDir(tmp_path / "file" / "run").check_writable(resuming=False)


def test_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a little file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            RunDir(tmp_path / "run").check_writable(resuming=False)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_up_later(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    trouble = RunDir(tmp_path).trouble(error)
    assert isinstance(trouble, RunError)
    assert f"no space left on the disk while writing {tmp_path / 'x'}" in str(trouble)
    assert f"resume={tmp_path}" in str(trouble)


def test_a_run_that_never_began_leaves_no_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / ".hydra").mkdir(parents=True)
    run.forget()
    assert not run.path.exists()
    run.path.mkdir()
    run.config.touch()
    run.forget()
    assert run.path.exists()
