"""A run restarts its own servers and waits for external ones; with processes in place of servers."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
from cli.running import until

from grpocli.errors import ConfigError, EngineError, EngineGone
from grpocli.processes.guard import Guarded, guarded
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import config as vllm_config
from grpocli.rollout.vllm import supervisor
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.server_files import Endpoint, lost_file, run_file, run_files
from grpocli.rollout.vllm.supervisor import SupervisedServer, reconnect

NAP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Starts:
    """Starts a process in place of a server; the starts numbered in `broken` fail."""

    def __init__(self, *broken: int) -> None:
        self.broken, self.tried = broken, 0
        self.running: list[Guarded] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[tuple[Endpoint, Guarded]]:
        restarts, self.tried = self.tried, self.tried + 1
        if restarts in self.broken:
            raise EngineError(f"start {restarts} failed")
        with guarded(NAP, name="nap", grace=0.2) as process:
            self.running.append(process)
            yield Endpoint(f"http://127.0.0.1:{restarts}", "key", "/nowhere"), process


@contextlib.contextmanager
def watched(run_dir: Path, starts: Starts, max_restarts: int) -> Iterator[None]:
    over = threading.Event()
    one = SupervisedServer(0, run_dir, starts, over, max_restarts)
    one.start()
    one.supervise()
    try:
        yield
    finally:
        over.set()
        one.stop()
    assert all(process.poll() is not None for process in starts.running)
    assert run_files(run_dir) == []


def job_in(run_dir: Path) -> EngineJob:
    return EngineJob("/model", "float32", 64, run_dir, seed=0)


class Clock:
    """Replaces `time`: sleeping advances the clock at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.asleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(supervisor, "time", made)
    return made


def told(run_dir: Path) -> Endpoint:
    return Endpoint.load(run_file(run_dir))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "generations", "said"),
    [((2,), (0, 1, 3), "vLLM server 0 ended with exit code"), ((1, 3), (0, 2), "start 3 failed")],
)
def test_a_server_that_exits_is_restarted_until_restarts_are_used_up(
    tmp_path: Path, broken: tuple[int, ...], generations: tuple[int, ...], said: str
) -> None:
    """A failed start counts."""
    starts = Starts(*broken)
    with watched(tmp_path, starts, max_restarts=3):
        for generation in generations:
            until(lambda generation=generation: told(tmp_path).generation == generation)  # type: ignore[misc]
            assert told(tmp_path).url.endswith(f":{generation}")
            assert told(tmp_path).gone is None
            starts.running[-1].terminate()
        until(lambda: told(tmp_path).gone is not None)
        assert said in str(told(tmp_path).gone)
        assert "started again 3 times (engine.max_restarts=3)" in str(told(tmp_path).gone)
    assert len(starts.running) == len(generations)


@pytest.mark.processes
def test_a_server_that_a_trainer_reports_is_replaced_once(tmp_path: Path) -> None:
    """It may hang and never exit; a second report of the same server must not cost another restart."""
    starts = Starts()
    with watched(tmp_path, starts, max_restarts=5):
        before = told(tmp_path)
        for _ in range(2):
            (found,) = reconnect(Vllm(), job_in(tmp_path), lambda: False, {0: (before, "it hangs")})
            assert found.generation == 1
            assert found.url != before.url
        assert len(starts.running) == 2
        assert starts.running[0].poll() is not None
        assert starts.running[1].poll() is None


