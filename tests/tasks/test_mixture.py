"""task=[A,B]: composing, drawing from and evaluating several tasks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conf_files import WRITTEN_FROM
from jsonl import write

from grpocli.composition.compose import build_run, compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.errors import ConfigError
from grpocli.tasks.prompt_source import PromptSource
from grpocli.tasks.task import errors_below


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
    ("given", "key"),
    [
        (["task=[]"], "task"),
        (["task=[arithmetic,gsm8k,arithmetic]"], "task"),
        (["task=[arithmetik,gsm8k]"], "task"),
        (["task=[arithmetic,gsm8k]", "task.arithmetic.wieght=2"], "task.arithmetic.wieght"),
        (["task=[arithmetic,gsm8k]", "task.arithmetic.rewards=[exact_mtach]"], "task.arithmetic.rewards"),
    ],
)
def test_bad_mixtures_are_refused(given: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_of(*given)
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
    "given",
    ["task.two.eval_size=0", "task.two.environment.turns=0", "task.two.path=nowhere.jsonl", "task.two.prompt_column=c"],
)
def test_a_bad_task_of_a_mixture_names_its_key(given: str, tmp_path: Path, plain_tokenizer) -> None:
    with pytest.raises(ConfigError) as refused:
        PromptSource.of(two_tasks(tmp_path, given), plain_tokenizer)
    assert refused.value.key == given.partition("=")[0]


def test_a_task_with_few_problems_to_evaluate_on_is_reported(tmp_path: Path, plain_tokenizer) -> None:
    data = PromptSource.of(two_tasks(tmp_path, "eval.problems=1000"), plain_tokenizer)
    counts = {task.name: len(task.held_out or ()) for task in data.tasks}
    assert data.reports == [
        f"problems of {name} to evaluate on: {n}, fewer than eval.problems=1,000" for name, n in counts.items()
    ]
    assert PromptSource.of(two_tasks(tmp_path, "eval.problems=1"), plain_tokenizer).reports == []
