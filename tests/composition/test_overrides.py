"""Rewriting of overrides: escapes, models by path, and advice about quotes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tables import table

from grpocli.cli.hydra_app import search_path
from grpocli.composition.compose import build_run, compose, register_parts
from grpocli.composition.overrides import from_command_line, rewrite, unescape
from grpocli.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]
JSONL = ["task=jsonl", "task.path=x.jsonl"]

ESCAPES = [
    (r"Q: {q}\nA:", "Q: {q}\nA:"),
    (r"\n\n", "\n\n"),
    (r"a\tb", "a\tb"),
    (r"\nthink\n", "\nthink\n"),
    (r"a literal \\n", r"a literal \n"),
    (r"in \boxed{}, \frac{1}{2}, \right, \alpha, \\ or \d", r"in \boxed{}, \frac{1}{2}, \right, \alpha, \\ or \d"),
    (r"\text{a} \times \theta \neq \nu, \tau \to \nabla", r"\text{a} \times \theta \neq \nu, \tau \to \nabla"),
    (r"name it,\ne.g. a \ne b or \neq.", "name it,\ne.g. a \\ne b or \\neq."),
    ("a real\nline break", "a real\nline break"),
]
RIGHT = [
    "train.steps=3",
    "algorithm=grpo,dapo",
    "+reward@reward.capital=python",
    "reward=[math,/mine.py:f,format],[format,/mine.py:f,math]",
    r"reward.format.pattern='a\n\d'",
    r"task.environment.arguments.pattern='\n'",
    "engine.base_url=http://127.0.0.1:8000",
    "hydra.searchpath=[file:///tmp/x]",
    "++model.path=x model=hf",
    "~algorithm.kl",
]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_parts()  # as every command does first


@pytest.mark.parametrize(("text", "read"), table(ESCAPES, fast=3))
def test_escapes_of_a_text_key_leave_latex_alone(text: str, read: str) -> None:
    assert unescape(text) == read
    config = compose(from_command_line([*JSONL, f'task.prompt_template="{text}"', f'rollout.stop=["{text}",x]']))
    assert config.task.prompt_template == read
    assert list(config.rollout.stop) == [read, "x"]


@pytest.mark.parametrize("override", RIGHT)
def test_valid_overrides_are_not_changed(override: str) -> None:
    assert from_command_line(override.split(" ") if " " in override else [override]) == override.split(" ")


def test_rewriting_twice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    given = ["task=[gsm8k, arithmetic]", "model=./x", "reward=[mine.py:a,math]", "algorithm/kl=mine.py:B"]
    once = rewrite(given)
    tasks = ["task=mixture", "+task@task.gsm8k=gsm8k", "+task@task.arithmetic=arithmetic", f"model={tmp_path}/x"]
    assert once == [*tasks, f"reward=[{tmp_path}/mine.py:a,math]", f"algorithm/kl={tmp_path}/mine.py:B"]
    assert rewrite(once) == once


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task.prompt_template", "Q: {q}, A:"),
        ("task.system_prompt", 'say "it\'s {x}", please'),
        ("task.prefix", "a\n{b}\n"),
        ("rollout.regex", "(yes|no){2,3}"),
    ],
)
def test_the_advice_about_quotes_is_a_valid_command(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*JSONL, f"{key}={value}"])
    advised = shlex.split(caught.value.hint.partition("two quotes: ")[2].partition("; -m")[0])
    assert OmegaConf.select(compose(from_command_line([*JSONL, *advised])), key) == value


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (["model=Qwen/Qwen2.5-0.5B"], "Qwen/Qwen2.5-0.5B"),
        (["model=/models/mine"], "/models/mine"),
        (["model=../mine"], "{parent}/mine"),
        (["model=./mine"], "{here}/mine"),
        (["model=here"], "here"),
        (["model.path=mine"], "mine"),
        (["model=qwen2.5-1.5b", "model.path=mine"], "mine"),
        (["recipe=gsm8k-qwen2.5-1.5b", "model.path=mine"], "mine"),
    ],
)
def test_a_model_may_be_a_path(given: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd" / "here").mkdir(parents=True)
    (tmp_path / "cwd" / "here" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "cwd")
    model = build_run(compose(given)).model
    assert type(model).__name__ == "HuggingFace"
    assert model.path == path.format(parent=tmp_path, here=tmp_path / "cwd")


@pytest.mark.parametrize(
    "override",
    ["resume=", "resume=''", "hydra.run.dir=", "hydra.sweep.dir=", "model=", "reward= ", "algorithm/kl=", "recipe="],
)
def test_an_empty_choice_or_folder_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override.partition('=')[0]}=: has no value; give one, or leave"):
        rewrite(["train.steps=2", override])


FOLDERS = ["josé", "a=b", "it's", "a[1]", "a b", "lr=0.1,seed=1"]


@pytest.mark.parametrize("name", FOLDERS)
def test_paths_below_a_folder_with_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that become absolute, and those that are typed."""
    here = tmp_path / name
    (here / "mod").mkdir(parents=True)
    (here / "mine.py").write_text("def f(completions): return [1.0 for _ in completions]")
    (here / "recipe").mkdir()
    (here / "recipe" / "own.yaml").write_text("# @package _global_\nseed: 7\n")
    monkeypatch.chdir(here)
    code = f"{here}/mine.py:f"
    given = ["model=./mod", "reward=[math,mine.py:f]", "callbacks=[mine.py:f]", "model.lora.path=mod", "recipe=own"]
    given += ["task=jsonl", f"task.path={here}/d.jsonl", f"hydra.run.dir={here}/run", "+reward@reward.other=mine.py:f"]
    once = from_command_line(given)
    assert rewrite(once) == once
    config = compose([*search_path(str(here)), *once], with_hydra=True)
    assert config.model.path == config.model.lora.path == f"{here}/mod"
    assert (config.reward.f.function, config.reward.other.function, list(config.callbacks)) == (code, code, [code])
    assert (config.task.path, config.hydra.run.dir, config.seed) == (f"{here}/d.jsonl", f"{here}/run", 7)


def test_a_sweep_over_paths_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sweep in (f"model={tmp_path}/a,tiny", f"task.path={tmp_path}/a.jsonl,b.jsonl"):
        assert from_command_line([sweep])[-1] == sweep
    (tmp_path / "a,tiny").mkdir()
    assert from_command_line([f"model={tmp_path}/a,tiny"]) == [f"model='{tmp_path}/a,tiny'"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_command_line(["task.path=~/a,tiny/d.jsonl"]) == ["task.path='~/a,tiny/d.jsonl'"]


def test_texts_that_hydra_has_no_letters_for_need_no_quotes() -> None:
    given = ["task.path=/home/josé/d.jsonl", "rollout.stop=[</s>,a b;,k=v]", "reward.format.pattern=^x"]
    assert from_command_line(given) == [
        "task.path='/home/josé/d.jsonl'",
        "rollout.stop=['</s>','a b;','k=v']",
        "reward.format.pattern='^x'",
    ]
    assert from_command_line(["reward.format.pattern=^[0-9]"]) == ["reward.format.pattern=^[0-9]"]  # of which part?


def test_relative_paths_stay_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume may start in another folder, and Hydra may change it."""
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("")
    given = ["task.path=d.jsonl", "task.split=d.jsonl", "task.eval_path=openai/gsm8k"]
    assert from_command_line(given) == [f"task.path={tmp_path}/d.jsonl", *given[1:]]