def test_all_lost_servers_share_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Other processes wait in a collective call, so every loss is reported before the first wait."""
    monkeypatch.setattr(vllm_config, "STOPPING", 0)
    lost = {index: (Endpoint("http://x", "key", "/nowhere"), "it hangs") for index in range(3)}
    for index, (endpoint, _) in lost.items():
        endpoint.save(run_file(tmp_path, index))
    dataclasses.replace(lost[0][0], generation=1).save(run_file(tmp_path, 0))
    with pytest.raises(EngineGone, match="no server came in its place within 1 s"):
        reconnect(Vllm(start_timeout=1, max_restarts=1), job_in(tmp_path), lambda: False, lost)
    assert 1 <= clock.now < 1.9
    assert all(lost_file(tmp_path, index).exists() for index in range(3))


def test_an_external_server_that_comes_back_is_found(tmp_path: Path, monkeypatch, clock: Clock) -> None:
    """It may come back with another key; other addresses are not asked."""
    options = Vllm(base_url=["http://a:1", "http://b:1"], api_key_file=["/a", "/b"], reconnect_timeout=1)
    before, after = Endpoint("http://b:1", "old", "/x"), Endpoint("http://b:1", "new", "/y")
    comes = 0.5

    def look(asked: Vllm, url: str, job: EngineJob) -> Endpoint:
        assert url == "http://b:1"
        if clock.now < comes:
            raise ConfigError("no vLLM server answers there")
        return after

    monkeypatch.setattr(supervisor, "external_server", look)
    assert reconnect(options, job_in(tmp_path), lambda: False, {1: (before, "it is gone")}) == [after]
    clock.now, comes = 0.0, 60.0
    with pytest.raises(EngineGone, match=r"^it is gone; no server came in its place .*no vLLM server answers"):
        reconnect(options, job_in(tmp_path), lambda: False, {1: (before, "it is gone")})
    assert 1 <= clock.now < 3


@pytest.mark.processes
def test_a_failed_start_cancels_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serving(spec: object, options: object, log: Path, over: threading.Event, **_: object) -> NoReturn:
        if log.stem == "vllm_1":
            raise ConfigError("the second")
        assert over.wait(60), "the other starts were not cancelled"
        raise EngineError("not wanted any more")

    monkeypatch.setattr(supervisor, "serving", serving)
    with pytest.raises(ConfigError, match="the second"), supervisor.launch(Vllm(replicas=3), job_in(tmp_path)):
        pass
    assert run_files(tmp_path) == []


KEEPS = """
import sys, time
from grpocli.rollout.vllm import supervisor as launch
launch.OUTLIVE = 1.0
with launch._weights_folder() as folder:
    (folder / "weights").write_bytes(b"w")
    print(folder, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["it ends", "it is killed"])
def test_the_folder_for_weights_is_removed_with_the_run(seconds: float) -> None:
    with subprocess.Popen([sys.executable, "-c", KEEPS, str(seconds)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if seconds:
            assert folder.is_dir()
            process.send_signal(signal.SIGKILL)
        process.wait(20)
    until(lambda: not folder.exists(), 5)


def test_files_of_a_killed_run_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Endpoint("http://127.0.0.1:1", "old", "/x"), Endpoint("http://127.0.0.1:2", "new", "/x")
    for index in range(3):
        old.save(run_file(tmp_path, index))
    monkeypatch.setattr(supervisor, "external_server", lambda options, url, job: dataclasses.replace(new, api_key=url))
    with supervisor.launch(Vllm(base_url=["http://127.0.0.1:2", "http://127.0.0.1:3"]), job_in(tmp_path)):
        assert [Endpoint.load(path).api_key[-1] for path in run_files(tmp_path)] == ["2", "3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", [None, "http://a:1"])
def test_a_run_that_is_asked_to_stop_does_not_wait_for_servers(
    tmp_path: Path, url: str | None, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(supervisor, "external_server", Mock(side_effect=ConfigError("no vLLM server answers there")))
    before = Endpoint("http://a:1", "key", "/x")
    before.save(run_file(tmp_path))
    asked = threading.Event()
    clock.asleep = asked.set  # during the first sleep
    with pytest.raises(EngineGone, match=r"^it is gone; the run was asked to stop"):
        reconnect(Vllm(base_url=url), job_in(tmp_path), asked.is_set, {0: (before, "it is gone")})
    assert clock.now == supervisor.POLL
