"""What a downloaded config may make a run do, and which files a resume from the hub downloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from publish.test_push import add_checkpoint, hub, run  # noqa: F401 - the fixtures
from stand_in_hub import StandInHub

from grpocli.composition.compose import compose, register_parts, save
from grpocli.composition.resume import Resume
from grpocli.config.schema import Hub
from grpocli.errors import ConfigError
from grpocli.hub import HubPath
from grpocli.publish import pull
from grpocli.publish.published import HIDDEN
from grpocli.publish.pull import check_config, is_accepted
from grpocli.publish.push import Pusher
from grpocli.runs.run_dir import RunDir
from grpocli_tools.command_line import composed

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # huggingface_hub's use of its client
NAME = "hub:me/adder"
TASK = ["task=arithmetic"]
CODE = "def f(x: int) -> int:\n    return x\n\n\n__import__('pathlib').Path('imported').touch()\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the config.yaml of a run with these overrides, changed by `change`. evil.py leaves a file if imported."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text(CODE)

    def write(*overrides: str, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
        plain = yaml.safe_load(composed_once(*TASK))
        plain["overrides"] = [*TASK, *overrides]
        change(plain)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(plain))
        return path

    return write


def test_a_secret_that_was_not_pushed_must_be_given_again(config: Callable[..., Path]) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["tracker"].update(_target_="tracker/accelerate", options={"api_key": HIDDEN})

    path = config("tracker=tensorboard", change=change)
    with pytest.raises(ConfigError, match=r"tracker\.options\.api_key has a secret, .*; give this key again"):
        check_config(path, NAME, [])
    check_config(path, NAME, ["tracker.options.api_key=mine"])


@lru_cache
def composed_once(*overrides: str) -> str:
    return save(compose(list(overrides)))


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    """A change that removes keys, whose values then come from the overrides."""

    def change(plain: dict[str, Any]) -> None:
        for key in keys:
            section, _, name = key.rpartition(".")
            (plain[section] if section else plain).pop(name)

    return change


@pytest.mark.parametrize(
    "override",
    [
        "task.tools=[evil.py:f]",
        "callbacks=[evil.py:f]",
        "reward=[math,evil.py:f]",
        "+reward@reward.mine=evil.py:f",
        "algorithm/advantage=evil.py:F",
        "recipe=../../evil",
        "'task=${oc.env:HOME}'",
        "+task={_target_: task/verifiers, env: evil.py}",
        "+engine.vllm_args.worker_extension_cls=evil.Worker",
        "+model.trust_remote_code=true",
        "+reward.code.unsafe=true",
    ],
)
def test_code_in_a_saved_override_is_refused_before_it_is_imported(config: Callable[..., Path], override: str) -> None:
    path = config(override.strip("'"), change=without("task.tools", "callbacks"))
    with pytest.raises(ConfigError, match="its config sets"):
        check_config(path, NAME, [])
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    "override", ["+hydra.callbacks.evil._target_=os.mkdir", "hydra/launcher=slurm", "+task@hydra.callbacks=arithmetic"]
)
def test_a_resume_takes_no_saved_key_of_hydra(config: Callable[..., Path], override: str) -> None:
    folder = config(override, "train.steps=3").parent
    assert Resume(folder).overrides([])[:2] == [*TASK, "train.steps=3"]
    assert check_config(folder / "config.yaml", NAME, [])["overrides"] == [*TASK, "train.steps=3"]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("engine.vllm_args.max_num_seqs", 64, False),
        ("engine.vllm_args.kv_cache_dtype", "fp8", False),
        ("engine.vllm_args.chat_template_content_format", "openai", False),
        ("engine.vllm_args.worker-cls", "evil", True),
        ("engine.vllm_args.logits_processors", "evil:Processor", True),
        ("engine.vllm_args.kv_transfer_config", '{"kv_connector_module_path": "evil"}', True),
        ("engine.vllm_args.worker-cls=evil", None, True),
        ("engine.vllm_args.trust-remote-code", True, True),
        ("engine.speculative.model", "some/draft", False),
        ("engine.speculative.model", "evil.Proposer", True),
        ("model.attention", "flash_attention_2", False),
        ("model.attention", "kernels-community/flash-attn3", False),
        ("model.attention", "evil/kernel", True),
        ("reward.code.python", "/usr/bin/evil", True),
        ("reward.mine.unsafe", True, True),
        ("reward.mine.unsafe", False, False),
        ("task.storage_options.simple_templates", False, True),
        ("task.maths.tools", "grpocli.environments.tools:python", False),
        ("task.maths.tools", "grpocli.files:remove", True),
        ("task.maths.environment.name", "grpocli.environments.worker_functions:call", True),
        ("task.maths.environment.name", "grpocli.library_environments.openenv:OpenEnv", False),
        ("task.maths.environment.arguments.taskset", "evil.py", True),
        ("engine.api_key_file", "~/.ssh/id_ed25519", True),
        ("engine.api_key_file", None, False),
        ("engine.base_url", None, False),
        ("engine.base_url", "https://evil.example", True),
        ("reward.judge.base_url", "http://localhost.evil.example/v1", True),
        ("reward.judge.api_key", "OPENAI_API_KEY", False),
        ("reward.judge.api_key", "HF_TOKEN", True),
        ("algorithm.kl.base_url.maths", "https://evil.example", True),
        ("algorithm.kl.api_key", "VLLM_API_KEY", False),
        ("tracker.options.settings.base_url", "https://evil.example", True),
        ("task.base_url", "???", False),
        ("algorithm.aggregate.length", "${rollout.max_completion_tokens}", False),
        ("algorithm.kl.base_url", "${name}", True),
        ("task.path.tools", "evil.py:f", True),
        ("task.storage_options.path", "evil", True),
        ("reward.mine.unsafe", 1, True),
        ("reward.mine.strictness", 3, False),
    ],
)
def test_values_that_must_be_given_again(key: str, value: object, code: bool) -> None:
    register_parts()
    assert is_accepted(key, value) is not code


def test_an_interpolation_that_becomes_code_is_refused(config: Callable[..., Path]) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["reward"]["mine"] = {"_target_": "task/verifiers", "env": "evil.py"}
        plain["task"] = "${reward.mine}"

    with pytest.raises(ConfigError, match="its config sets"):
        check_config(config(change=change), NAME, [])


@pytest.mark.parametrize(
    "override",
    [
        "task.tools=[calculator]",
        "task=sliding_puzzle",
        "task.environment.env=[MY_VARIABLE]",
        "model=hub:me/base@main",
        "model=some/base",
        "recipe=grpo-small",
        "seed=7",
    ],
)
def test_what_comes_with_grpocli_is_accepted(config: Callable[..., Path], override: str) -> None:
    overrides = [override, "engine=transformers"]
    path = config()
    plain = yaml.safe_load(composed_once(*overrides)) | {"overrides": overrides}
    path.write_text(yaml.safe_dump(plain))
    assert check_config(path, NAME, []) == plain


def test_code_that_is_named_again_replaces_that_of_the_config_for_good(config: Callable[..., Path]) -> None:
    Path("mine.py").write_text(CODE.replace("imported", "mine"))
    path = config(
        "callbacks=[evil.py:f]",
        "reward=[math,evil.py:f]",
        change=lambda plain: plain["reward"].update(f={"_target_": "reward/python", "function": "evil.py:f"}),
    )
    with pytest.raises(ConfigError, match=r"its config sets reward=evil\.py:f"):
        check_config(path, NAME, ["callbacks=[]"])
    kept = check_config(path, NAME, ["callbacks=[]", "reward=[math,mine.py:f]", "train.steps=9"])
    assert not Path("imported").exists()
    assert "evil" not in yaml.safe_dump(kept)
    # also a resume of the folder without these overrides, after a first attempt that failed
    path.write_text(yaml.safe_dump(kept))
    path.with_name("sessions.jsonl").write_text("")
    path.with_name("trainer.json").write_text("")
    (path.parent / "checkpoints").mkdir()
    again = composed([f"resume={path.parent}"], None)
    assert "mine.py" in str(again.reward.f.function)
    assert (again.callbacks, again.train.steps) == ([], kept["train"]["steps"])
    assert not Path("imported").exists()


def pushed(run: RunDir, change: Callable[[RunDir], None] = lambda _: None) -> None:  # noqa: F811 - the fixture's value
    """Push a run with a checkpoint and a config that composes."""
    run.config.write_text(yaml.safe_dump(yaml.safe_load(composed_once(*TASK)) | {"overrides": TASK}))
    add_checkpoint(run, 4)
    change(run)
    Pusher(run, Hub(push="me/new", checkpoints=True)).push()


def test_only_the_files_of_a_checkpoint_are_downloaded(hub: StandInHub, run: RunDir, tmp_path: Path) -> None:  # noqa: F811
    def add_code(run: RunDir) -> None:
        for name in ("evil.py", "evil.so", "carried.pt", "chat_template.jinja"):
            (run.checkpoint(4) / name).write_text("x")

    pushed(run, add_code)
    pull.fetch(HubPath("me/new"), "hub:me/new", tmp_path / "b", [])
    there = {path.name for path in (tmp_path / "b" / "checkpoints" / "step_000004").iterdir()}
    assert there == {"trainer.json", "model.safetensors", "carried.pt", "chat_template.jinja"}


def test_an_interrupted_download_of_another_commit_is_not_completed(
    hub: StandInHub,  # noqa: F811
    run: RunDir,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    pushed(run)
    first = huggingface_hub.snapshot_download

    def interrupted(*given: Any, **named: Any) -> None:
        first(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull.fetch(HubPath("me/new"), "hub:me/new", tmp_path / "b", [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", first)
    Pusher(run, Hub(push="me/new")).push_checkpoint(add_checkpoint(run, 7), 7)
    pull.fetch(HubPath("me/new"), "hub:me/new", tmp_path / "b", [])
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == ["step_000007"]


def test_where_a_key_is_sent_must_be_given_again(config: Callable[..., Path]) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["engine"].update({"_target_": "engine/vllm", "base_url": "https://evil.example", "api_key_file": "~/key"})

    for given in ([], ["engine.base_url=https://mine.example"]):
        with pytest.raises(ConfigError, match="send a key") as refused:
            check_config(config(change=change), NAME, given)
        assert refused.value.key == "resume"
    given = ["engine.base_url=https://mine.example", "engine.api_key_file=mine"]
    check_config(config("engine=vllm", change=change), NAME, given)
