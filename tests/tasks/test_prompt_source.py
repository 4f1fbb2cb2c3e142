"""Tasks of a run: their order, `task=[A,B]`, and what is drawn, which follows from the seed and the draw's number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conf_files import WRITTEN_FROM
from hypothesis import given
from hypothesis import strategies as st
from jsonl import write

from grpocli.composition.compose import build_run, compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.errors import ConfigError
from grpocli.tasks.prompt_source import PromptSource, TaskScheduler, difficulty_of, problem_order
from grpocli.tasks.table import Jsonl
from grpocli.tasks.task import errors_below, permutation


@given(n=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(problem_order(n, "shuffled", None, seed, epoch)) == list(range(n))


def test_the_order_is_pinned() -> None:
    assert [permutation(6, 0, epoch).tolist() for epoch in range(2)] == [[3, 2, 1, 0, 4, 5], [4, 5, 1, 2, 0, 3]]


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


N = 12


@pytest.fixture
def source(tmp_path: Path, plain_tokenizer: Any) -> Callable[..., PromptSource]:
    """The prompts of a run on N problems, with these keys of its task. `level` falls with the row, `rate` is text."""
    rows = [{"prompt": "abcdefghijkl"[i], "answer": "a", "level": N - i, "rate": f"0.{i % 4}"} for i in range(N)]
    train = write(tmp_path / "train.jsonl", rows)
    held_out = write(tmp_path / "eval.jsonl", [{**rows[0], "prompt": "m"}])
    run = run_of()

    def make(**keys: Any) -> PromptSource:
        return PromptSource.of(replace(run, task=Jsonl(path=train, eval_path=held_out, **keys)), plain_tokenizer)

    return make


def drawn(data: PromptSource, draws: int) -> list[int]:
    return [int(data.draw(number).row or 0) for number in range(draws)]


def test_prompts_are_drawn_in_the_order_of_the_task(source: Any) -> None:
    shuffled = drawn(source(), 3 * N)
    assert shuffled == [row for epoch in range(3) for row in permutation(N, 0, epoch)]
    assert drawn(source(order="file"), 2 * N + 3) == [d % N for d in range(2 * N + 3)]
    for column, key in (("level", lambda row: N - row), ("-level", lambda row: row), ("rate", lambda row: row % 4)):
        data = source(order="difficulty", difficulty_column=column)
        found = drawn(data, 2 * N)
        for epoch, rows in enumerate((found[:N], found[N:])):
            place = shuffled[epoch * N : (epoch + 1) * N].index
            assert rows == sorted(range(N), key=lambda row: (key(row), place(row))), "ties as in the shuffled order"
        assert [data.draw(d).row for d in (2 * N - 1, 3)] == [found[-1], found[3]]


def test_values_of_a_column_are_numbers_or_text() -> None:
    def difficulty(column: str, *values: Any) -> list[float]:
        return difficulty_of(values, column, "row {}".format).tolist()

    assert difficulty("d", 3, "1.5", 2) == [3, 1.5, 2]
    assert difficulty("-d", 3, 1) == [-3, -1]
    assert difficulty("d", "Level 5", "Level 2", "Level 2") == [1, 0, 0]
    for wrong in (["task.order=random"], ["task.difficulty_column=level"]):
        with pytest.raises(ConfigError) as refused:
            run_of(*wrong)
        assert refused.value.key == wrong[0].partition("=")[0]
    for values in ((1, None), (float("nan"), 1), ("", "a"), ([1], [2])):
        with pytest.raises(ConfigError, match=r"row \d has .* there") as refused:
            difficulty("d", *values)
        assert refused.value.key == "task.difficulty_column"


def texts(path: Path, *prompts: str) -> str:
    return write(path, [{"prompt": prompt, "answer": "a"} for prompt in prompts])


def run_of(*overrides: str) -> Any:
    return build_run(compose([*overrides]))


def test_a_task_is_named_after_its_choice_or_by_its_key() -> None:
    for path in Path(conf_dir(), "task").glob("[!_]*.yaml"):
        named = compose([f"task={path.stem}"]).task.get("task_name") == path.stem
        assert named or path.stem == "mixture" or WRITTEN_FROM in path.read_text(), path.stem
    for chosen, name in ((["task=gsm8k"], "gsm8k"), (["task=hub", "task.path=a/b", "task.task_name=ours"], "ours")):
        assert list(run_of(*chosen).tasks) == [name]


def test_each_task_has_keys_below_its_name() -> None:
    config = compose(["task=[arithmetic,dapo-math-17k]", "task.arithmetic.weight=2", "task.dapo-math-17k.eval_size=3"])
    tasks: dict[str, Any] = build_run(config).tasks
    assert list(tasks) == ["arithmetic", "dapo-math-17k"]
    assert tasks["arithmetic"].weight == 2
    assert tasks["dapo-math-17k"].eval_size == 3


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task=[]"], "task"),
        (["task=[arithmetic,gsm8k,arithmetic]"], "task"),
        (["task=[arithmetik,gsm8k]"], "task"),
        (["task=[arithmetic,gsm8k]", "task.arithmetic.wieght=2"], "task.arithmetic.wieght"),
        (["task=[arithmetic,gsm8k]", "task.arithmetic.rewards=[exact_mtach]"], "task.arithmetic.rewards"),
    ],
)
def test_bad_mixtures_are_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_of(*overrides)
    assert refused.value.key in (key, "")


def two_tasks(tmp_path: Path, *overrides: str) -> Any:
    one, two = texts(tmp_path / "one.jsonl", "a a", "a b", "a c"), texts(tmp_path / "two.jsonl", "b a", "b b")
    mixture = ["task=mixture", "+task@task.one=jsonl", "+task@task.two=jsonl"]
    return run_of(*mixture, f"task.one.path={one}", f"task.two.path={two}", *overrides)


def test_draws_follow_weights_and_each_task_has_epochs(tmp_path: Path, plain_tokenizer) -> None:
    data = PromptSource.of(two_tasks(tmp_path, "task.one.weight=3", "eval.problems=0"), plain_tokenizer)
    prompts = [data.draw(number) for number in range(400)]
    assert [prompt.uid for prompt in prompts[:3]] == ["0", "1", "2"]
    drawn = Counter(prompt.task for prompt in prompts)
    assert drawn["one"] == pytest.approx(300, abs=3)
    for task in ("one", "two"):
        times = Counter(str(prompt.text) for prompt in prompts if prompt.task == task).values()
        assert max(times) - min(times) <= 1
    assert [data.draw(number) for number in (399, 7)] == [prompts[399], prompts[7]]


def test_every_task_has_evaluation_problems(tmp_path: Path, plain_tokenizer) -> None:
    data = PromptSource.of(two_tasks(tmp_path), plain_tokenizer)
    problems = data.problems()
    assert Counter(problem.task for problem in problems) == {"one": 1, "two": 1}
    assert len({problem.uid for problem in problems}) == 2


def test_training_on_evaluation_problems_is_refused(tmp_path: Path, plain_tokenizer) -> None:
    other = texts(tmp_path / "other.jsonl", "c", "a b")
    held_out = [f"task.two.eval_path={other}", f"task.one.eval_path={texts(tmp_path / 'others.jsonl', 'c c')}"]
    said = r"1 of the 2 evaluation problems of two are also training problems of one.*'a b'"
    with pytest.raises(ConfigError, match=said):
        PromptSource.of(two_tasks(tmp_path, *held_out), plain_tokenizer)
    PromptSource.of(two_tasks(tmp_path, *held_out, "task.two.allow_overlap=true"), plain_tokenizer)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ConfigError("it is empty", key="task.path", value="/a"), "task.one.path=/a: it is empty"),
        (ConfigError("no prompt", key="task", hint="fill it in"), "task.one: no prompt; fill it in"),
        (ConfigError("it is empty", key="task.one.path", value="a"), "task.one.path=a: it is empty"),
        (ConfigError("no template", key="model", hint="give one"), "model: no template (task.one); give one"),
    ],
)
def test_errors_name_the_key_of_their_task(error: ConfigError, wanted: str) -> None:
    with pytest.raises(ConfigError) as raised, errors_below("task.one"):
        raise error
    assert str(raised.value) == wanted
    with pytest.raises(ConfigError) as raised, errors_below("task"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "override",
    ["task.two.eval_size=0", "task.two.environment.turns=0", "task.two.path=nowhere.jsonl", "task.two.prompt_column=c"],
)
def test_a_bad_task_of_a_mixture_names_its_key(override: str, tmp_path: Path, plain_tokenizer) -> None:
    with pytest.raises(ConfigError) as refused:
        PromptSource.of(two_tasks(tmp_path, override), plain_tokenizer)
    assert refused.value.key == override.partition("=")[0]


def test_a_task_with_few_problems_to_evaluate_on_is_reported(tmp_path: Path, plain_tokenizer) -> None:
    data = PromptSource.of(two_tasks(tmp_path, "eval.problems=1000"), plain_tokenizer)
    counts = {task.name: len(task.held_out or ()) for task in data.tasks}
    assert data.reports == [
        f"problems of {name} to evaluate on: {n}, fewer than eval.problems=1,000" for name, n in counts.items()
    ]
    assert PromptSource.of(two_tasks(tmp_path, "eval.problems=1"), plain_tokenizer).reports == []
