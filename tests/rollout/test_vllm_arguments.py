"""`engine.vllm_args`: options reach vLLM in the form that its parser wants."""

from __future__ import annotations

from typing import Any

import pytest

from grpocli.rollout.vllm.server import option_words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_seqs", 8, ["--max-num-seqs=8"]),
        ("max-num-seqs", None, []),
        ("async_scheduling", True, ["--async-scheduling"]),
        ("async_scheduling", False, ["--no-async-scheduling"]),
        ("disable_log_stats", True, ["--disable-log-stats"]),
        ("cudagraph_capture_sizes", [1, 2], ["--cudagraph-capture-sizes", "1", "2"]),
        ("compilation_config", {"mode": 3, "x": False}, ['--compilation-config={"mode": 3, "x": false}']),
    ],
)
def test_options_have_the_words_that_vllm_takes(name: str, value: Any, words: list[str]) -> None:
    assert option_words(name, value) == words
