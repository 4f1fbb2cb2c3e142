"""The pool of worker processes, and the rewards math and format that use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.family import wait_gone

from grpocli.errors import RunError
from grpocli.rewards.reward import Failure, Forfeit, Overrun
from grpocli.rewards.rule_based import Format, Math
from grpocli.rewards.worker_pool import PoolClosed, WorkerPool

pytestmark = pytest.mark.processes

ENDLESS = r"\boxed{\binom{10^7}{5 \cdot 10^6}}"


@pytest.fixture(scope="module")
def math():
    with closing(Math(workers=1, timeout=20)) as reward:
        yield reward


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A factory of pools that run a function of a small module: probes(seconds, workers) -> WorkerPool."""
    (tmp_path / "probes.py").write_text(
        "import os, pathlib, signal, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "def run(what):\n"
        "    if what in ('hang', 'note'): (here / 'tries').open('a').write(what + ' ')\n"
        "    if what == 'killed' and (left := (here / 'deaths').read_text()):\n"
        "        (here / 'deaths').write_text(left[1:])\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if what.startswith('hang'): time.sleep(600)\n"
        "    if what == 'wait': time.sleep(0.5)\n"
        "    if what == 'die': os._exit(1)\n"
        "    if what == 'raise': raise ValueError('no good')\n"
        "    if what == 'print': print('noise')\n"
        "    if what == 'eat': bytearray(2**40)\n"
        "    if what == 'environment': return list(os.environ)\n"
        "    return os.getpid() if what == 'pid' else 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pools: list[WorkerPool] = []

    def make(seconds: float = 30.0, workers: int = 2, function: str = "probes:run", **more: Any) -> WorkerPool:
        pools.append(WorkerPool(function, workers, seconds, **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_an_empty_or_missing_reference_is_a_failure(math: Math, sample) -> None:
    answers = [{"answer": "1"}, {"answer": "\\boxed{}"}, {}, {"answer": "no solution"}, {"answer": "???"}]
    good, empty, missing, text, marks = math([sample("1", **answer) for answer in answers])
    assert (good, text, marks) == (1.0, 0.0, 0.0)  # a text that is no mathematics is no failure of the data
    assert isinstance(empty, Failure)
    assert "boxed" in empty.reason
    assert isinstance(missing, Failure)
    assert "'answer'" in missing.reason


def test_a_completion_that_takes_too_long_is_wrong_and_a_reference_that_does_is_a_failure(sample) -> None:
    """Otherwise a model without the answer could avoid a score."""
    given = [("1", "1"), (ENDLESS, "1"), ("2", "1"), ("1", ENDLESS)]
    with closing(Math(workers=1, timeout=1, wrong=-1, require_evaluated=False)) as reward:
        one, endless, two, reference = reward([sample(text, answer=answer) for text, answer in given])
    assert (one, endless, two) == (1.0, -1.0, -1.0)
    assert isinstance(endless, Forfeit)
    assert "1 s" in endless.reason
    assert isinstance(reference, Failure)


@pytest.mark.parametrize(
    "text",
    [
        *(r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^7)!}", r"\boxed{\binom{99999999}{44444444}}", r"\boxed{2^{2^{100}}}"),
        *(r"\boxed{e^{10^{30}}}", r"\boxed{1.0000001^{10000000}}", "\\boxed{\\sqrt{" + "9" * 1000 + "}}"),
        *("\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}", "\\boxed{1" + "0" * 10**6 + "}", "{" * 10**5, "$" * 10**5),
    ],
)
def test_an_answer_that_is_too_large_or_too_deep_is_wrong_at_once(math: Math, sample, text: str) -> None:
    (score,) = math([sample(text, answer="1")])
    assert score == 0.0
    assert not isinstance(score, Forfeit)


def test_a_slow_answer_is_computed_once_for_a_majority(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[object]] = []

    def slow(pool: WorkerPool, items: list[list[object]]) -> list[object]:
        asked.extend(items)
        return [Overrun("slow") if any("!" in str(one) for one in item) else 0.0 for item in items]

    monkeypatch.setattr(WorkerPool, "map", slow)
    texts = [r"\boxed{1!}", r"\boxed{2!}", r"\boxed{3!}", r"\boxed{x}", r"\boxed{y}"]
    assert Math(workers=1).votes([sample(text) for text in texts]) == ["1!", "2!", "3!", "x", "y"]
    assert [sum(text in str(item) for item in asked) for text in ("1!", "2!", "3!")] == [1, 1, 1]


def test_a_completion_with_endless_backtracking_does_not_match(sample) -> None:
    with closing(Format(pattern="(a+)+b", timeout=0.5)) as reward:
        good, bad, after = reward([sample(text) for text in ("aab", "a" * 60, "b")])
    assert (good, after) == (1.0, 0.0)
    assert (bad, type(bad)) == (0.0, Forfeit)


@pytest.mark.parametrize(
    ("what", "reason"), [("die", "died"), ("raise", "no good"), ("eat", "MemoryError"), ("hang", "longer than 0.5 s")]
)
def test_a_broken_item_costs_only_its_own_result(probes, what: str, reason: str) -> None:
    pool = probes(seconds=0.5)
    scores = pool.map([[w] for w in ("ok", what, "print", "ok", "ok")])
    assert [s for i, s in enumerate(scores) if i != 1] == [1.0] * 4
    assert isinstance(scores[1], Failure)
    assert reason in scores[1].reason
    assert pool.map([["ok"], ["ok"]]) == [1.0, 1.0]


def test_calls_of_several_threads_run_at_once_and_end_together(probes) -> None:
    pool = probes(workers=4)
    pool.map([["pid"]] * 4)
    with ThreadPoolExecutor(4) as threads:
        begun = time.monotonic()
        assert [one.result() for one in [threads.submit(pool.map, [["wait"]]) for _ in range(4)]] == [[1.0]] * 4
        assert time.monotonic() - begun < 1.5, "one after the other they take two seconds"
        hanging = [threads.submit(pool.map, [["hang"]]) for _ in range(2)]
        time.sleep(0.3)
        pool.close()
        for one in hanging:
            with pytest.raises(PoolClosed):
                one.result(20)
    assert not pool._workers
    assert pool.map([["ok"]]) == [1.0], "a later run starts it again"


def test_workers_persist_between_calls_and_dead_ones_are_replaced(probes) -> None:
    pool = probes(workers=1)
    (first,) = pool.map([["pid"]])
    assert pool.map([["pid"]]) == [first]
    os.kill(int(first), signal.SIGKILL)
    time.sleep(0.2)
    (second,) = pool.map([["pid"]])
    assert isinstance(second, int)
    assert second != first


def test_a_worker_that_reads_nothing_misses_its_deadline(probes) -> None:
    """Also with more input than the connection holds."""
    pool = probes(seconds=0.5, workers=1)
    (worker,) = pool.map([["pid"]])
    os.kill(int(worker), signal.SIGSTOP)
    assert pool.map([["x" * 2**22], ["ok"]]) == [Overrun("it took longer than 0.5 s"), 1.0]


def test_close_ends_a_call_in_another_thread(probes, tmp_path: Path) -> None:
    pool, ended = probes(seconds=600, workers=1), []

    def score() -> None:
        with pytest.raises(PoolClosed, match="was ended while it scored"):
            pool.map([["hang"], ["ok"]])
        ended.append(True)

    thread = threading.Thread(target=score)
    thread.start()
    while not (tmp_path / "tries").exists():
        time.sleep(0.01)
    pool.close()
    thread.join(30)
    assert ended
    assert not pool._workers
    assert pool.map([["ok"]]) == [1.0], "it can be used again"


def test_a_worker_that_cannot_start_reports_the_reason(probes) -> None:
    with pytest.raises(RunError, match="No module named 'nowhere'"):
        probes(function="nowhere:run").map([["ok"]])


def test_workers_ignore_signals_for_the_run(probes) -> None:
    """A scheduler signals every process of a job, and the run still finishes its step."""
    pool = probes(workers=1)
    (worker,) = pool.map([["pid"]])
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(int(worker), number)
    assert pool.map([["pid"]]) == [worker]


def test_workers_do_not_get_keys_from_the_environment(probes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SEARCH_KEY", "PYTHON_PACKAGES_TOKEN"):
        monkeypatch.setenv(name, "secret")
    (seen,) = probes(workers=1, variables=("SEARCH_KEY",)).map([["environment"]])
    assert {"PATH", "PYTHONPATH", "SEARCH_KEY"} <= set(seen)
    assert not {"HF_TOKEN", "WANDB_API_KEY", "PYTHON_PACKAGES_TOKEN"} & set(seen)


def test_workers_die_with_a_killed_parent(probes, tmp_path: Path) -> None:
    """This includes a worker that hangs and reads no input."""
    script = (
        "import sys, threading\n"
        "from grpocli.rewards.worker_pool import WorkerPool\n"
        "pool = WorkerPool('probes:run', 1, 600)\n"
        "print(int(pool.map([['pid']])[0]), flush=True)\n"
        "pool.map([['hang']])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
    assert wait_gone([worker], 10) == []


def test_after_eight_slow_items_the_timeout_is_a_tenth(probes) -> None:
    found = probes(0.4, workers=2).map([[f"hang {i}"] for i in range(12)] + [["ok"]])
    reasons = [one.reason for one in found[:12] if isinstance(one, Overrun)]
    assert len(reasons) == 12
    assert reasons[:8] == ["it took longer than 0.4 s"] * 8
    assert reasons[-2:] == ["it took longer than 0.04 s"] * 2
    assert found[12] == 1.0


@pytest.mark.parametrize(
    ("deaths", "score"), [(1, 1.0), (2, Failure("its worker process was killed twice"))], ids=["once", "twice"]
)
def test_an_item_whose_worker_is_killed_from_outside_is_retried_once(
    probes, tmp_path: Path, deaths: int, score: object
) -> None:
    """The worker sends itself SIGKILL, as the kernel does when memory runs out."""
    (tmp_path / "deaths").write_text("x" * deaths)
    found = probes(workers=1).map([["killed"], ["ok"]])
    assert found == [score, 1.0]
    assert type(found[0]) is type(score)  # not an Overrun
