"""The cache of built models: a folder is complete or absent, even after a crash."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpocli import cache
from grpocli.cache import cache_dir, cached
from grpocli.errors import ConfigError, RunError

NEEDED = ("a", "b")

SLOW_BUILDER = """
import sys, time
from pathlib import Path
from grpocli.cache import cached
def make(folder):
    (folder / "a").write_text("half")
    print("half", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "b").write_text("slow")
cached("models/x", ("a", "b"), make)
"""


def builder(content: str):
    """A function that fills a folder with complete files."""

    def make(folder: Path) -> None:
        for name in NEEDED:
            (folder / name).write_text(content)

    return make


def forbidden(folder: Path) -> None:
    raise AssertionError("it was in the cache")


def slow_builder(seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SLOW_BUILDER, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def test_a_folder_is_made_once(cache_folder: Path) -> None:
    path = cached("models/x", NEEDED, builder("one"))
    assert path == cache_folder / "models" / "x"
    assert cached("models/x", NEEDED, forbidden) == path
    assert (path / "a").read_text() == "one"


@pytest.mark.processes
def test_a_half_made_folder_is_not_used(cache_folder: Path) -> None:
    process = slow_builder(60)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert not (cache_folder / "models" / "x").exists()
    path = cached("models/x", NEEDED, builder("after"))
    assert (path / "a").read_text() == "after"
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock-x", "x"]


@pytest.mark.processes
def test_two_processes_make_a_folder_once(cache_folder: Path) -> None:
    process = slow_builder(1)
    path = cached("models/x", NEEDED, forbidden)  # the second process waits and finds the folder
    assert (path / "b").read_text() == "slow"
    assert process.wait(timeout=10) == 0
    process.communicate()


def test_a_failed_build_leaves_nothing_and_a_damaged_one_is_built_again(cache_folder: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached("models/x", NEEDED, fail)
    assert [p.name for p in (cache_folder / "models").iterdir()] == [".lock-x"]
    path = cached("models/x", NEEDED, builder("one"))
    (path / "b").unlink()
    assert (cached("models/x", NEEDED, builder("two")) / "b").read_text() == "two"


def test_waiting_has_a_deadline(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "DEADLINE", 0.2)
    folder = cache_folder / "models"
    folder.mkdir(parents=True)
    with (folder / ".lock-x").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"another process that is making .*models/x"):
            cached("models/x", NEEDED, forbidden)


def test_an_unwritable_cache_gives_a_one_sentence_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")  # also works for root, who ignores permissions
    monkeypatch.setenv("GRPOCLI_CACHE", str(blocked / "cache"))
    with pytest.raises(ConfigError, match=r"GRPOCLI_CACHE=.*cannot store files"):
        cached("models/x", NEEDED, forbidden)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRPOCLI_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("GRPOCLI_CACHE")
    assert cache_dir() == Path("/shared/grpocli")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "grpocli"
