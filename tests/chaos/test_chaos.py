"""`make chaos` in short: one or two trials of each kind, its table, and trials that repeat from a seed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import kills
from chaos.attacks import LIES, THERE, Attack
from chaos.damages import WEIGHTS, Damage
from chaos.data import BadRow
from chaos.faults import Fault
from chaos.keyless import Keyless
from chaos.kills import Kill
from chaos.kinds import KINDS
from chaos.place import Place, Shared
from chaos.rewards import Misbehaviour
from chaos.servers import STAND_IN
from chaos.table import BEGIN, END, as_markdown, replaced
from chaos.trial import Kind, LeftOut, Lost, Numbered, Trial, drawn
from chaos.tries import chosen, tried

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
RUNS: list[Trial] = [  # whole runs; other files have a test of each in `make test`
    Kill("engine=transformers", kills.RUN, signal.SIGKILL, "in a step", 2, 0.05),
    Damage("one flipped bit", WEIGHTS, fallback=False, seed=1),
    Fault("status 503", GENERATE, 5, 1, STAND_IN),
    Fault("log-probs that are NaN", GENERATE, 5, 1, STAND_IN),
    Misbehaviour("a catastrophic regex", 2, ahead=False),
]
SHORT: list[Trial] = [
    Keyless(STAND_IN, seed=1),
    BadRow("a key twice", 7),
    Attack("namespaces", "sees a file", THERE, "assert attack('/etc/passwd')", probe=True),
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
        trial.hold(Place(folder, shared))
    except LeftOut as error:
        pytest.skip(str(error))


@pytest.mark.survival
@pytest.mark.parametrize("trial", RUNS, ids=str)
def test_a_run_holds(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    hold(trial, shared, tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("trial", SHORT, ids=str)
def test_a_trial_without_a_run_holds(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    hold(trial, shared, tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_same_seed_draws_the_same_trials(kind: Kind) -> None:
    trials = drawn(kind, 3)
    assert trials == drawn(kind, 3)
    assert [one.trial for one in trials] != [one.trial for one in drawn(kind, 4)]
    assert sum(one.trial.attacks for one in trials) >= ASKED[kind.name]
    assert chosen([], 0, None, [trials[5].name]) == [trials[5]]


class Held:
    attacks = 1

    def hold(self, place: Place) -> None:
        (place.folder / "file").touch()


class LostOne(Held):
    attacks = 3

    def hold(self, place: Place) -> None:
        raise Lost("it is gone")


class Broken(Held):
    def hold(self, place: Place) -> None:
        raise KeyError("a trial that is wrong itself")


class NotHere(Held):
    def hold(self, place: Place) -> None:
        raise LeftOut("needs a GPU")


def test_the_table_counts_what_was_tried(tmp_path: Path) -> None:
    kinds = KINDS[:2]
    trials = [Numbered(kinds[0], 7, Held()), Numbered(kinds[0], 8, LostOne()), Numbered(kinds[0], 9, Broken())]
    trials += [Numbered(kinds[1], 7, NotHere()), Numbered(kinds[1], 8, Held())]
    rows = as_markdown(trials, list(tried(trials, Shared(tmp_path)))).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[2:] == [
        [kinds[0].name, "5", "5", "1", "8, 9", "0"],
        [kinds[1].name, "2", "1", "1", "none", "1: needs a GPU"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kills_8", "kills_9"], "lost ones stay to be looked at"


def test_a_trial_without_time_left_does_not_count_as_tried(tmp_path: Path) -> None:
    trials = [Numbered(KINDS[0], 7, Held())]
    outcomes = list(tried(trials, Shared(tmp_path), deadline=0.0))
    row = as_markdown(trials, outcomes).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["kills", "1", "0", "0", "none", "0"]


def test_only_the_table_of_a_page_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(page, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(replaced(page, "other\n"), "new\n") == replaced(page, "new\n")
