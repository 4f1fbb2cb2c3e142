"""The processes of a server end with it, and the next start removes its leftovers; a stand-in replaces vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli.family import wait_gone
from cli.running import until

from grpocli.processes.reaper import TRACKER, descendants
from grpocli.rollout.vllm import server_files as folders
from grpocli.rollout.vllm.api_server import PRIVATE_FOLDER_VARIABLE
from grpocli.rollout.vllm.server_files import private_folder, shared_memory_name, sweep

pytestmark = pytest.mark.processes

SERVER = """
import sys
import engine
if __name__ == "__main__":
    engine.start(sys.argv[1], "worker")
"""
ENGINE = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory


def start(method, *below):
    made = multiprocessing.get_context(method)
    kept = SharedMemory(create=True, size=4096), made.Semaphore()
    if below:
        made.Process(target=start, args=(method, *below[1:])).start()
    open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
    time.sleep(300)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_process_outlives_a_server_that_is_killed(method: str, tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):  # shadow the real vLLM
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    (tmp_path / "engine.py").write_text(ENGINE)
    pids = tmp_path / "pids"
    pids.touch()
    with private_folder() as own:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "PIDS": str(pids), PRIVATE_FOLDER_VARIABLE: str(own.path)}
        server = subprocess.Popen([sys.executable, "-P", "-m", "grpocli.rollout.vllm.api_server", method], env=env)
        try:
            until(lambda: pids.read_text().count("\n") == 2 or server.poll() is not None, 60)
            family = [int(pid) for pid in pids.read_text().split()]
            trackers = [pid for pid in descendants() if TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()]
            for pid in trackers:  # `pkill -f` kills them too if the environment's folder matches
                os.kill(pid, signal.SIGKILL)
        finally:
            server.kill()
            server.wait(10)
        left = wait_gone(family, 5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert (len(family), left) == (2, [])
        name = shared_memory_name(own.path)
        assert len(list(folders.SHM.glob(f"{name}_*"))) == 2
    assert [path for path in folders.SHM.iterdir() if name in path.name] == []


OWNS = """
import time
from grpocli.processes.guard import guarded
from grpocli.rollout.vllm.server_files import private_folder
with private_folder() as folder, guarded(["sleep", "300"], name="test", hold=[folder.lock]) as process:
    print(folder.path, process.pid, flush=True)
    time.sleep(300)
"""


def test_a_folder_is_removed_when_owner_and_guard_are_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process that creates one removes it, unless its lock is held or an older version created it."""
    older = tmp_path / f"{folders.FOLDER}older"
    older.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", OWNS], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path, guard = owner.stdout.readline().split()
        sweep()
        assert Path(path).is_dir()
        os.kill(int(guard), signal.SIGSTOP)  # otherwise it would remove the folder itself
        owner.kill()
    sweep()
    assert Path(path).is_dir()
    os.kill(int(guard), signal.SIGKILL)
    assert wait_gone([int(guard)], 5) == []
    with private_folder() as another:
        assert another.path.is_dir()
        assert not Path(path).exists()
    assert older.is_dir()
    assert not another.path.exists()
