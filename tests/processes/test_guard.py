"""Processes of a guarded command end with the parent, however it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from cli.family import wait_gone
from cli.running import until, wait_for

from grpocli.processes.guard import alive, guarded

pytestmark = pytest.mark.processes

# A command that starts a child in another session, prints both pids and waits.
FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
if "brief" in sys.argv: sys.exit(7)
time.sleep(300)
"""


def family(folder: Path, *how: str) -> list[str]:
    return [sys.executable, "-c", FAMILY, str(folder / "pids"), *how]


def pids(folder: Path) -> list[int]:
    wait_for(folder / "pids", 20)
    return [int(word) for word in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands(code: str, expected: int) -> None:
    with guarded([sys.executable, "-c", code], name="test") as process:
        assert process.wait(20) == expected
        assert process.poll() == expected


def test_a_command_is_guarded_in_a_process_with_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(Path(os.devnull).open())
        with guarded([sys.executable, "-c", "import time; time.sleep(0.5)"], name="test") as process:
            assert process.wait(20) == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_environment_is_passed_on_and_the_log_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    code = "import os, sys; print(os.environ['A']); print('err', file=sys.stderr)"
    for word in ("one", "two"):
        with guarded([sys.executable, "-c", code], name="test", env={"A": word}, log=log) as process:
            assert process.wait(20) == 0
    text = log.read_text()
    assert text.count("err") == 2
    assert text.index("one") < text.index("two")


def test_leaving_the_block_ends_the_process_tree_and_deletes_the_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "weights", tmp_path / "socket"
    folder.mkdir()
    (folder / "a").write_text("x")
    file.write_text("x")
    (tmp_path / "piece_1").touch()
    unwanted = [folder, file, tmp_path / "missing", f"{tmp_path}/piece_*"]
    with guarded(family(tmp_path), name="test", remove=unwanted) as process:
        started = pids(tmp_path)
        assert all(alive(pid) for pid in started)
        assert process.poll() is None
    assert wait_gone(started, 5) == []
    assert not folder.exists()
    assert not file.exists()
    assert not (tmp_path / "piece_1").exists()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with guarded(family(tmp_path, "stubborn"), name="test") as process:
        started = pids(tmp_path)
        assert process.stop(grace=0.5) == 128 + signal.SIGKILL
        assert process.stop() == 128 + signal.SIGKILL
    assert wait_gone(started, 5) == []


def test_processes_that_the_command_left_behind_are_ended(tmp_path: Path) -> None:
    with guarded(family(tmp_path, "brief"), name="test") as process:
        started = pids(tmp_path)
        assert process.wait(20) == 7
    assert wait_gone(started, 5) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_ends_the_command(tmp_path: Path, how: signal.Signals) -> None:
    """The parent cannot clean up; a forked child of it still holds the pipe, as a worker pool would."""
    folder = tmp_path / "weights"
    folder.mkdir()
    script = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from grpocli.processes.guard import guarded
        with guarded({family(tmp_path)!r}, name="test", grace=1, remove=[Path({str(folder)!r})]):
            if os.fork() == 0:
                time.sleep(15)
                os._exit(0)
            time.sleep(300)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script])
    started = pids(tmp_path)
    parent.send_signal(how)
    parent.wait(20)
    assert wait_gone(started, 10) == []
    until(lambda: not folder.exists(), 5)


def test_a_killed_guard_ends_the_command(tmp_path: Path) -> None:
    with guarded(family(tmp_path), name="test") as process:
        command = pids(tmp_path)[0]
        os.kill(process.pid, signal.SIGKILL)
        assert wait_gone([command], 5) == []
    os.kill(pids(tmp_path)[1], signal.SIGKILL)


def test_a_finished_thread_does_not_end_the_command(tmp_path: Path) -> None:
    """The kernel reports the end of the thread that started a process as the death of its parent."""
    with contextlib.ExitStack() as stack:
        context = guarded(family(tmp_path), name="test")
        thread = threading.Thread(target=lambda: stack.enter_context(context))
        thread.start()
        thread.join()
        started = pids(tmp_path)
        time.sleep(0.3)
        assert all(alive(pid) for pid in started)
    assert wait_gone(started, 5) == []


def test_a_missing_program_is_reported() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/program"), guarded(["/no/such/program"], name="test"):
        pass


HOLDS = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=8)
print(memory.name, flush=True)
time.sleep(60)
"""


def test_shared_memory_of_a_killed_process_is_unlinked(tmp_path: Path) -> None:
    """Python's resource tracker does that if it gets the time."""
    log = tmp_path / "log"
    with guarded([sys.executable, "-c", HOLDS], name="holds", log=log, grace=0.2) as process:
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        memory = Path("/dev/shm", log.read_text().splitlines()[0])
        assert memory.exists()
        process.stop(0.2)
    assert not memory.exists()
