"""task.order and task.no_resampling_pass_rate: what is drawn follows from the seed, the draw and the scores so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.curriculum import (
    Order,
    Outcome,
    ProblemScores,
    TaskScheduler,
    difficulty_ranks,
    load_problems,
    outcomes_of,
    save_problems,
)
from grpocli.tasks.prompt_source import PromptSource
from grpocli.tasks.table import Jsonl
from grpocli.types import Prompt


@given(n=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = Order(n, seed)
    assert sorted(order.index(epoch * n + i) for i in range(n)) == list(range(n))


@given(draws=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_draw_does_not_depend_on_earlier_draws(draws: list[int]) -> None:
    order = Order(7, seed=1)
    assert [order.index(d) for d in draws] == [Order(7, seed=1).index(d) for d in draws]


def test_the_order_is_pinned() -> None:
    order = Order(6, seed=0)
    assert [[order.index(e * 6 + i) for i in range(6)] for e in range(2)] == ORDER


@given(
    weights=st.lists(st.floats(0.05, 10), min_size=2, max_size=6), seed=st.integers(0, 2**40), at=st.integers(0, 9999)
)
def test_tasks_keep_their_shares_in_every_part_of_the_order(weights: list[float], seed: int, at: int) -> None:
    rotation = TaskScheduler(weights, seed)
    stretch = Counter(rotation.of(draw)[0] for draw in range(at, at + 200))
    for task, weight in enumerate(weights):
        assert abs(stretch[task] - 200 * weight / sum(weights)) < 6


def test_the_count_of_a_tasks_draws_does_not_depend_on_the_order_of_calls() -> None:
    rotation, counts = TaskScheduler([1, 2, 1], seed=5), Counter[int]()
    late = TaskScheduler([1, 2, 1], seed=5).of(5000)
    for draw in range(5001):
        found = rotation.of(draw)
        assert found[1] == counts[found[0]]
        counts[found[0]] += 1
    assert found == late
    assert [TaskScheduler([1, 2, 1], seed=s).of(0) for s in range(9)] != [rotation.of(0)] * 9


ORDER = [[3, 2, 1, 0, 4, 5], [4, 5, 1, 2, 0, 3]]


N = 12
STREAM = {"streaming": True, "shuffle_buffer": 5}
DRAW = Callable[[int], float]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """N problems; `level` falls with the row, and `rate` is text."""
    rows = [{"prompt": "abcdefghijkl"[i], "answer": "a", "level": N - i, "rate": f"{i % 4}/10"} for i in range(N)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "m", "answer": "a"}\n')
    return path


@pytest.fixture(scope="module")
def run() -> Any:
    return build_run(compose([]))


@pytest.fixture
def source(file: Path, run: Any, plain_tokenizer: Any) -> Callable[..., PromptSource]:
    """The prompts of a run on the file, with these keys of its task."""

    def make(**keys: Any) -> PromptSource:
        task = Jsonl(path=str(file), eval_path=f"{file.parent}/eval.jsonl", **keys)
        return PromptSource.of(replace(run, task=task), plain_tokenizer)

    return make


class Steps:
    """Draws steps, and makes known that problem `row` has the pass rate `rate(row)` of four completions."""

    def __init__(self, data: PromptSource, per_step: int, rate: DRAW = lambda row: 0.5, draws: int = 0) -> None:
        self.data, self.per_step, self.rate = data, per_step, rate
        self.draws, self.step = draws, draws // per_step

    def next(self) -> list[int]:
        """The rows of the next step."""
        curriculum = self.data.curriculum
        curriculum.begin_step(self.step)
        prompts = [self.data.draw(number) for number in range(self.draws, self.draws + self.per_step)]
        self.draws, self.step = self.draws + self.per_step, self.step + 1
        curriculum.end_step(self.step, [self.outcome(prompt) for prompt in prompts])
        return [prompt.row for prompt in prompts if prompt.row is not None]

    def outcome(self, prompt: Prompt) -> Outcome:
        assert prompt.row is not None
        return Outcome(prompt.task, prompt.row, 4, round(4 * self.rate(prompt.row)))

    def rows(self, steps: int) -> list[int]:
        return [row for _ in range(steps) for row in self.next()]


def test_shuffled_draws_are_those_of_earlier_versions(source: Any) -> None:
    """Scores do not change them, and a draw follows from its number alone."""
    data, order = source(), Order(N, 0)
    drawn = Steps(data, 5, lambda row: 1.0).rows(8)
    assert drawn == [order.index(d) for d in range(40)]
    assert [data.draw(d).row for d in (39, 3)] == [drawn[39], drawn[3]]


def test_a_curriculum_without_effect_is_shuffled(source: Any) -> None:
    assert [source(order="file").draw(d).row for d in range(2 * N + 3)] == [d % N for d in range(2 * N + 3)]
    for options in ({"no_resampling_pass_rate": 1.0}, {"order": "difficulty"}):
        data = source(**options)
        order = Order(N, 0)
        assert Steps(data, 5).rows(8) == [order.index(d) for d in range(40)], options


def test_difficulty_goes_from_easy_to_hard_in_every_epoch_after_the_first(source: Any) -> None:
    def rate(row: int) -> float:
        return row % 3 / 2

    drawn = Steps(source(order="difficulty"), 4, rate).rows(3 * N // 4)
    assert drawn[:N] == [Order(N, 0).index(d) for d in range(N)]
    for epoch in (1, 2):
        rows = drawn[epoch * N : (epoch + 1) * N]
        assert sorted(rows) == list(range(N))
        rates = [rate(row) for row in rows]
        assert rates == sorted(rates, reverse=True)
        ties = [row for row in rows if rate(row) == 1]
        place = {Order(N, 0).index(epoch * N + i): i for i in range(N)}
        assert ties == sorted(ties, key=place.__getitem__), "equal ones are in the shuffled order of the epoch"


@pytest.mark.parametrize(
    ("column", "key"),
    [("level", lambda row: N - row), ("-level", lambda row: row), ("rate", lambda row: row % 4)],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_orders_problems_from_the_first_epoch(source: Any, column: str, key: DRAW, streaming: bool) -> None:
    drawn = Steps(source(order="difficulty", difficulty_column=column, streaming=streaming), 4).rows(2 * N // 4)
    for rows in (drawn[:N], drawn[N:]):
        assert sorted(rows) == list(range(N))
        assert [key(row) for row in rows] == sorted(key(row) for row in rows)


def test_a_solved_problem_rests_for_the_rest_of_the_run(source: Any) -> None:
    steps = Steps(source(no_resampling_pass_rate=0.75), 4, lambda row: 0.75 if row < 6 else 0.5)
    drawn = Counter(steps.rows(9))
    assert [drawn[row] for row in range(6)] == [1] * 6
    assert min(drawn[row] for row in range(6, N)) >= 4
    assert steps.data.curriculum.metrics()["curriculum/resting"] == 6


def test_the_last_group_decides(source: Any) -> None:
    """A problem that was solved rests although its running mean is low; one that was solved half does not."""
    data = source(no_resampling_pass_rate=0.75)
    scores = data.curriculum.scores["jsonl"]
    for right, step in ((0, 1), (0, 2), (3, 3)):
        scores.add(5, 4, right, step)
    scores.add(6, 4, 4, 1)
    scores.add(6, 4, 2, 2)
    assert scores.pass_rate(5) == 0.25
    drawn = set(Steps(data, 4).rows(9))
    assert drawn == set(range(N)) - {5}


@pytest.mark.parametrize("options", [{}, STREAM], ids=str)
def test_when_all_problems_rest_all_are_drawn_again(source: Any, options: dict[str, Any]) -> None:
    steps = Steps(source(no_resampling_pass_rate=1.0, **options), 4, lambda row: 1.0)
    assert sorted(steps.rows(3)) == list(range(N))
    assert steps.data.curriculum.warnings() == {}
    again = steps.next()
    (said,) = steps.data.curriculum.warnings().values()
    assert said == "all problems of jsonl rested: each reached no_resampling_pass_rate=1; they are drawn again"
    assert sorted(again + steps.rows(2)) == list(range(N)), "each once, and then it rests again"


def test_scores_are_known_to_the_next_step(source: Any) -> None:
    steps = Steps(source(no_resampling_pass_rate=1.0), 2 * N, lambda row: float(row == 3))
    first = steps.next()
    assert first.count(3) == 2, "the scores of a step are not known within it"
    assert 3 not in steps.next()


@pytest.mark.parametrize(
    "options",
    [
        {"order": "difficulty"},
        {"order": "difficulty", **STREAM},
        {"order": "file", **STREAM},
        {"no_resampling_pass_rate": 0.75},
        {"no_resampling_pass_rate": 0.75, **STREAM},
        {"order": "difficulty", "difficulty_column": "level", "no_resampling_pass_rate": 1.0},
    ],
    ids=str,
)
def test_a_resume_continues_exactly(source: Any, options: dict[str, Any], tmp_path: Path) -> None:
    def rate(row: int) -> float:
        return row % 5 / 4

    whole = Steps(source(**options), 5, rate)
    expected = [whole.next() for _ in range(9)]
    for done in range(9):
        first = Steps(source(**options), 5, rate)
        first.rows(done)
        save_problems(first.data.curriculum.state(), tmp_path)
        again = source(**options)
        again.curriculum.restore(load_problems(tmp_path), again.drawn(5 * done))
        rest = Steps(again, 5, rate, 5 * done)
        assert [rest.next() for _ in range(9 - done)] == expected[done:]
    assert repr(rest.data.curriculum.state()) == repr(whole.data.curriculum.state())


def test_an_order_may_change_in_a_resume(source: Any) -> None:
    """The problems that this epoch has had come in the next one, whichever order drew them."""
    first = Steps(source(), 5)
    drawn = first.rows(1)
    again = source(order="difficulty")
    again.curriculum.restore(first.data.curriculum.state(), again.drawn(5))
    assert sorted(drawn + [again.draw(d).row for d in range(5, N)]) == list(range(N))
    resting = source(no_resampling_pass_rate=0.5)
    resting.curriculum.restore(first.data.curriculum.state(), resting.drawn(5))
    assert set(Steps(resting, 5, draws=5).rows(1)).isdisjoint(drawn), "scores are kept before they are used"


def test_a_draw_is_found_again_by_its_row(source: Any) -> None:
    for options in ({}, {"order": "difficulty"}, {"order": "difficulty", **STREAM}):
        data = source(**options)
        drawn = [data.draw(number) for number in range(2 * N)]
        assert [data.redraw(int(prompt.uid), prompt.row) for prompt in drawn] == drawn
    assert data.redraw(0, 10**6) is None


def test_each_task_of_a_mixture_has_its_own_order(file: Path, plain_tokenizer: Any) -> None:
    other = file.with_name("other.jsonl")
    other.write_text("".join(json.dumps({"prompt": f"n o {c}", "answer": "a"}) + "\n" for c in "abcdefgh"))
    config = ["task=[jsonl]", "+task@task.two=jsonl", f"task.jsonl.path={file}", f"task.two.path={other}"]
    config += ["task.jsonl.order=file", "task.two.no_resampling_pass_rate=1", "eval.problems=0"]
    config += [f"task.{name}.eval_path={file.parent}/eval.jsonl" for name in ("jsonl", "two")]
    data = PromptSource.of(build_run(compose(config)), plain_tokenizer)
    steps = Steps(data, 8, lambda row: float(row == 0))
    drawn: dict[str, list[int]] = {"jsonl": [], "two": []}
    for number in range(48):
        if number % 8 == 0:
            data.curriculum.begin_step(number // 8)
        prompt = data.draw(number)
        drawn[prompt.task].append(prompt.row)  # type: ignore[arg-type]
        data.curriculum.end_step(number // 8 + 1, [steps.outcome(prompt)])
    counts = data.drawn(48)
    assert counts == {name: len(rows) for name, rows in drawn.items()}
    assert drawn["jsonl"] == [i % N for i in range(counts["jsonl"])]
    assert Counter(drawn["two"])[0] <= 2
    assert set(data.curriculum.state()) == {"jsonl", "two"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    groups=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 4)), max_size=30),
)
def test_scores_are_means_over_all_completions_and_survive_a_file(
    groups: Sequence[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    scores, folder = ProblemScores(), tmp_path_factory.mktemp("scores")
    kept = [(row, n, min(right, n)) for row, n, right in groups]
    for step, group in enumerate(kept, 1):
        scores.add(*group, step)
    for row in range(6):
        own = [(n, right) for r, n, right in kept if r == row]
        expected = sum(right for _, right in own) / sum(n for n, _ in own) if own else None
        assert scores.pass_rate(row) == expected
        solved = bool(own and own[-1][1] / own[-1][0] >= 0.5)
        assert scores.solved(np.array([row]), 0.5, 0).tolist() == [solved]
    save_problems({"a": scores.table}, folder)
    again = load_problems(folder)["a"]
    assert {name: values.tolist() for name, values in scores.table.items()} == {
        name: values.tolist() for name, values in again.items()
    }


def test_unscored_completions_do_not_count() -> None:
    nan = float("nan")
    prompts = [Prompt(str(i), [1], "p", {"task_name": "t"}, row) for i, row in enumerate((3, 4, None))]
    found = outcomes_of(prompts, [[1.0, nan, 0.5, 2.0], [nan, nan], [1.0]])
    assert found == [Outcome("t", 3, 3, 2), Outcome("t", 4, 0, 0)]
    scores = ProblemScores()
    scores.add(4, 0, 0, 1)
    assert len(scores) == 0


def ranks(column: str, *values: Any) -> list[float]:
    found = difficulty_ranks({i: (value, f"row {i}") for i, value in enumerate(values)}, column)
    return [found[i] for i in range(len(values))]


def test_values_of_a_column_are_numbers_or_text_with_numbers() -> None:
    assert ranks("d", 3, "1.5", 2) == [3, 1.5, 2]
    assert ranks("-d", 3, 1) == [-3, -1]
    assert ranks("d", "Level 10", "Level 2", "Level 2") == [1, 0, 0]
    for wrong in (["task.order=random"], ["task.no_resampling_pass_rate=0"], ["task.difficulty_column=level"]):
        with pytest.raises(ConfigError) as refused:
            build_run(compose(wrong))
        assert refused.value.key == wrong[0].partition("=")[0]
    for values in ((1, None), ("a", 3), (float("nan"), 1), ("", "a"), ([1], [2])):
        with pytest.raises(ConfigError, match=r"row \d has .* there") as refused:
            ranks("d", *values)
        assert refused.value.key == "task.difficulty_column"
