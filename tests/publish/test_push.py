"""Pushing a run's folder to the hub, with the real client against a stand-in server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from threading import Event

import huggingface_hub.constants as hub_constants
import pytest
import yaml
from stand_in_hub import Repo, StandInHub, serving

from grpocli.composition.compose import register_parts
from grpocli.config.schema import Hub
from grpocli.errors import ConfigError
from grpocli.hub import check_may_push, why_unreachable
from grpocli.publish.published import Publisher
from grpocli.publish.push import CheckpointPushes, Pusher
from grpocli.runs.run_dir import RunDir
from grpocli.runs.sessions import Session, add_session

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's client

TOKEN = "hf_writer_token"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    """A stand-in hub that the real client talks to, with an empty cache and a token that may write to `me`."""
    with serving(StandInHub()) as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        constants = {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        constants |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(tmp_path / "hub-cache")}
        for name, value in (constants | {"HF_TOKEN_PATH": str(tmp_path / "no-token")}).items():
            monkeypatch.setattr(hub_constants, name, value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        forget_hub()
        yield server
    forget_hub()


def forget_hub() -> None:
    why_unreachable.cache_clear()
    check_may_push.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a finished run, without weights that a model could use."""
    return make_run(tmp_path / "runs" / "day" / "time")


def make_run(path: Path, name: str = "first") -> RunDir:
    run = RunDir(path)
    (path / "model").mkdir(parents=True)
    (path / "rollouts").mkdir()
    run.config.write_text(yaml.safe_dump({"model": {"path": "some/base"}, "task": {"path": "some/data"}, "seed": 0}))
    run.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    run.summary.write_text(json.dumps({"steps": 1, "exit": "done", "exit_kind": "done"}))
    add_session(run, Session(0, "2026-01-01T00:00:00Z", {}, run=name))
    (path / "model" / "model.safetensors").write_bytes(os.urandom(10_000))
    (path / "model" / "config.json").write_text("{}")
    (path / "model" / "README.md").write_text('---\nlibrary_name: transformers\n---\nload("PATH_TO_THIS_FOLDER")\n')
    (path / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    return run


def add_checkpoint(run: RunDir, step: int) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps({"step": step}))
    (folder / "model.safetensors").write_bytes(os.urandom(9_000))
    return folder


