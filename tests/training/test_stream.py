"""The stream of rollouts with a scripted sampler: order, weight versions, errors and state."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training.scripted import FLAT, MIXED, Scripted, collector_of, prompt

from grpocli.errors import ConfigError, EngineError, EngineGone, RewardError
from grpocli.rewards.scorer import RewardStats, ScoreStats
from grpocli.training.collector import RolloutBatch
from grpocli.training.stream import RolloutState, RolloutStream
from grpocli.types import Completion, Group, Prompt, Request, Rollout

WAIT = 20.0  # seconds, far more than anything here takes


class Alone:
    """A world of one process."""

    rank, size, is_main = 0, 1, True

    def broadcast_object(self, item: Any) -> Any:
        return item


class ScriptedStream(Scripted):
    """A sampler whose groups end when the test says so: `end(number)`, or at once if `at_once`."""

    def __init__(self, rewards: Any = (MIXED,), at_once: bool = False) -> None:
        super().__init__(rewards)
        self.version: int = 0
        self.at_once = at_once
        self.running: dict[int, threading.Event] = {}
        self.versions: dict[int, int] = {}
        self.fails: dict[int, BaseException] = {}
        self.engine = SimpleNamespace(needs_sync=False)
        self.episodes = lambda here: SimpleNamespace(generate=self.sample)
        self.scoring = threading.Lock()
        self.length: Callable[[int], int] = lambda number: 2
        self.scored: list[int] = []
        """The number of groups in each call of `score`."""

    def end(self, *numbers: int) -> None:
        for number in numbers:
            until(lambda number=number: number in self.running)
            self.running[number].set()

    def sample(self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Any, listener: Any) -> Any:
        number = int(prompts[0].uid)
        self.versions[number] = self.version
        self.running[number] = threading.Event()
        deadline = time.monotonic() + WAIT
        while not self.at_once and not self.running[number].wait(0.01) and not listener.watch.cancelled():
            assert time.monotonic() < deadline, "the test did not end this group"
        if number in self.fails:
            raise self.fails[number]
        return [[self.completion(number, k) for k in range(requests[0].n)]]

    def score(self, arrived: Sequence[tuple[Prompt, Any]], max_tokens: int) -> tuple[list[Group], ScoreStats]:
        self.scored.append(len(arrived))
        found = RewardStats(errors=self.errors * len(arrived), first_error="a reason")
        stats = ScoreStats(Counter({"": 2 * len(arrived)}), 0.5, {("r", ""): found})
        return [Group(one, self.rollouts(one)) for one, _ in arrived], stats

    def rollouts(self, prompt: Prompt) -> list[Rollout]:
        found = []
        for one in super().rollouts(prompt):
            first, n = self.versions.get(int(prompt.uid), self.version), self.length(int(prompt.uid))
            spans = [(first, 1), (self.version, n - 1)] if self.version != first else None
            made = Completion([5] * n, [-1.0] * n, "stop", first, None, spans)
            found.append(Rollout(prompt, made, one.text, one.rewards))
        return found


def never() -> None:
    pytest.fail("nothing was lost")


@contextmanager
def streaming(
    sampler: ScriptedStream,
    *overrides: str,
    staleness: int = 1,
    steps: int = 99,
    in_flight: bool = True,
    order: str = "ready",
    done: int = 0,
    saved: RolloutState | None = None,
) -> Iterator[RolloutStream]:
    rollout = SimpleNamespace(max_staleness=staleness, in_flight=in_flight)
    in_order = order == "request" or not in_flight
    made = collector_of(sampler, *overrides, prompts=2, max_staleness=staleness, steps=steps, in_order=in_order)
    stream = RolloutStream(made, Alone(), rollout, done, saved or RolloutState(0))  # type: ignore[arg-type]
    if saved is None:
        made.schedule.ahead = staleness  # as after steps that found no batch ready
    try:
        yield stream
    finally:
        stream.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def uids(batch: RolloutBatch) -> list[int]:
    return [int(group.uid) for group in batch.groups]


def test_in_flight_a_step_takes_what_has_ended_and_versions_are_recorded() -> None:
    sampler = ScriptedStream()
    with streaming(sampler, staleness=2) as stream:
        sampler.version = 1
        threading.Thread(target=lambda: sampler.end(2, 1)).start()
        first = stream.batch(1, never)
        assert sorted(uids(first)) == [1, 2]
        assert sorted(sampler.running) == [0, 1, 2, 3, 4, 5]
        stream.wait_until_idle(never)  # returns, although groups run
        sampler.version = 2
        threading.Thread(target=lambda: sampler.end(5, 3)).start()
        second = stream.batch(2, never)
    done = second.groups[0].rollouts[0].completion
    assert (done.version, done.spans) == (1, [(1, 1), (2, 1)])
    assert second.metrics["staleness/0"] == second.metrics["staleness/1"] == second.metrics["staleness/mean"] == 0.5
    assert second.metrics["staleness/max"] == 1
    assert second.metrics["stream/length_bias"] == 0


def test_without_in_flight_a_sync_waits_for_running_groups() -> None:
    sampler = ScriptedStream()
    with streaming(sampler, in_flight=False) as stream:
        sampler.version = 1
        threading.Thread(target=lambda: sampler.end(1, 0)).start()
        assert uids(stream.batch(1, never)) == [0, 1], "in the order of the prompts"
        synced = threading.Event()

        def meanwhile() -> None:
            assert not synced.wait(0.2), "the sync did not wait for running groups"
            sampler.end(3, 2)

        helper = threading.Thread(target=meanwhile)
        helper.start()
        stream.wait_until_idle(never)
        synced.set()
        helper.join()
        assert sorted(sampler.running) == [0, 1, 2, 3], "groups of later steps start after the sync"
        sampler.version = 2
        assert uids(stream.batch(2, never)) == [2, 3]
        until(lambda: len(sampler.versions) == 6)
    assert sampler.versions == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}


def test_rejected_groups_are_replaced_one_by_one_and_recorded_once() -> None:
    sampler = ScriptedStream([MIXED, FLAT, MIXED], at_once=True)
    dapo = ("algorithm=dapo", "algorithm.keep.surplus=discard")
    with streaming(sampler, *dapo, in_flight=False, steps=4) as stream:
        batches = []
        for step in (1, 2, 3, 4):
            stream.wait_until_idle(never)
            batches.append(stream.batch(step, never))
    assert [uids(batch) for batch in batches] == [[0, 2], [3, 5], [6, 8], [9, 11]]
    assert [[group.uid for _, group in batch.untrained] for batch in batches] == [["1"], ["4"], ["7"], ["10"]]
    assert batches[0].metrics["sampling/acceptance"] == 2 / 3


def test_a_step_that_keeps_nothing_records_what_it_rejected() -> None:
    sampler = ScriptedStream([FLAT], at_once=True)
    with streaming(sampler, "algorithm=dapo", "algorithm.keep.max_rounds=1", in_flight=False, steps=2) as stream:
        batches = [stream.batch(step, never) for step in (1, 2)]
    assert [batch.groups for batch in batches] == [[], []]
    assert [int(group.uid) for batch in batches for _, group in batch.untrained] == list(range(6))
    with streaming(sampler, "algorithm=dapo", "algorithm.keep.max_rounds=1") as stream:
        stream.batch(1, never)
        until(lambda: len(stream.collector.ended) == 2)  # others start while the step trains
    with (
        streaming(
            sampler, "algorithm=dapo", "algorithm.keep.max_rounds=2", "algorithm.keep.on_exhausted=error"
        ) as stream,
        pytest.raises(RewardError, match=r"max_rounds=2: only 0 of 2"),
    ):
        stream.batch(1, never)


def test_the_bias_of_lengths_compares_trained_groups_with_those_that_were_ready() -> None:
    """Even prompts have completions of one token, odd ones of three; 3 is rejected."""
    sampler = ScriptedStream([MIXED, MIXED, MIXED, FLAT, MIXED])
    sampler.version, sampler.length = 1, lambda number: 1 + 2 * (number % 2)
    with streaming(sampler, "algorithm=dapo", "algorithm.keep.surplus=discard", staleness=2) as stream:
        ended = threading.Thread(
            target=lambda: (sampler.end(1, 3), until(lambda: len(stream.collector.ended) == 2), sampler.end(0))
        )
        ended.start()
        first = stream.batch(1, never)
        ended.join()
        for ready, number in enumerate((2, 4, 5), start=1):
            sampler.end(number)
            until(lambda ready=ready: len(stream.schedule.ready) == ready)
        second = stream.batch(2, never)
        untrained = stream.state(2)
    assert uids(first) == [1, 0]
    assert first.metrics["stream/length_bias"] == 0
    assert second.metrics["stream/length_bias"] == 1 - (1 + 1 + 3) / 3, "groups 2 and 4 are trained, and 5 is ready"
    assert (second.metrics["stream/ready"], second.metrics["stream/running"]) == (1, 3)
    assert {one.uid for one in untrained.ended} == {"2", "4", "5"}


def test_groups_that_arrive_together_are_scored_together() -> None:
    sampler = ScriptedStream()
    scoring, first = threading.Event(), sampler.score

    def slow(arrived: Any, max_tokens: int) -> Any:
        assert scoring.wait(WAIT)
        return first(arrived, max_tokens)

    sampler.score = slow  # type: ignore[method-assign]
    with streaming(sampler, staleness=3) as stream:
        helper = threading.Thread(target=lambda: (sampler.end(*range(8)), time.sleep(0.2), scoring.set()))
        helper.start()
        stream.batch(1, never)
        helper.join()
        until(lambda: sum(sampler.scored) == 8)
    assert len([n for n in sampler.scored if n]) <= 3


def test_a_run_goes_on_once_the_reward_that_ended_it_is_mended(tmp_path: Path) -> None:
    sampler = ScriptedStream()
    with streaming(sampler, staleness=2) as stream:
        threading.Thread(target=lambda: sampler.end(0, 1)).start()
        stream.batch(1, never)
        sampler.end(2)
        until(lambda: len(stream.schedule.ready) == 1)
        sampler.errors = 2
        sampler.end(3)
        until(lambda: stream._error is not None)
        with pytest.raises(RewardError):
            stream.batch(2, never)
        stream.state(2).save(tmp_path)
        saved = RolloutState.load(tmp_path, stream.schedule.draws, {}, prompt)
    with streaming(ScriptedStream(at_once=True), staleness=2, order="request", done=1, saved=saved) as stream:
        assert uids(stream.batch(2, never)) == [2, 3]


@pytest.mark.parametrize("broken", [4, 5, 7])
def test_a_broken_row_ends_the_run_after_the_steps_that_have_their_groups(broken: int) -> None:
    def draw(number: int) -> Prompt:
        if number == broken:
            raise ConfigError(f"row {broken} is broken")
        return prompt(number)

    sampler = ScriptedStream(at_once=True)
    with streaming(sampler, order="request", in_flight=False) as stream:
        stream.collector.draw, done = draw, list[int]()
        with pytest.raises(ConfigError, match=f"row {broken}"):  # noqa: PT012 - of one of the steps
            while True:
                stream.wait_until_idle(never)
                done += uids(stream.batch(len(done) // 2 + 1, never))
        saved = stream.state(len(done) // 2 + 1)
    assert done == list(range(broken // 2 * 2))
    assert sorted([*saved.running, *(int(one.uid) for one in saved.ended)]) == list(range(len(done), saved.draws))


@pytest.mark.parametrize("error", [EngineGone("the server is gone"), RewardError("all failed"), RuntimeError("broken")])
def test_an_error_is_raised_once_the_step_lacks_groups(error: BaseException) -> None:
    sampler = ScriptedStream()
    sampler.fails[5] = error
    with streaming(sampler, staleness=2, order="request") as stream:
        threading.Thread(target=lambda: sampler.end(0, 1, 2, 3)).start()
        stream.batch(1, never)
        until(lambda: len(stream.schedule.ready) == 2)
        sampler.end(5)
        until(lambda: stream._error is not None)
        assert uids(stream.batch(2, never)) == [2, 3], "ready groups are used before the error is raised"
        with pytest.raises(type(error), match=str(error)):
            stream.batch(3, never)
        stream.wait_until_idle(never)  # for the checkpoint after the error
        saved = stream.state(3)
    assert sorted([*saved.running, *(int(one.uid) for one in saved.ended)]) == list(range(4, saved.draws))


def test_too_many_errors_of_a_reward_end_the_run() -> None:
    sampler = ScriptedStream(at_once=True)
    sampler.errors = 2
    with streaming(sampler) as stream, pytest.raises(RewardError, match="could not score"):
        stream.batch(1, never)


def test_the_waiting_trainer_syncs_when_servers_are_lost() -> None:
    sampler = ScriptedStream()
    synced: list[int] = []

    def sync() -> None:
        synced.append(threading.get_ident())
        sampler.engine.needs_sync, sampler.at_once = False, True

    for wait in ("batch", "idle"):
        sampler.engine.needs_sync, sampler.at_once = wait == "batch", wait == "idle"
        with streaming(sampler, in_flight=False) as stream:
            stream.batch(1, sync)
            if wait == "idle":
                until(lambda: len(stream.schedule.ready) == 2)
                sampler.at_once = False
                stream.batch(2, never)
                sampler.engine.needs_sync = True
                stream.wait_until_idle(sync)
    assert synced == [threading.get_ident()] * 2


def test_a_checkpoint_has_what_has_ended_and_asks_again_for_the_rest(tmp_path: Path) -> None:
    sampler = ScriptedStream()
    with streaming(sampler, staleness=2) as stream:
        threading.Thread(target=lambda: sampler.end(0, 2)).start()
        taken = stream.batch(1, never)
        sampler.end(4)
        until(lambda: len(stream.schedule.ready) == 1)
        untrained, trained = stream.state(1), stream.state(2)
    assert [int(one.uid) for one in untrained.ended] == [*uids(taken), 4], "step 1 was not trained"
    assert [int(one.uid) for one in trained.ended] == [4]
    assert untrained.running == trained.running == [1, 3, 5]
    trained.save(tmp_path)
    loaded = RolloutState.load(tmp_path, trained.draws, {}, prompt)
    assert repr(loaded) == repr(trained)
    again = ScriptedStream(at_once=True)
    with streaming(again, staleness=2, done=1, saved=loaded, order="request") as stream:
        assert stream.schedule.ahead == 2, "as far ahead as when it was saved"
        batches = [stream.batch(step, never) for step in (2, 3)]
    assert sorted(uid for batch in batches for uid in uids(batch)) == [1, 3, 4, 5]


def test_what_does_not_fit_a_changed_config_is_sampled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = Completion([1, 2], [-1.0, -0.5], "stop", 3, spans=[(3, 1), (4, 1)])
    ended = [
        Group(prompt(n), [Rollout(prompt(n), done, "t", {"r": r}) for r in rewards])
        for n, rewards in ((4, MIXED), (6, FLAT))
    ]
    settings = {"group_size": 2, "max_staleness": 1, "sampling": {"max_tokens": 6, "stop": ("a",)}}
    saved = RolloutState(8, settings, [5], ended)
    saved.save(tmp_path)

    def load(draw: Any = prompt, **changed: Any) -> RolloutState:
        return RolloutState.load(tmp_path, 8, settings | changed, draw)

    assert repr(load()) == repr(saved)
    assert caplog.text == ""
    for again in (load(max_staleness=2), load(draw=lambda n: Prompt(str(n), [2], "p"))):
        assert replace(again, settings=settings) == RolloutState(8, settings, [5, 4, 6])
    assert "2 groups do not fit the config" in caplog.text
    sampler = ScriptedStream(at_once=True)
    dapo = ("algorithm=dapo", "algorithm.keep.surplus=discard")
    with streaming(sampler, *dapo, done=7, saved=load(), order="request") as stream:
        batches = [stream.batch(step, never) for step in (8, 9)]
    assert {4, 5} <= {uid for batch in batches for uid in uids(batch)}
    assert [group.uid for batch in batches for _, group in batch.untrained] == ["6"]


@pytest.mark.parametrize("surplus", ["discard", "carry"])
def test_without_a_stream_a_failed_step_is_drawn_again(surplus: str) -> None:
    sampler = ScriptedStream([FLAT, *[MIXED] * 6])
    sampler.version = 1
    with streaming(sampler, "algorithm=dapo", f"algorithm.keep.surplus={surplus}", staleness=0) as stream:
        stream.batch(1, never)
        before = stream.state(2)
        assert stream.state(1).draws == 0, "a step that was not trained is drawn again"

        def fail(*_: Any) -> None:
            raise EngineError("gone")

        sampler.generate_and_score = fail  # type: ignore[assignment]
        with pytest.raises(EngineError):
            stream.batch(2, never)
        assert stream.state(2) == before
    assert bool(before.ended) == (surplus == "carry")


def test_other_processes_follow_the_main_one() -> None:
    """It broadcasts that it waits, that servers are lost, the batch, or its error."""

    class Linked:
        """A world of two processes, threads here; `barrier` hands the main one's object over."""

        size = 2

        def __init__(self, rank: int, box: list[Any], barrier: threading.Barrier) -> None:
            self.rank, self.is_main, self.box, self.barrier = rank, rank == 0, box, barrier

        def broadcast_object(self, item: Any) -> Any:
            if self.is_main:
                self.box[:] = [item]
            self.barrier.wait(WAIT)
            found = self.box[0]
            self.barrier.wait(WAIT)
            return found

    box: list[Any] = []
    barrier, rollout = threading.Barrier(2), SimpleNamespace(max_staleness=1, in_flight=True)
    samplers = [ScriptedStream(), ScriptedStream()]
    samplers[0].engine.needs_sync = True
    seen: list[list[Any]] = [[], []]

    def run(rank: int) -> None:
        made = collector_of(samplers[rank], prompts=2, max_staleness=1, steps=9)
        stream = RolloutStream(made, Linked(rank, box, barrier), rollout, 0, RolloutState(0))  # type: ignore[arg-type]

        def sync() -> None:
            seen[rank].append("sync")
            samplers[rank].engine.needs_sync = False
            samplers[rank].at_once = True

        seen[rank].append(uids(stream.batch(1, sync)))
        samplers[rank].fails = dict.fromkeys(range(2, 99), RewardError("no score"))
        try:
            for step in (2, 3, 4):
                stream.batch(step, sync)
        except RewardError as error:
            seen[rank].append(str(error))
        stream.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert seen[0] == seen[1]
    assert (seen[0][0], seen[0][-1]) == ("sync", "no score")
    assert not samplers[1].running, "only the main process samples"
    assert seen[0][1:-1] == seen[1][1:-1]
