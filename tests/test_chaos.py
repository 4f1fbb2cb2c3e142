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


class Scripted:
    """A trial that raises an error, or passes."""

    def __init__(self, error: Exception | None = None, attacks: int = 1) -> None:
        self.error, self.attacks = error, attacks

    def execute(self, workspace: Workspace) -> None:
        (workspace.folder / "file").touch()
        if self.error:
            raise self.error


def cells(trials: list[NumberedTrial], outcomes: list[object]) -> list[list[str]]:
    """The table's rows below its head."""
    rows = as_markdown(trials, outcomes).splitlines()[2:]  # type: ignore[arg-type]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_counts_trials_by_outcome(tmp_path: Path) -> None:
    kinds = KINDS[:2]
    failing, wrong = Scripted(PromiseBroken("a file is missing"), 3), Scripted(KeyError("a fault of the trial"))
    trials = [NumberedTrial(kinds[0], n, one) for n, one in ((7, Scripted()), (8, failing), (9, wrong))]
    trials += [NumberedTrial(kinds[1], n, one) for n, one in ((7, Scripted(Skipped("needs a GPU"))), (8, Scripted()))]
    assert cells(trials, list(run_trials(trials, Shared(tmp_path)))) == [
        [kinds[0].name, "5", "5", "1", "8, 9", "0"],
        [kinds[1].name, "2", "1", "1", "none", "1: needs a GPU"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kills_8", "kills_9"], "folders of failed trials remain"
    late = list(run_trials(trials[:1], Shared(tmp_path), deadline=0.0))
    assert cells(trials[:1], late) == [["kills", "1", "0", "0", "none", "0"]]


def test_only_the_table_on_a_page_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(page, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(replaced(page, "other\n"), "new\n") == replaced(page, "new\n")
