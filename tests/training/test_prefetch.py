"""The prefetcher with a scripted sampler: order, weight versions, staleness, errors and state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training.scripted import FLAT, MIXED, Scripted, collector_of, prompt

from grpocli.errors import EngineError
from grpocli.rewards.scorer import ScoreStats
from grpocli.training.collector import Collector, RolloutBatch
from grpocli.training.prefetch import Prefetcher, PrefetchState, load_prefetched
from grpocli.types import Completion, Group, Rollout, Status

WAIT = 20.0  # seconds, far more than anything here takes


class Alone:
    """A world of one process."""

    rank, size, is_main = 0, 1, True

    def channel(self) -> Any:
        return nullcontext

    def broadcast_object(self, item: Any) -> Any:
        return item

    def gather_objects(self, items: Any) -> Any:
        return items


class ScriptedSampler(Scripted):
    """A sampler whose calls wait for `allow`; `version` is the weight version of its completions."""

    def __init__(self, rewards: Any = (MIXED,)) -> None:
        super().__init__(rewards)
        self.version: int = 0
        self.turns = threading.Semaphore(0)
        self.calls: list[tuple[int, list[int]]] = []
        self.threads: set[int] = set()
        self.error: BaseException | None = None
        self.before: Callable[[], None] = lambda: None
        """Called in the middle of sampling, between two tokens."""

    def allow(self, calls: int) -> None:
        self.turns.release(calls)

    def generate_and_score(self, prompts: Any, *given: Any) -> tuple[list[Group], ScoreStats]:
        first = self.version
        self.threads.add(threading.get_ident())
        self.calls.append((first, [int(one.uid) for one in prompts]))
        assert self.turns.acquire(timeout=WAIT), "the test did not allow this call"
        self.before()
        if self.error:
            raise self.error
        spans = [(first, 1), (self.version, 1)] if self.version != first else None
        groups, stats = super().generate_and_score(prompts, *given)
        for rollouts in (group.rollouts for group in groups):
            rollouts[:] = [
                replace(one, completion=replace(one.completion, version=first, spans=spans)) for one in rollouts
            ]
        return groups, stats


def collector(sampler: ScriptedSampler, *overrides: str) -> Collector:
    return collector_of(sampler, *overrides, prompts=2)


@contextmanager
def ahead(
    made: Collector, staleness: int = 1, steps: int = 99, in_flight: bool = False, **more: Any
) -> Iterator[Prefetcher]:
    rollout = SimpleNamespace(max_staleness=staleness, in_flight=in_flight)
    one = Prefetcher(made, Alone(), rollout, steps, **more)  # type: ignore[arg-type]
    try:
        yield one
    finally:
        made.sampler.allow(99)  # type: ignore[attr-defined]
        one.close()


def versions(collected: RolloutBatch) -> set[int]:
    return {r.completion.version for g in collected.groups for r in g.rollouts}


def sync(one: Prefetcher, sampler: ScriptedSampler, version: int) -> None:
    with one.collection_paused_before(version):
        sampler.version = version


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def uids(collected: RolloutBatch) -> list[int]:
    return [int(g.uid) for g in collected.groups]


def test_a_sync_waits_for_running_steps_and_comes_before_later_ones() -> None:
    sampler = ScriptedSampler()
    synced = threading.Event()
    with ahead(collector(sampler), staleness=2) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        until(lambda: len(sampler.calls) == 2)

        def meanwhile() -> None:
            assert not synced.wait(0.2), "the sync did not wait for running requests"
            sampler.allow(9)

        helper = threading.Thread(target=meanwhile)
        helper.start()
        with one.collection_paused_before(2):
            synced.set()
            assert len(sampler.calls) == 2, "steps that had not begun follow the sync"
            sampler.version = 2
        helper.join()
        assert versions(one.rollouts(2)) == {1}
        sync(one, sampler, 3)
        assert versions(one.rollouts(3)) == {2}


def test_in_flight_a_sync_does_not_wait_and_versions_are_recorded() -> None:
    sampler = ScriptedSampler()
    with ahead(collector(sampler), in_flight=True) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        until(lambda: len(sampler.calls) == 2)
        sync(one, sampler, 2)  # returns although the running call may not end
        sampler.allow(9)
        collected = one.rollouts(2)
    done = collected.groups[0].rollouts[0].completion
    assert (done.version, done.spans) == (1, [(1, 1), (2, 1)])
    assert collected.metrics["staleness/max"] == 1


def test_stale_groups_are_dropped_and_counted() -> None:
    """This happens after a resume with a smaller max_staleness. Advantages are those of the remaining groups."""
    sampler = ScriptedSampler([MIXED, (0.0, 3.0)])
    made = collector(sampler, "algorithm=grpo", "algorithm/advantage=batch_std")
    sampler.allow(2)
    old = made.collect()
    sampler.version = 3
    new = made.collect()
    mixed = RolloutBatch([old.groups[0], new.groups[1]], new.metrics)
    with ahead(made, done=3, ready=[mixed]) as one:
        collected = one.rollouts(4)
    assert uids(collected) == [3]
    assert [(status, group.uid) for status, group in collected.untrained] == [("stale", "0")]
    assert (collected.metrics["sampling/stale"], collected.metrics["sampling/kept"]) == (1, 1)
    assert (collected.metrics["staleness/mean"], collected.metrics["staleness/max"]) == (1, 1)


def test_an_error_of_the_thread_is_raised_when_the_trainer_waits() -> None:
    sampler = ScriptedSampler()
    made = collector(sampler)
    with ahead(made) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        drawn = 2
        sampler.error = EngineError("the server is gone")
        sampler.allow(1)
        with pytest.raises(EngineError, match="the server is gone"), one.collection_paused_before(2):
            pytest.fail("weights went to an engine that had failed")
        assert one.state(2).draws == drawn, "a failed step is not counted as drawn"
        one.wait_until_idle(2)  # for the checkpoint after a server is lost
        assert one.state(0).ready == ()
        with pytest.raises(EngineError, match="the server is gone"):
            one.rollouts(2)


def test_a_checkpoint_saves_ready_batches_and_no_draws_of_running_steps() -> None:
    sampler = ScriptedSampler()
    made = collector(sampler)
    with ahead(made, staleness=3) as one:
        sampler.allow(2)
        one.rollouts(1)
        until(lambda: len(sampler.calls) == 3 and made.draws == 6)
        progress = one.state(2)
        assert [uids(ready) for ready in progress.ready] == [[2, 3]]
        assert progress.draws == 4
        sampler.allow(9)
        one.wait_until_idle(2)  # waits for the third step, which has begun
        assert [uids(ready) for ready in one.state(2).ready][:2] == [[2, 3], [4, 5]]
        one.rollouts(2)
        assert uids(one.rollouts(3)) == [4, 5], "the run continues with it"


def test_the_waiting_trainer_makes_the_threads_calls() -> None:
    """An engine does this to recover a lost server in the middle of sampling."""
    sampler = ScriptedSampler()
    did: list[int] = []
    with ahead(collector(sampler)) as one:
        sampler.before = lambda: one.run_in_main_thread(lambda: did.append(threading.get_ident()))
        sync(one, sampler, 1)
        sampler.allow(9)
        one.rollouts(1)
        assert did == [threading.get_ident()]
        with one.collection_paused_before(2):
            assert did == [threading.get_ident()] * 2
        one.run_in_main_thread(lambda: did.append(0))  # in the main thread, as in an evaluation
        assert did[2:] == [0]

        def fail() -> None:
            raise EngineError("does not come back")

        sampler.before = lambda: one.run_in_main_thread(fail)
        with pytest.raises(EngineError, match="does not come back"):
            one.rollouts(2), one.rollouts(3)


def test_close_ends_a_thread_that_waits_for_the_trainer() -> None:
    sampler = ScriptedSampler()
    with ahead(collector(sampler)) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        asked = threading.Event()

        def ask() -> None:
            asked.set()
            one.run_in_main_thread(lambda: pytest.fail("the run has ended"))

        sampler.before = ask
        sampler.allow(1)
        assert asked.wait(WAIT)
        one.close()
        assert one._thread is not None
        assert one._thread.done()


@pytest.mark.parametrize("surplus", ["discard", "carry"])
def test_a_failed_step_is_drawn_again(surplus: str) -> None:
    sampler = ScriptedSampler([FLAT, *[MIXED] * 6])
    sampler.allow(99)
    made = collector(sampler, "algorithm=dapo", f"algorithm.keep.surplus={surplus}")
    with ahead(made, staleness=0) as one:
        one.rollouts(1)
        before = one.state(2)
        sampler.error = EngineError("gone")
        with pytest.raises(EngineError):
            one.rollouts(2)
        assert one.state(2) == before
    assert bool(before.leftover) == (surplus == "carry")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_that_was_not_trained_is_saved(staleness: int) -> None:
    """An error may come between its rollouts and its update. Without prefetch it is drawn again."""
    sampler = ScriptedSampler()
    sampler.allow(99)
    with ahead(collector(sampler), staleness, steps=8) as one:
        for step in (1, 2):
            sync(one, sampler, step)
            before, taken = one.state(step), one.rollouts(step)
        one.wait_until_idle(3)
        if not staleness:
            assert one.state(2) == before
            assert one.state(3).draws > before.draws
        else:
            assert [uids(saved) for saved in one.state(2).ready] == [uids(taken), [4, 5]]
            assert [uids(saved) for saved in one.state(3).ready] == [[4, 5]]


def test_spans_survive_a_checkpoint_and_a_changed_config_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = Completion([1, 2], [-1.0, -0.5], "stop", 3, spans=[(3, 1), (4, 1)])
    group = Group(prompt(4), [Rollout(prompt(4), done, "t", {"r": float("nan")})] * 2)
    step = RolloutBatch([group], {"reward": 0.5}, untrained=[(Status.STALE, group)])
    PrefetchState(0, [], ready=(step,)).save(tmp_path)

    def load(size: int = 2, wanted: bool = True) -> list[RolloutBatch]:
        return load_prefetched(tmp_path, prompt, size, ["r"], wanted, is_main=True)

    assert repr(load()) == repr([step])
    assert caplog.text == ""
    assert load(size=3) == load(wanted=False) == []
    assert "1 steps collected ahead do not fit" in caplog.text


def test_two_steps_ahead_ready_batches_are_used_before_a_later_error_is_raised() -> None:
    sampler = ScriptedSampler()
    with ahead(collector(sampler), staleness=2, in_flight=True) as one:
        sampler.allow(2)
        one.rollouts(1)
        until(lambda: len(one.state(0).ready) == 1)
        sampler.error = EngineError("the server is gone")
        sampler.allow(1)
        until(lambda: one._error is not None)
        assert uids(one.rollouts(2)) == [2, 3]
        with pytest.raises(EngineError, match="the server is gone"):
            one.rollouts(3)