def test_a_run_is_pushed_with_its_model_at_the_root(hub: StandInHub, run: RunDir) -> None:
    assert Pusher(run, Hub(push="me/new")).push() == f"{hub.url}/me/new"
    repo = hub.repos["me/new"]
    assert repo.private
    files = repo.files("main") or {}
    texts = {"README.md", "config.yaml", "metrics.jsonl", "report.html", "sessions.jsonl", "summary.json"}
    model = {"config.json", "model.safetensors"}
    assert files.keys() - {".gitattributes"} == texts | model | {"rollouts/step_000001.parquet"}
    assert files["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    assert b'load("me/new")' in files["README.md"]


def test_a_repeated_push_sends_nothing_again(hub: StandInHub, run: RunDir) -> None:
    Pusher(run, Hub(push="me/new")).push()
    sent, commits = len(hub.uploads), len(hub.repos["me/new"].commits)
    (run.model / "extra.safetensors").write_bytes(os.urandom(9_000))
    Pusher(run, Hub(push="me/new")).push()
    assert len(hub.uploads) == sent + 1
    assert len(hub.repos["me/new"].commits) == commits + 1


def test_rollouts_and_checkpoints_are_chosen(hub: StandInHub, run: RunDir) -> None:
    add_checkpoint(run, 1)
    Pusher(run, Hub(push="me/less", rollouts=False)).push()
    Pusher(run, Hub(push="me/more", checkpoints=True)).push()
    less, more = (hub.repos[name].files("main") or {} for name in ("me/less", "me/more"))
    assert not [path for path in less if path.startswith(("rollouts/", "checkpoints/"))]
    assert "checkpoints/step_000001/model.safetensors" in more


def test_a_pushed_checkpoint_replaces_those_that_the_run_has_deleted(hub: StandInHub, run: RunDir) -> None:
    pusher = Pusher(run, Hub(push="me/new", checkpoints=True))
    pusher.push()
    for step in (1, 2):
        add_checkpoint(run, step)
        pusher.push_checkpoint(step)
    shutil.rmtree(run.checkpoint(1))
    add_checkpoint(run, 3)
    pusher.push_checkpoint(3)
    files = hub.repos["me/new"].files("main") or {}
    there = {path.split("/")[1] for path in files if path.startswith("checkpoints/")}
    assert there == {"step_000002", "step_000003"}
    shutil.rmtree(run.checkpoint(2))
    pusher.push()  # of a folder that may be a part of the run
    assert "checkpoints/step_000002/model.safetensors" in (hub.repos["me/new"].files("main") or {})


def test_the_last_checkpoint_is_pushed_at_the_end_also_after_a_failed_push() -> None:
    pushed: list[int] = []
    go_on = Event()

    class Failing(Pusher):
        def push_checkpoint(self, step: int) -> None:
            pushed.append(step)
            if step == 1:
                raise OSError("no network")
            go_on.wait(30)

    pushes = CheckpointPushes(Failing(RunDir(Path("run")), Hub(push="me/new")), lambda _: None)
    pushes.add(1)
    wait([pushes._pushing])
    pushes.add(2)
    pushes.add(3)  # is saved during the push of 2
    go_on.set()
    pushes.close(30)
    assert pushed == [1, 2, 3]


def test_another_run_is_not_overwritten(hub: StandInHub, run: RunDir, tmp_path: Path) -> None:
    Pusher(run, Hub(push="me/new")).push()
    with pytest.raises(ConfigError, match=r"^hub\.push=me/new: holds another run; .*hub\.revision=BRANCH"):
        Pusher(make_run(tmp_path / "other" / "run", "second"), Hub(push="me/new")).push()


@pytest.mark.parametrize("name", ["config.yaml", "notes/plan.txt"])
def test_files_that_are_no_run_are_not_overwritten(hub: StandInHub, run: RunDir, name: str) -> None:
    mine = {name: b"MINE", "README.md": b"my card"}
    hub.repos["me/base"] = Repo(private=True)
    hub.repos["me/base"].commit("main", mine, "by hand")
    with pytest.raises(ConfigError, match=r"^hub\.push=me/base: holds files that are no run of grpocli; choose"):
        Pusher(run, Hub(push="me/base")).push()
    assert hub.repos["me/base"].files("main") == mine


@pytest.mark.parametrize("path", ["/api/models/me/new/tree", "/me/new/resolve"])
def test_a_hub_that_does_not_say_what_it_holds_is_not_pushed_to(
    hub: StandInHub, run: RunDir, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoint(run, 4)
    Pusher(run, Hub(push="me/new", checkpoints=True)).push()
    before = hub.repos["me/new"].files("main")
    hub.refuse[path] = 503
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(ConfigError, match=r"^hub\.push=me/new: .*(503|refused by the test)"):
        Pusher(make_run(tmp_path / "other" / "run", "second"), Hub(push="me/new")).push()
    assert hub.repos["me/new"].files("main") == before


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("hf_reader_token", "the token may not do this"),
        ("hf_nobody_token", "does not accept the token"),
        ("", "wants one: export HF_TOKEN"),
    ],
)
def test_a_token_that_may_not_write_is_refused_in_a_sentence(
    hub: StandInHub, run: RunDir, monkeypatch: pytest.MonkeyPatch, token: str, problem: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=problem) as caught:
        Pusher(run, Hub(push="me/new")).push()
    assert "\n" not in str(caught.value)
    assert not token or token not in str(caught.value)


