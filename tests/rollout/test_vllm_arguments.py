"""`engine.vllm_args`: known options reach vLLM, and unknown ones are refused before a server starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm import validate as arguments
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.server import ServerSpec, serving
from grpocli.rollout.vllm.validate import check_arguments, known_options, option_words

KNOWN = {
    "max-num-seqs": "value",
    "async-scheduling": "boolean",
    "disable-log-stats": "switch",
    "cudagraph-capture-sizes": "many",
    "compilation-config": "value",
    "allowed-origins": "value",
}
"""Some options of vLLM."""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "known_options", lambda: KNOWN)
    monkeypatch.setattr(arguments, "vllm_version", lambda: "0.32.0")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"max_num_seqs": 8}, ["--max-num-seqs=8"]),
        ({"max-num-seqs": None}, []),
        ({"async_scheduling": True}, ["--async-scheduling"]),
        ({"async_scheduling": False}, ["--no-async-scheduling"]),
        ({"disable_log_stats": True}, ["--disable-log-stats"]),
        ({"disable_log_stats": False}, []),
        ({"cudagraph_capture_sizes": [1, 2]}, ["--cudagraph-capture-sizes", "1", "2"]),
        ({"compilation_config": {"mode": 3, "x": False}}, ['--compilation-config={"mode": 3, "x": false}']),
        ({"allowed_origins": ["*"]}, ['--allowed-origins=["*"]']),
    ],
)
def test_known_options_are_passed_on(known: None, given: dict[str, Any], words: list[str]) -> None:
    check_arguments(given)
    assert option_words(given) == words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_num_seq": 8},
            r'^engine\.vllm_args\.max_num_seq: vLLM 0\.32\.0 has no such.*did you mean "max_num_seqs"',
        ),
        ({"xyzzy": 8}, r"^engine\.vllm_args\.xyzzy: vLLM 0\.32\.0 has no such option$"),
        ({"async_scheduling": 1}, r"^engine\.vllm_args\.async_scheduling=1: must be true or false"),
        ({"disable-log-stats": "no"}, r"^engine\.vllm_args\.disable-log-stats=no: must be true or false"),
    ],
)
def test_unknown_options_and_wrong_values_are_refused(known: None, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(given)


def test_an_unknown_option_is_refused_before_a_server_starts(
    known: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_server, "check_plugin", lambda: None)
    monkeypatch.setattr(vllm_server, "guarded", lambda *_, **__: pytest.fail("a server was started"))
    spec = ServerSpec(EngineJob("/m", "float32", 8, tmp_path, seed=0), vllm_server.free_port(), 8)
    with (
        pytest.raises(ConfigError, match=r"engine\.vllm_args\.max_num_seq: "),
        serving(spec, Vllm(vllm_args={"max_num_seq": 8}), tmp_path / "log"),
    ):
        pass


def test_without_arguments_vllm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "known_options", lambda: pytest.fail("vLLM was asked"))
    check_arguments({})
    assert option_words({}) == []


def test_the_options_are_cached_for_each_version(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    asked: list[str] = []

    def ask() -> dict[str, str]:
        asked.append(arguments.vllm_version())
        return KNOWN

    monkeypatch.setattr(arguments, "_list_options", ask)
    monkeypatch.setattr(arguments, "vllm_version", lambda: "1")
    assert known_options() == known_options() == KNOWN
    kept = cache_folder / "vllm" / "options-1.json"
    assert json.loads(kept.read_text()) == KNOWN
    kept.write_text("{ half")
    assert known_options() == KNOWN
    monkeypatch.setattr(arguments, "vllm_version", lambda: "2")
    assert known_options() == KNOWN
    assert asked == ["1", "1", "2"]


@pytest.mark.processes
def test_a_failure_to_list_the_options_is_an_error(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    monkeypatch.setattr(arguments, "LIST_OPTIONS", "import no_such_module_here")
    with pytest.raises(EngineError, match=r"engine\.vllm_args.*No module named 'no_such_module_here'"):
        known_options()
    monkeypatch.setattr(arguments, "LIST_OPTIONS", "import time; time.sleep(600)")
    monkeypatch.setattr(arguments, "LIST_TIMEOUT", 0.5)
    with pytest.raises(EngineError, match=r"did not list its options \(engine\.vllm_args\) within 0\.5 s"):
        known_options()


@pytest.mark.survival
@pytest.mark.vllm
def test_the_installed_vllm_lists_its_options(cache_folder: Path) -> None:
    """They include every option that grpocli sets itself, or servers would not start."""
    options = known_options()
    assert options["max-num-seqs"] == "value"
    assert options["enable-prefix-caching"] == "boolean"
    assert options["cudagraph-capture-sizes"] == "many"
    assert not [name for name in options if name.startswith("no-")]
    job = EngineJob("/m", "float32", 1, Path(), seed=0, lora_rank=8, revision="x", trust_remote_code=True)
    ours = Vllm(data_parallel=2, quantization="fp8", speculative={"method": "ngram"})
    for cpu in (True, False):
        spec_here = ServerSpec(job if cpu else replace(job, dtype="bfloat16"), 1, 1)
        words = vllm_server.command(spec_here, ours, cpu)[4:]
        assert {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in words} <= set(options)
