"""One or two trials of each kind of `make chaos`, its table, and trials that repeat from a seed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import kills
from chaos.damages import WEIGHTS, Damage
from chaos.data import BadRow
from chaos.faults import Fault
from chaos.keyless import Keyless
from chaos.kills import Kill
from chaos.rewards import Misbehaviour
from chaos.runner import KINDS, run_trials, select
from chaos.sandbox_attacks import EXISTS, LIES, Attack
from chaos.servers import STAND_IN
from chaos.table import BEGIN, END, as_markdown, replaced
from chaos.trial import Kind, NumberedTrial, PromiseBroken, Skipped, Trial, draw_trials
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
RUNS: list[Trial] = [  # whole runs
    Kill("engine=transformers", kills.RUN, signal.SIGKILL, "in a step", 2, 0.05),
    Damage("one flipped bit", WEIGHTS, fallback=False, seed=1),
    Fault("log-probs that are NaN", GENERATE, 5, 1, STAND_IN),
    Misbehaviour("a catastrophic regex", 2, prefetch=False),
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


def hold(trial: Trial, shared: Shared, folder: Path) -> None:
    try:
        trial.execute(Workspace(folder, shared))
    except Skipped as error:
        pytest.skip(str(error))


@pytest.mark.survival
@pytest.mark.parametrize("trial", RUNS, ids=str)
def test_promises_of_a_run_hold(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    hold(trial, shared, tmp_path)


@pytest.mark.survival
@pytest.mark.parametrize("trial", SHORT, ids=str)
def test_promises_without_a_run_hold(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    hold(trial, shared, tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_same_seed_draws_the_same_trials(kind: Kind) -> None:
    trials = draw_trials(kind, 3)
    assert trials == draw_trials(kind, 3)
    assert [one.trial for one in trials] != [one.trial for one in draw_trials(kind, 4)]
    assert sum(one.trial.attacks for one in trials) >= ASKED[kind.name]
    assert select([], 0, None, [trials[5].name]) == [trials[5]]


class PassingTrial:
    attacks = 1

    def execute(self, workspace: Workspace) -> None:
        (workspace.folder / "file").touch()


class FailingTrial(PassingTrial):
    attacks = 3

    def execute(self, workspace: Workspace) -> None:
        raise PromiseBroken("a file is missing")


class WrongTrial(PassingTrial):
    def execute(self, workspace: Workspace) -> None:
        raise KeyError("a fault of the trial")


class SkippedTrial(PassingTrial):
    def execute(self, workspace: Workspace) -> None:
        raise Skipped("needs a GPU")


def test_the_table_counts_trials_by_outcome(tmp_path: Path) -> None:
    kinds = KINDS[:2]
    trials = [
        NumberedTrial(kinds[0], 7, PassingTrial()),
        NumberedTrial(kinds[0], 8, FailingTrial()),
        NumberedTrial(kinds[0], 9, WrongTrial()),
    ]
    trials += [NumberedTrial(kinds[1], 7, SkippedTrial()), NumberedTrial(kinds[1], 8, PassingTrial())]
    rows = as_markdown(trials, list(run_trials(trials, Shared(tmp_path)))).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[2:] == [
        [kinds[0].name, "5", "5", "1", "8, 9", "0"],
        [kinds[1].name, "2", "1", "1", "none", "1: needs a GPU"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kills_8", "kills_9"], "folders of failed trials remain"


def test_a_trial_after_the_deadline_is_not_run(tmp_path: Path) -> None:
    trials = [NumberedTrial(KINDS[0], 7, PassingTrial())]
    outcomes = list(run_trials(trials, Shared(tmp_path), deadline=0.0))
    row = as_markdown(trials, outcomes).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["kills", "1", "0", "0", "none", "0"]


def test_only_the_table_on_a_page_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(page, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(replaced(page, "other\n"), "new\n") == replaced(page, "new\n")
