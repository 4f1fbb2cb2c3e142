"""The prefetcher with a scripted sampler: order, weight versions, staleness, errors and state."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composed import built

from grpocli.errors import EngineError, RunError
from grpocli.rewards.scorer import ScoreStats
from grpocli.runs.rollouts import write_rollouts
from grpocli.training import saved_rollouts
from grpocli.training.collector import Collector, RolloutBatch, records_of
from grpocli.training.micro_batch import rows_of as step_rows_of
from grpocli.training.prefetch import Prefetcher
from grpocli.types import Completion, Group, Prompt, Rollout, Sampling, Status

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


class Sampler:
    """A sampler whose calls wait for `allow`; `version` is the weight version of its completions.

    before: called in the middle of sampling, between two tokens.
    """

    def __init__(self, rewards: Sequence[tuple[float, ...]] = ((0.0, 1.0),)) -> None:
        self.rewards, self.version = rewards, 0
        self.turns = threading.Semaphore(0)
        self.calls: list[tuple[int, list[int]]] = []
        self.threads: set[int] = set()
        self.error: BaseException | None = None
        self.before: Callable[[], None] = lambda: None
        self.scorer = SimpleNamespace(check_errors=lambda *_: None, warnings=lambda _: {})

    def allow(self, calls: int) -> None:
        self.turns.release(calls)

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: object = None
    ) -> tuple[list[Group], ScoreStats]:
        first = self.version
        self.threads.add(threading.get_ident())
        self.calls.append((first, [int(p.uid) for p in prompts]))
        assert self.turns.acquire(timeout=WAIT), "the test did not allow this call"
        self.before()
        if self.error:
            raise self.error
        spans = [(first, 1), (self.version, 1)] if self.version != first else None
        groups = []
        for p in prompts:
            rewards = self.rewards[int(p.uid) % len(self.rewards)]
            done = Completion([int(p.uid) % 7, first], [-1.0, -0.5], "stop", first, spans=spans)
            groups.append(Group(p, [Rollout(p, done, "t", {"r": value}) for value in rewards]))
        return groups, ScoreStats(Counter({"": len(prompts) * n}))


def collector(sampler: Sampler, *overrides: str) -> Collector:
    return Collector(
        sampler=sampler,  # type: ignore[arg-type]
        algorithm=built(*overrides),
        draw=lambda number: Prompt(str(number), [1], "p"),
        reward_weights={"r": 1.0},
        prompts_per_step=2,
        group_size=2,
        sampling=Sampling(4),
        seed=0,
    )


def redraw(number: int, row: int | None) -> Prompt:
    return Prompt(str(number), [1], "p")


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


def sync(one: Prefetcher, sampler: Sampler, version: int) -> None:
    with one.collection_paused_before(version):
        sampler.version = version


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def uids(collected: RolloutBatch) -> list[int]:
    return [int(g.uid) for g in collected.groups]


def test_without_staleness_no_thread_is_started() -> None:
    sampler = Sampler()
    made = collector(sampler)
    before = threading.active_count()
    with ahead(made, staleness=0) as one:
        for step in (1, 2):
            sync(one, sampler, step)
            sampler.allow(1)
            assert versions(one.rollouts(step)) == {step}
            one.wait_until_idle(step + 1)
        assert sampler.threads == {threading.get_ident()}
        assert threading.active_count() == before
        assert one.state.ready == ()


def test_one_step_ahead_every_completion_is_one_version_old() -> None:
    sampler = Sampler()
    with ahead(collector(sampler), steps=5) as one:
        sampler.allow(99)
        got = []
        for step in range(1, 6):
            sync(one, sampler, step)
            got.append(one.rollouts(step))
    assert [versions(c) for c in got] == [{1}, {1}, {2}, {3}, {4}]
    assert [uids(c) for c in got] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [c.metrics["staleness/max"] for c in got] == [0, 1, 1, 1, 1]
    assert [c.metrics["staleness/mean"] for c in got] == [0, 1, 1, 1, 1]
    assert {c.metrics["sampling/stale"] for c in got} == {0}
    assert all(c.metrics["time/generate"] >= 0 for c in got)
    assert len(sampler.calls) == 5, "nothing is sampled after the last step"
    assert threading.get_ident() not in sampler.threads


def test_the_next_step_is_sampled_while_this_one_trains() -> None:
    sampler = Sampler()
    with ahead(collector(sampler)) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        until(lambda: sampler.calls == [(1, [0, 1]), (1, [2, 3])])
        assert one.state.ready == ()


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_completion_is_older_than_allowed(staleness: int) -> None:
    sampler = Sampler()
    with ahead(collector(sampler), staleness, steps=9) as one:
        sampler.allow(99)
        for step in range(1, 10):
            sync(one, sampler, step)
            collected = one.rollouts(step)
            assert min(versions(collected)) >= step - staleness
            assert len(collected.groups) == 2
            assert len(one.state.ready) <= staleness
            assert len(sampler.calls) <= step + staleness


def test_a_sync_waits_for_running_steps_and_comes_before_later_ones() -> None:
    sampler = Sampler()
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
    sampler = Sampler()
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
    sampler = Sampler([(0.0, 1.0), (0.0, 3.0)])
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
    sampler = Sampler()
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
        assert made.draws == drawn, "a failed step is not counted as drawn"
        one.wait_until_idle(2)  # for the checkpoint after a server is lost
        assert one.state.ready == ()
        with pytest.raises(EngineError, match="the server is gone"):
            one.rollouts(2)


def test_an_error_keeps_the_leftover_groups() -> None:
    sampler = Sampler([(1.0, 1.0), (1.0, 1.0), *[(0.0, 1.0)] * 7])
    made = collector(sampler, "algorithm=dapo", "algorithm.keep.surplus=carry")
    sampler.allow(99)
    made.collect()
    before = made.draws, list(made.leftover)
    assert made.leftover
    made.leftover = made.leftover[:1]
    sampler.error = EngineError("gone")
    with pytest.raises(EngineError):
        made.collect()
    assert (made.draws, made.leftover) == (before[0], before[1][:1])


def test_waiting_for_a_checkpoint_raises_an_error_that_was_not_raised_yet() -> None:
    sampler = Sampler()
    with ahead(collector(sampler)) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        sampler.error = RunError("no")
        sampler.allow(1)
        with pytest.raises(RunError, match="no"):
            one.wait_until_idle(2)
        one.wait_until_idle(2)


def test_ready_batches_are_used_before_a_later_error_is_raised() -> None:
    sampler = Sampler()
    with ahead(collector(sampler), staleness=2, in_flight=True) as one:
        sampler.allow(2)
        one.rollouts(1)
        until(lambda: len(one.state.ready) == 1)
        sampler.error = EngineError("the server is gone")
        sampler.allow(1)
        until(lambda: not one._thread.is_alive())  # type: ignore[union-attr]
        assert uids(one.rollouts(2)) == [2, 3]
        with pytest.raises(EngineError, match="the server is gone"):
            one.rollouts(3)


def test_the_end_waits_only_for_running_steps() -> None:
    """Requested steps that have not begun are neither drawn nor saved: a resume draws them."""
    sampler = Sampler()
    made = collector(sampler)
    with ahead(made, staleness=3) as one:
        sampler.allow(1)
        one.rollouts(1)
        until(lambda: len(sampler.calls) == 2)
        one.stop_after(2)
        sampler.allow(1)
        one.wait_until_idle(2)
        progress = one.state
        assert [uids(ready) for ready in progress.ready] == [[2, 3]]
        assert progress.draws == made.draws == 4
        one.close()
        assert not one._thread.is_alive()  # type: ignore[union-attr]
        assert len(sampler.calls) == 2


def test_a_checkpoint_saves_ready_batches_and_no_draws_of_running_steps() -> None:
    sampler = Sampler()
    made = collector(sampler)
    with ahead(made, staleness=3) as one:
        sampler.allow(2)
        one.rollouts(1)
        until(lambda: len(sampler.calls) == 3 and made.draws == 6)
        progress = one.state
        assert [uids(ready) for ready in progress.ready] == [[2, 3]]
        assert progress.draws == 4
        sampler.allow(9)
        one.wait_until_idle(2)  # waits for the third step, which has begun
        assert [uids(ready) for ready in one.state.ready][:2] == [[2, 3], [4, 5]]
        one.rollouts(2)
        assert uids(one.rollouts(3)) == [4, 5], "the run continues with it"


def test_the_waiting_trainer_makes_the_threads_calls() -> None:
    """An engine does this to recover a lost server in the middle of sampling."""
    sampler = Sampler()
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
    sampler = Sampler()
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
        assert not one._thread.is_alive()


def test_close_gives_up_on_a_request_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpocli.training.prefetch.CLOSE_SECONDS", 0.1)
    sampler = Sampler()
    with ahead(collector(sampler)) as one:
        sync(one, sampler, 1)
        sampler.allow(1)
        one.rollouts(1)
        one.close(wait=False)
        assert caplog.text == ""
        one.close()
        assert "still being collected" in caplog.text


@pytest.mark.parametrize("surplus", ["discard", "carry"])
def test_a_restored_run_continues_in_the_same_way(surplus: str, tmp_path: Path) -> None:
    """The rollout files are equal to the byte, discarded completions included."""

    def steps(one: Prefetcher, sampler: Sampler, first: int, last: int) -> list[Any]:
        got = []
        for step in range(first, last + 1):
            sync(one, sampler, step)
            collected = one.rollouts(step)
            records = records_of(collected, [], one.collector.algorithm, one.collector.reward_weights, step)
            write_rollouts(tmp_path / "rollouts.parquet", records, step)
            file = (tmp_path / "rollouts.parquet").read_bytes()
            got.append(
                (
                    collected.groups,
                    one.collector.advantages(collected.groups).tolist(),
                    without_times(collected.metrics),
                    file,
                )
            )
        return got

    overrides = ("algorithm=dapo", f"algorithm.keep.surplus={surplus}")
    mixed, flat = (0.0, 1.0), (1.0, 1.0)
    script = [mixed, flat, mixed, mixed, flat]
    sampler = Sampler(script)
    sampler.allow(999)
    with ahead(collector(sampler, *overrides), steps=8) as one:
        whole = steps(one, sampler, 1, 8)

    sampler = Sampler(script)
    sampler.allow(999)
    made = collector(sampler, *overrides)
    with ahead(made, steps=8) as one:
        halves = steps(one, sampler, 1, 4)
        one.wait_until_idle(5)
        progress = one.state
        saved_rollouts.save_prefetched(progress.ready, tmp_path)
        saved_rollouts.save_leftover(progress.leftover, tmp_path)
        assert all(step.untrained for step in progress.ready), "without discarded groups the test shows nothing"

    sampler = Sampler(script)
    sampler.allow(999)
    again = collector(sampler, *overrides)
    again.draws = progress.draws
    again.leftover = saved_rollouts.load_leftover(tmp_path, redraw, 2, ["r"], max_groups=2)
    ready = saved_rollouts.load_prefetched(tmp_path, again, redraw, wanted=True)
    assert len(ready) == 1
    with ahead(again, steps=8, done=4, ready=ready) as one:
        halves += steps(one, sampler, 5, 8)
    assert repr(halves) == repr(whole)


def test_a_step_that_was_not_trained_is_given_back_ahead() -> None:
    sampler = Sampler()
    sampler.allow(99)
    with ahead(collector(sampler), steps=8, returnable=True) as one:
        for step in (1, 2):
            sync(one, sampler, step)
            taken = one.rollouts(step)
        one.give_back()
        one.wait_until_idle(3)
        saved = one.state.ready
        assert uids(saved[0]) == uids(taken) == [2, 3]
        assert [uids(step) for step in saved[1:]] == [[4, 5]]


def test_a_step_that_was_not_trained_is_drawn_again() -> None:
    sampler = Sampler()
    sampler.allow(99)
    with ahead(collector(sampler), staleness=0, returnable=True) as one:
        one.rollouts(1)
        before = one.state
        taken = one.rollouts(2)
        assert one.state.draws > before.draws
        one.give_back()
        assert one.state == before
        again = collector(sampler)
        again.draws = one.state.draws
        assert uids(again.collect()) == uids(taken) == [2, 3]


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_spans_survive_a_checkpoint_and_a_changed_config_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Prompt("4", [1], "p")
    done = Completion([1, 2], [-1.0, -0.5], "stop", 3, spans=[(3, 1), (4, 1)])
    group = Group(prompt, [Rollout(prompt, done, "t", {"r": float("nan")})] * 2)
    made = collector(Sampler(), "algorithm=grpo")
    step = RolloutBatch([group], {"reward": 0.5}, untrained=[(Status.STALE, group)])
    saved_rollouts.save_prefetched([step], tmp_path)

    def load(size: int = 2, wanted: bool = True) -> list[RolloutBatch]:
        made.group_size = size
        return saved_rollouts.load_prefetched(tmp_path, made, redraw, wanted)

    assert repr(load()) == repr([step])
    assert caplog.text == ""
    assert load(size=3) == load(wanted=False) == []
    assert "1 steps collected ahead do not fit" in caplog.text


def test_discarded_groups_that_do_not_fit_do_not_drop_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the main process reads them, and all processes must agree."""
    made = collector(Sampler(), "algorithm=grpo")

    def group(prompt: Prompt) -> Group:
        return Group(prompt, [Rollout(prompt, Completion([1], [-1.0], "stop", 3), "t", {"r": 1.0})] * 2)

    kept, discarded = group(made.draw(4)), group(Prompt("5", [99], "no prompt of the task now"))
    step = RolloutBatch([kept], {}, untrained=[(Status.FILTERED, discarded)])
    saved_rollouts.save_prefetched([step], tmp_path)
    for is_main in (True, False):
        made.keeps_untrained = is_main
        (found,) = saved_rollouts.load_prefetched(tmp_path, made, redraw, wanted=True)
        assert (found.groups, found.untrained) == ([kept], [])
    assert caplog.text.count("1 of 1 groups of a rollout file do not fit") == 1


@pytest.mark.parametrize(
    ("correction", "version", "is_samplers"),
    [("none", 5, True), ("token_truncate", 5, False), ("none", 4, False), ("sampler", 4, True), ("sampler", 5, True)],
)
def test_the_old_policy_of_a_row_follows_its_staleness_and_the_correction(
    correction: str, version: int, is_samplers: bool
) -> None:
    """A stale row's is the sampler unless a correction relates both; with `sampler` every row's is."""
    prompt = Prompt("0", [1], "p")
    rollout = Rollout(prompt, Completion([3, 4], [-1.0, -0.5], "stop", version=4), "t", {})
    algorithm = built("algorithm=grpo", f"algorithm/correction={correction}")
    (row,) = step_rows_of([Group(prompt, [rollout])], torch.ones(1, 1), algorithm, version)
    assert (row.old_logp is not None) == is_samplers
    assert row.old_logp in (None, [-1.0, -0.5])
