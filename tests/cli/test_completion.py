"""Tab completion in a real bash, installed as Hydra documents it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpocli.cli.hydra_app import complete

LINES = {
    "grpocli tra": {"train"},
    "grpocli train algorithm=d": {"algorithm=dapo", "algorithm=dgpo", "algorithm=dppo", "algorithm=drgrpo"},
    "grpocli explain algorithm=dapo vs algorithm=gr": {"algorithm=grpo"},
}
SCRIPT = """
eval "$(grpocli train -sc install=bash)"
for line in "$@"; do
    COMP_LINE=$line; COMP_POINT=${#line}; words=($line); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    hydra_bash_completion
    echo "$line -> ${COMPREPLY[@]}"
done
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_groups_and_choices() -> None:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", SCRIPT, "bash", *LINES], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = {line: set(words.split()) for line, _, words in (o.partition(" -> ") for o in done.stdout.splitlines())}
    assert found == LINES


@pytest.mark.parametrize(
    ("line", "among"),
    [
        ("grpocli ", "vllm-serve"),
        ("grpocli train 'task=[gsm8k,arithmetic]' task.gsm8k.wei", "task.gsm8k.weight="),
        ("grpocli vllm-serve por", "port="),
        ("grpocli train algorithm=nonsense tas", "task="),
        ("grpocli compare x", ""),
    ],
)
def test_a_line_has_its_candidates_and_no_error(
    line: str, among: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert complete(["-sc", "query=bash"], ("train", "plan", "vllm-serve", "compare")) == 0
    printed = capsys.readouterr()
    assert (among in printed.out.split()) if among else not printed.out.strip()
    assert printed.err == ""
