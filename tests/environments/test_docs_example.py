"""The example environment of docs/environments.md."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from grpocli.environments import worker_functions

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_documented_environment_works(tmp_path: Path) -> None:
    block = re.search(r"A file `guess\.py`:\n\n((?:    .*\n|\n)+)", DOCS.read_text())
    assert block
    (tmp_path / "guess.py").write_text(textwrap.dedent(block[1]))
    named = f"{tmp_path}/guess.py:Guess", '{"bonus": 0.5}'
    (state,) = worker_functions.reset(*named, {"answer": "42", "task_name": "numbers"})

    def say(text: str, state: dict[str, Any]) -> list[Any]:
        return worker_functions.step(*named, [{"role": "assistant", "content": text}], state)

    hints = []
    for guess in ("7", "50", "what?"):
        observation, rewards, done, state = say(guess, state)
        hints.append(observation[0]["content"])
        assert (rewards, done) == ({"reward": 0.0}, False)
    assert hints == ["higher", "lower", "lower"]
    assert say(" 42 ", state)[:3] == [[], {"found": 1.0, "early": 0.125}, True]
