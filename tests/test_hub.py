"""Without a network, an error comes at once instead of after a minute of retries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from grpocli.errors import ConfigError
from grpocli.hub import why_unreachable
from grpocli.models.loading import HuggingFace
from grpocli.tasks.loading import load_table


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub at a closed port, with an empty cache of earlier checks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # set here so that it is restored afterwards
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    why_unreachable.cache_clear()
    yield url
    why_unreachable.cache_clear()


def test_a_model_is_refused_in_one_sentence_without_a_hub(closed: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path=some/model: .*the hub does not answer") as caught:
        HuggingFace(path="some/model").prepare()
    assert closed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hub_s_libraries_are_switched_to_offline_mode(closed: str) -> None:
    assert closed in why_unreachable()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(ConfigError, match=r"^task\.path=some/data: .*Connection refused") as caught:
        load_table("some/data", None, "train")
    assert closed in str(caught.value)


def test_a_slow_hub_is_reachable(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpocli.hub.READ_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert why_unreachable() == ""
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
