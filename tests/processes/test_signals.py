"""A signal before the first step ends the run at once; a signal during a step lets the step finish."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.running import SMALL, finish, start

from grpocli import cli
from grpocli.launch.run import run_errors
from grpocli.processes.signals import CHECK_SECONDS, STOPPING, StopSignal, stop_signal
from grpocli.runs.run_dir import RunDir


def test_a_second_interrupt_prints_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: list[str]) -> int:
        run = RunDir(tmp_path)
        with run_errors(run, new=True):
            run.config.touch()
            run.metrics.touch()
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["train"])
    said = f"grpocli: error: interrupted; resume={tmp_path} continues from the last checkpoint\n"
    assert capsys.readouterr().err == said


def test_one_ctrl_c_waits_for_the_step_and_a_second_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with stop_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        assert "SIGINT: stopping after this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.processes
def test_a_segmentation_fault_names_the_calling_function() -> None:
    source = "from grpocli.processes.signals import enable_crash_tracebacks\nenable_crash_tracebacks()\nimport ctypes\n"
    source += "def my_reward():\n    ctypes.string_at(0)\nmy_reward()"
    crashed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in crashed.stderr
    assert "in my_reward" in crashed.stderr


def test_before_the_first_step_a_signal_interrupts() -> None:
    with stop_signal() as stop:
        with pytest.raises(KeyboardInterrupt), stop.immediately():
            os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.immediate


@pytest.mark.survival
@pytest.mark.processes
def test_a_run_that_waits_for_its_server_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address accepts connections and never answers."""
    monkeypatch.setenv("VLLM_API_KEY", "key")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run = start("train", *SMALL, "engine=vllm", f"engine.base_url={url}", f"hydra.run.dir={tmp_path}/run")
        silent.settimeout(120)
        connection, _ = silent.accept()
        run.send_signal(signal.SIGTERM)
        code, out = finish(run)
        connection.close()
    assert code == 1, out  # an error about the server has code 2
    assert "interrupted" in out
    assert not (tmp_path / "run").exists(), "the run had not begun"


def test_the_stop_file_is_not_checked_at_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []

    def exists(path: Path) -> bool:
        looks.append(path)
        return len(looks) == 3

    monkeypatch.setattr(Path, "exists", exists)
    stop, times = StopSignal(file=tmp_path / "stop"), [k * CHECK_SECONDS / 10 for k in range(100)]
    asked = [stop.requested_cached(lambda now=now: now) for now in times]  # type: ignore[misc]
    assert len(looks) == 3
    assert asked == sorted(asked), "it stays true"
    assert asked[-1]
    assert StopSignal(received="SIGTERM").requested_cached()


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_each_signal_stops_the_run_unless_it_was_ignored_at_the_start(number: signal.Signals) -> None:
    with stop_signal() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number.name
    signal.signal(number, signal.SIG_IGN)  # as nohup and a shell's `&` leave it
    with stop_signal() as stop:
        os.kill(os.getpid(), number)
        assert stop.received is None


def test_repeated_signals_do_not_interrupt_the_end_of_a_stopped_run() -> None:
    with stop_signal() as stop:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.received == "SIGTERM"


def test_no_signal_changes_the_code_of_a_command_that_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    def report(text: str, code: int, *, traced: bool = False) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        return code

    monkeypatch.setattr(cli, "run", interrupted)
    monkeypatch.setattr(cli, "_report", report)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 1


ENDS = """
import os, signal, sys, threading, time
from grpocli import cli
def ending(args):
    threading.Thread(target=lambda: time.sleep(0.5)).start()  # the interpreter waits for it
    os.kill(os.getpid(), signal.SIGTERM)
cli.run = ending
import atexit
atexit.register(lambda: [os.kill(os.getpid(), getattr(signal, name)) for name in sys.argv[1:]])
cli.main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("late", [["SIGTERM", "SIGHUP"], ["SIGINT"]])
def test_signals_during_the_exit_keep_its_code_and_print_no_traceback(late: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, *late], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "grpocli: error: interrupted\n")
