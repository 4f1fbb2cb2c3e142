"""Models named `hub:OWNER/NAME@REVISION`, with the real client against a stand-in server."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
from composed import refused
from publish.test_push import forget_hub, hub
from stand_in_hub import StandInHub

from grpocli.errors import ConfigError
from grpocli.hub import HubPath, hub_api, hub_path
from grpocli.models.loading import HuggingFace

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's client
__all__ = ["hub"]
FILES = ("config.json", "tokenizer.json", "model.safetensors", "checkpoints/step_000001/config.json")


def upload(name: str, *files: str) -> None:
    api = hub_api()
    api.create_repo(name)
    for file in files:
        api.upload_file(path_or_fileobj=file.encode(), path_in_repo=file, repo_id=name)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hub:a/b", HubPath("a/b")),
        ("hub:a-1/b.c_2@refs/pr/1", HubPath("a-1/b.c_2", "refs/pr/1")),
        ("/models/hub:a", None),
    ],
)
def test_a_place_on_the_hub_is_read(text: str, place: HubPath | None) -> None:
    assert hub_path(text, "model.path") == place
    for other in ("hub:", "hub:a", "hub:a/b@", "hub:a/b/c", "hub:a/b c"):
        with refused("model.path"):
            hub_path(other, "model.path")


def test_a_revision_is_downloaded_and_then_found_without_requests(hub: StandInHub) -> None:
    upload("me/new", *FILES)
    commit = hub.repos["me/new"].branches["main"]
    hub_api().upload_file(path_or_fileobj=b"later", path_in_repo="config.json", repo_id="me/new")
    folder = Path(HuggingFace(path=f"hub:me/new@{commit}").prepare())
    assert (folder / "config.json").read_text() == "config.json"
    assert not (folder / "checkpoints").exists()
    assert Path(HuggingFace(path="hub:me/new").prepare(), "config.json").read_text() == "later"
    assert Path(HuggingFace(path="hub:me/new", revision=commit).prepare()) == folder
    hub.requests.clear()
    assert Path(HuggingFace(path=f"hub:me/new@{commit}").prepare()) == folder
    assert not [one for one in hub.requests if one.startswith("GET")]


@pytest.mark.parametrize("name", ["hub:me/none", "hub:me/new@none", "hub:me/new/none", "hub:me/new"])
def test_a_missing_model_is_refused_in_a_sentence(hub: StandInHub, name: str) -> None:
    upload("me/new")
    with pytest.raises(ConfigError) as caught:
        HuggingFace(path=name).prepare()
    assert (caught.value.key, caught.value.value, "\n" in str(caught.value)) == ("model.path", name, False)


def test_pickled_weights_are_not_taken(hub: StandInHub) -> None:
    upload("me/old", "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"the folder has no weights \(\*\.safetensors\)"):
        HuggingFace(path="hub:me/old").prepare()
    assert not [one for one in hub.requests if one.endswith("pytorch_model.bin")]


def test_a_downloaded_model_needs_no_hub(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    upload("me/new", *FILES)
    folder = HuggingFace(path="hub:me/new").prepare()
    forget_hub()
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    assert HuggingFace(path="hub:me/new").prepare() == folder
    with pytest.raises(ConfigError, match="is not in the cache, and the hub does not answer"):
        HuggingFace(path="hub:me/other").prepare()