def test_secrets_and_local_folders_are_not_pushed(
    hub: StandInHub, run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-user")
    monkeypatch.chdir(tmp_path)
    config = {
        "task": {"path": str(Path.home() / "data" / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")},
        "prompt": "answer in <think> tags </think> and/or words",
        "overrides": ["reward=[/srv/project/rewards.py:score,math]", "engine.extra=a-secret-of-the-user"],
    }
    run.config.write_text(yaml.safe_dump(config))
    run.summary.write_text(
        json.dumps({"steps": 1, "exit": f"cannot read {tmp_path}/x with {TOKEN}", "exit_kind": "failed"})
    )
    (run.model / "README.md").write_text(f"{run.config.read_text()}\n{run.path}")
    Pusher(run, Hub(push="me/new")).push()
    files = hub.repos["me/new"].files("main") or {}
    texts = {
        path: content.decode()
        for path, content in files.items()
        if path.endswith((".md", ".yaml", ".jsonl", ".json", ".html"))
    }
    for path, text in texts.items():
        for hidden in (str(tmp_path), f"{Path.home()}/", TOKEN, "a-secret-of-the-user"):
            assert hidden not in text, (path, hidden)
    pushed = yaml.safe_load(texts["config.yaml"])
    assert pushed["task"] == {"path": "~/data/train.jsonl", "eval_path": "./eval.jsonl"}
    assert pushed["prompt"] == config["prompt"]
    assert pushed["overrides"][0] == config["overrides"][0]


@pytest.mark.parametrize("text", ["https://h/v1/{}/chat", "x_{}_y", '{{"a": "{}"}}'])
def test_a_secret_is_hidden_wherever_it_is(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MY_TOKEN", 'a"secret/of&mine')
    for secret in ('a"secret/of&mine', 'a\\"secret/of&mine', "a&quot;secret/of&amp;mine"):
        assert Publisher.of({})(text.format(secret)) == text.format("NOT_PUSHED_SECRET")


def test_secrets_in_addresses_and_in_values_of_a_config_are_hidden() -> None:
    former = [{"task.storage_options.secret": ("a-former-secret", "${oc.env:SECRET}")}]
    config = {
        "task": {
            "path": "https://bob:pw@data.example/x.jsonl?part=1&X-Amz-Signature=deadbeef&n=2",
            "storage_options": {"secret": "hunter2", "key": "an-access-key", "anon": False, "region": "eu"},
        },
        "tracker": {"_target_": "tracker/accelerate", "options": {"api_key": "tracker-key", "name": "w"}},
        "reward": {
            "judge": {"_target_": "reward/judge", "api_key": "MY_VARIABLE"},
            "passes": {"_target_": "mine.py:Passes", "api_key": "of-my-own-part", "style": "strict"},
        },
        "algorithm": {"_target_": "algorithm", "tokens": {"_target_": "algorithm/tokens/all"}},
        "overrides": [
            "task.path=https://old:word@data.example/y?sig=ab",
            "+task.storage_options={secret:password-1,region:eu}",
            "algorithm/tokens=all",
            "model=${oc.env:HF_TOKEN}",
        ],
    }
    register_parts()
    hidden = "NOT_PUSHED_SECRET"
    public = Publisher.of(config, former=former)
    assert public("was a-former-secret") == f"was {hidden}"
    assert yaml.safe_load(public(yaml.safe_dump(config))) == {
        "task": {
            "path": f"https://{hidden}@data.example/x.jsonl?part=1&X-Amz-Signature={hidden}&n=2",
            "storage_options": {"secret": hidden, "key": hidden, "anon": False, "region": "eu"},
        },
        "tracker": {"_target_": "tracker/accelerate", "options": {"api_key": hidden, "name": "w"}},
        "reward": {
            "judge": {"_target_": "reward/judge", "api_key": "MY_VARIABLE"},
            "passes": {"_target_": "mine.py:Passes", "api_key": hidden, "style": "strict"},
        },
        "algorithm": config["algorithm"],
        "overrides": [
            f"task.path=https://{hidden}@data.example/y?sig={hidden}",
            f"+task.storage_options={{secret:{hidden},region:eu}}",
            *config["overrides"][2:],
        ],
    }


def test_the_command_wants_a_name(run: RunDir, grpocli: Callable[..., tuple[int, str, str]]) -> None:
    assert "--to: name the repository: --to OWNER/NAME" in grpocli("push", str(run.path), code=2)[2]
    assert "hub.push=new: expected OWNER/NAME" in grpocli("push", str(run.path), "--to", "new")[2]
