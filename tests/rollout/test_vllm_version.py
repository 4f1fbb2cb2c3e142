"""Supported versions of vLLM."""

from __future__ import annotations

import pytest

from grpocli.errors import ConfigError
from grpocli.rollout.vllm import config as checks


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: object())


@pytest.mark.parametrize("version", ["0.34.0", "0.35.1.dev3", "0.25.1"])
def test_a_version_with_another_interface_for_weights_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Otherwise the first sync would fail, long after the start."""
    monkeypatch.setattr(checks, "vllm_version", lambda: version)
    with pytest.raises(
        ConfigError, match=rf"engine=vllm: vLLM {version} is installed, .* pip install 'vllm<0\.34,>=0\.32'"
    ):
        checks.check_vllm("vllm")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev5+gabc", "0.33.0", checks.UNKNOWN])
def test_a_supported_version_passes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(checks, "vllm_version", lambda: version)
    checks.check_vllm("vllm")


def test_the_error_without_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    with pytest.raises(
        ConfigError, match=r"vLLM finds its plugins only in installed packages; run pip install -e \. once"
    ):
        checks.check_plugin()
