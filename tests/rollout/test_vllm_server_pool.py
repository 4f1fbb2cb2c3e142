"""Several servers: how requests are distributed, and recovery when one dies; with stand-in servers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cli.running import until
from rollout.stand_in import StandIn, choice, clients_of
from rollout.vllm_tiny import Alone, two_worlds

from grpocli.errors import EngineError, EngineGone
from grpocli.progress import Watch
from grpocli.rollout.engine import Listener
from grpocli.rollout.vllm.client import RequestRefused, ServerClient
from grpocli.rollout.vllm.engine import ServerPool, VllmEngine
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.rollout.vllm.supervisor import Lost
from grpocli.types import Completion, Request, Sampling


class Vllm(StandIn):
    """Answers each request with its own prompt, records the requests, and dies after `lives` answers."""

    def __init__(self, seconds: float = 0.0, lives: int | None = None) -> None:
        super().__init__()
        self.seconds, self.lives = seconds, lives
        self.asked: list[int] = []
        self.answer = self.respond

    def respond(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/metrics":
            counts = {"generation_tokens_total": 2 * len(self.asked), "num_requests_running": 3.0}
            return 200, "".join(f'vllm:{name}{{engine="0"}} {n}\n' for name, n in counts.items()).encode()
        if path != "/inference/v1/generate":
            return (200 if self.lives != 0 else 503), {}
        prompt, n = body["token_ids"][0], body["sampling_params"]["n"]
        with self.lock:
            self.asked.append(prompt)
        time.sleep(self.seconds)
        with self.lock:
            if self.lives == 0:
                raise ConnectionAbortedError  # closes the connection without an answer
            if self.lives is not None:
                self.lives -= 1
        return 200, {"choices": [choice([prompt, 7]) | {"index": i} for i in range(n)]}


@pytest.fixture
def serve() -> Iterator[Callable[..., Vllm]]:
    """A function that starts stand-in servers and stops them after the test."""
    made: list[Vllm] = []

    def make(**options: Any) -> Vllm:
        made.append(Vllm(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()


class Comes:
    """Replaces a lost server with the next of `servers` at once, or fails if none is left."""

    def __init__(self, *servers: Vllm) -> None:
        self.servers = list(servers)
        self.waited: list[int] = []

    def wait(self, lost: Lost) -> list[Endpoint]:
        self.waited += lost
        if len(self.servers) < len(lost):
            raise EngineGone(f"none is left ({lost})")
        return [Endpoint(self.servers.pop(0).url, "key", "/nowhere") for _ in lost]


class Syncs:
    """A stand-in for the weight sync: one call to each server, and an error in every process if one fails."""

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self.clients, self.versions, self.released = clients, list[int](), 0

    def __call__(self, version: int) -> dict[str, float]:
        self.versions.append(version)
        for client in self.clients:
            client.resume()
        return {"sync/bytes": 1.0}

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        return


def engine_of(servers: Sequence[Vllm], waiting: Comes, world: Any = None) -> tuple[VllmEngine, Syncs]:
    clients = clients_of(*servers)
    sync = Syncs(clients)
    return VllmEngine(ServerPool(clients), sync, [1], version=3, world=world or Alone(), reconnect=waiting.wait), sync


def requests(count: int, n: int = 1) -> list[Request]:
    return [Request([10 + i], n, seed=i) for i in range(count)]


def prompts_of(groups: list[list[Completion]]) -> list[int]:
    return [group[0].token_ids[0] for group in groups]


def test_only_a_dead_servers_unanswered_requests_are_repeated(serve: Callable[..., Vllm]) -> None:
    dies, lives = serve(seconds=0.02, lives=5), serve(seconds=0.02)
    waiting = Comes()
    engine, sync = engine_of([dies, lives], waiting)
    assert prompts_of(engine.generate(requests(40, n=2), Sampling(2))) == [10 + i for i in range(40)]
    asked = Counter(dies.asked + lives.asked)
    assert set(asked) == {10 + i for i in range(40)}
    assert len(dies.asked) > 5
    assert sum(asked.values()) == 40 + len(dies.asked) - 5
    assert waiting.waited == sync.versions == [], "the living server answers all, so nothing waits"
    waiting.servers = [serve()]
    assert engine.sync(4)["engine/restarts"] == 1.0
    assert waiting.waited == [0]


def test_a_sync_measures_what_each_server_did_since_the_last_one(serve: Callable[..., Vllm]) -> None:
    servers = [serve(seconds=0.2), serve(seconds=0.1)]
    engine, _ = engine_of(servers, Comes(serve()))
    start = time.monotonic()
    assert not [name for name in engine.sync(4) if name.startswith("server/")], "nothing was sampled before"
    engine.generate(requests(4), Sampling(2))
    metrics = engine.sync(5)
    seconds = time.monotonic() - start
    for number, server in enumerate(servers):
        assert 2 * len(server.asked) / seconds < metrics[f"server/{number}/tokens_per_second"]
        assert 0 <= metrics[f"server/{number}/idle"] < 0.9
        assert (metrics[f"server/{number}/running"], metrics[f"server/{number}/waiting"]) == (3, 0)
    servers[0].answer = lambda path, body: (500 if path == "/metrics" else 200, {})
    assert "server/0/idle" not in engine.sync(5), "its counts are unknown"
    servers[0].answer = servers[0].respond
    assert engine.sync(5)["server/0/tokens_per_second"] == 0
    engine.pool.clients[0].gone("as if it had died")
    assert not [name for step in (6, 7) for name in engine.sync(step) if name.startswith("server/0/")]
    assert engine.sync(8)["server/0/idle"] == 1, "another server is in its place"


def test_the_requests_of_several_threads_share_the_room_of_a_server(serve: Callable[..., Vllm], monkeypatch) -> None:
    monkeypatch.setattr("grpocli.rollout.vllm.engine.SEQUENCES", 64)
    server = serve(seconds=0.05)
    pool = ServerPool(clients_of(server))
    body = {"token_ids": [1], "sampling_params": {"n": 16}}
    with ThreadPoolExecutor(12) as threads:
        calls = [threads.submit(pool.complete, {0: body}, lambda number, choices: None) for _ in range(12)]
        for call in calls:
            call.result(20)
    assert server.max_in_flight == 64 / 16


def test_the_answers_of_a_dead_server_are_kept(serve: Callable[..., Vllm]) -> None:
    """The next server is synced to the same version and gets only the unanswered requests."""
    dies, dies_too, lives = serve(seconds=0.02, lives=3), serve(seconds=0.02, lives=4), serve()
    engine, sync = engine_of([dies], Comes(dies_too, lives))
    handed: list[tuple[int, list[Completion]]] = []
    groups = engine.generate(requests(12), Sampling(2), lambda k, done: handed.append((k, done)))
    assert prompts_of(groups) == [10 + i for i in range(12)]
    assert sorted(handed, key=lambda pair: pair[0]) == list(enumerate(groups)), "each group is returned once"
    assert {c.version for group in groups for c in group} == {3}
    assert len(dies_too.asked) == 9
    assert len(lives.asked) == 5
    assert sync.versions == [3, 3]
    assert engine.restarts == 2


def test_a_server_that_dies_during_a_sync_is_replaced(serve: Callable[..., Vllm]) -> None:
    dead, living, new = serve(), serve(), serve()
    dead.close()
    engine, sync = engine_of([dead, living], Comes(new))
    assert engine.sync(4) == {"sync/bytes": 1.0, "engine/restarts": 1.0}
    assert sync.versions == [4, 4]
    assert engine.version == 4
    engine.generate(requests(8), Sampling(2))
    assert len(new.asked) == len(living.asked) == 4


def test_threads_that_sample_wait_for_the_next_sync_of_the_main_thread(serve: Callable[..., Vllm]) -> None:
    """Weights may only be read between two updates. Completions of the new weights have the new version."""
    engine, sync = engine_of([serve(lives=2)], Comes(serve()))
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(engine.sample, requests(4), Sampling(2)) for _ in range(3)]
        until(lambda: engine._waiting == 3)
        assert engine.needs_sync
        assert sync.versions == []
        engine.sync(4)
        groups = [one.result(5) for one in found]
    assert [prompts_of(each) for each in groups] == [[10, 11, 12, 13]] * 3
    assert Counter(group[0].version for each in groups for group in each) == {3: 2, 4: 10}
    assert not engine.needs_sync
    assert sync.versions == [4]


@pytest.mark.parametrize("how", ["cancelled", "nothing comes back"])
def test_a_thread_waits_for_a_sync_only_as_long_as_one_may_come(serve: Callable[..., Vllm], how: str) -> None:
    engine, sync = engine_of([serve(lives=0)], Comes())
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(engine.sample, requests(2), Sampling(2), Listener(watch=Watch(cancelled=over.is_set)))
        until(lambda: engine.needs_sync)
        if how == "cancelled":
            over.set()
            assert found.result(5) == [[], []]
        else:
            with pytest.raises(EngineGone, match="none is left"):
                engine.sync(4)
            with pytest.raises(EngineGone, match="none is left"):
                found.result(5)
    assert not engine.needs_sync
    assert sync.versions == []


def test_answers_during_a_failed_sync_are_discarded(serve: Callable[..., Vllm]) -> None:
    """The server may have mixed weights and may report the earlier version."""
    server = serve()
    engine, sync = engine_of([server], Comes())
    go_on, asked = threading.Event(), threading.Event()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path != "/inference/v1/generate":
            return 400, {"error": "no such weights"}
        asked.set()
        assert go_on.wait(10)
        return server.respond(path, body)

    server.answer = answer
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(engine.generate, requests(1), Sampling(2))
        assert asked.wait(10)
        with pytest.raises(RequestRefused, match="no such weights"):
            engine.sync(4)
        assert sync.released == 1
        go_on.set()
        with pytest.raises(EngineError, match="no such weights"):
            found.result(10)
    server.answer = server.respond
    engine.sync(4)
    assert engine.generate(requests(1), Sampling(2))[0][0].version == 4


@pytest.mark.parametrize("back", [True, False], ids=["it comes back", "it does not"])
def test_processes_recover_together_or_fail_together(serve: Callable[..., Vllm], back: bool) -> None:
    """Only the second process loses a server; the first waits for the new one, and both sync equally often."""
    waiting = Comes(*([serve()] if back else []))
    pairs = zip((serve(), serve(lives=1)), two_worlds(), strict=True)
    engines = [engine_of([server], waiting, world) for server, world in pairs]

    def work(rank: int) -> Any:
        try:
            return prompts_of(engines[rank][0].generate(requests(5), Sampling(2)))
        except EngineError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(work, (0, 1)))
    if back:
        assert results == [[10, 11, 12, 13, 14]] * 2
        assert [sync.versions for _, sync in engines] == [[3], [3]]
    else:
        assert [type(error) for error in results] == [EngineGone, EngineGone]
        assert str(results[0]) == str(results[1])


def test_a_cancelled_watch_leaves_requests_unanswered(serve: Callable[..., Vllm]) -> None:
    """The server would never answer them."""
    server, over, asked = serve(), threading.Event(), threading.Event()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.set()
        over.wait(60)
        return 200, {}

    server.answer = answer
    engine, _ = engine_of([server], Comes())
    try:
        cut = engine.generate(requests(3), Sampling(2), Listener(watch=Watch(cancelled=asked.is_set)))
        assert cut == [[], [], []]
        assert not engine.pool.clients[0].lost, "the server is healthy"
    finally:
        over.set()
