"""Trials of `make chaos`, its table, and trials that repeat from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.damages import WEIGHTS, Damage
from chaos.data import BadRow
from chaos.faults import Fault
from chaos.keyless import Keyless
from chaos.runner import KINDS, select
from chaos.sandbox_attacks import EXISTS, LIES, Attack
from chaos.servers import STAND_IN
from chaos.trial import Kind, Skipped, Trial, draw_trials
from chaos.workspace import Shared, Workspace

from grpocli.rollout.vllm.client import GENERATE

ASKED = {
    "kills": 60,
    "damages": 40,
    "disks": 14,
    "faults": 40,
    "data": 30,
    "rewards": 40,
    "sandbox": 150,
    "keyless": 2000,
}
RUNS: list[Trial] = [  # whole runs; test_survival.py and test_python_reward.py have kills and rewards that misbehave
    Damage("one flipped bit", WEIGHTS, fallback=False, seed=1),
    Fault("log-probs that are NaN", GENERATE, 5, 1, STAND_IN),
]
SHORT: list[Trial] = [
    Keyless(STAND_IN, seed=1),
    BadRow("a NUL byte", 7),
    Attack("namespaces", "sees a file", EXISTS, "assert attack('/etc/passwd')", probe=True),
    Attack("namespaces", "lies", LIES["by what is collected"], "assert answer() == 42"),
]


@pytest.fixture(scope="module")
def shared(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        made = Shared(tmp_path_factory.mktemp("chaos"))
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.survival
@pytest.mark.parametrize("trial", RUNS + SHORT, ids=str)
def test_promises_hold(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    try:
        trial.execute(Workspace(tmp_path, shared))
    except Skipped as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_same_seed_draws_the_same_trials(kind: Kind) -> None:
    trials = draw_trials(kind, 3)
    assert trials == draw_trials(kind, 3)
    assert [one.trial for one in trials] != [one.trial for one in draw_trials(kind, 4)]
    assert sum(one.trial.attacks for one in trials) >= ASKED[kind.name]
    assert select([], 0, None, [trials[5].name]) == [trials[5]]
