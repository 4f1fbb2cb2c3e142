"""Runs with environments of one and of several turns: combined, resumed and broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL
from cli.test_failures import failed

pytestmark = pytest.mark.processes

SCRIPTED = Path(__file__).parents[1] / "environments" / "scripted.py"
TWO = ["train", "task=[arithmetic]", "+task@task.again=arithmetic", f"task.again.environment.name={SCRIPTED}:Retry"]
TWO += ["task.again.environment.turn_tokens=8", "rollout.max_completion_tokens=48", "reward=[exact_match,environment]"]
TWO += ["task.arithmetic.rewards=[exact_match]", "task.again.rewards=[environment]"]


@pytest.mark.parametrize(
    ("name", "said"), [("Env", "KeyError: 'board' ("), ("Evn", 'has no function or class Evn; did you mean "Env"')]
)
def test_an_environment_that_cannot_start_gives_a_one_sentence_error(
    grpocli, name: str, said: str, tmp_path: Path
) -> None:
    broken = tmp_path / "env.py"
    broken.write_text("class Env:\n    def reset(self, metadata):\n        raise KeyError('board')\n")
    sentence = failed(grpocli, 2, "train", *SMALL, f"task.environment.name={broken}:{name}")
    assert f"task.environment.name={broken}:{name}: " in sentence
    assert said in sentence
