"""`engine.vllm_args`: options reach vLLM in the form that its parser wants."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from grpocli.rollout.vllm.validate import MANY, SWITCHES, option_words

LISTED = """
import json
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # vLLM 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

actions = make_arg_parser(FlexibleArgumentParser(add_help=False))._actions
print(json.dumps({word[2:]: action.nargs for action in actions for word in action.option_strings}))
"""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_seqs", 8, ["--max-num-seqs=8"]),
        ("max-num-seqs", None, []),
        ("async_scheduling", True, ["--async-scheduling"]),
        ("async_scheduling", False, ["--no-async-scheduling"]),
        ("disable_log_stats", True, ["--disable-log-stats"]),
        ("disable_log_stats", False, []),
        ("cudagraph_capture_sizes", [1, 2], ["--cudagraph-capture-sizes", "1", "2"]),
        ("compilation_config", {"mode": 3, "x": False}, ['--compilation-config={"mode": 3, "x": false}']),
        ("allowed_origins", ["*"], ['--allowed-origins=["*"]']),
    ],
)
def test_options_have_the_words_that_vllm_takes(name: str, value: Any, words: list[str]) -> None:
    assert option_words(name, value) == words


@pytest.mark.survival
@pytest.mark.vllm
def test_the_installed_vllm_has_these_options() -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", LISTED], capture_output=True, text=True, check=True)
    words = json.loads(ended.stdout.splitlines()[-1])
    assert {name: words[name] for name in MANY} == dict.fromkeys(MANY, "+")
    assert {name: words[name] for name in SWITCHES} == dict.fromkeys(SWITCHES, 0)
