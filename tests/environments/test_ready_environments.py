"""The environments that come with grpocli, and the one of docs/environments.md."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from grpocli.environments import worker_functions
from grpocli.environments.calculator import Calculator, value_of
from grpocli.environments.environment import Environment

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *((" 2*(3+4) ", "14"), ("-7//2", "-4"), ("7%4", "3"), ("+3", "3"), ("1/3", "0.333333333333"), ("6/2", "3")),
        *(("1/0", "error: division by zero"), ("1+" * 150 + "1", "error: too long"), ("(" * 90 + "1" + ")" * 90, "1")),
        *(
            (bad, "error: no arithmetic")
            for bad in ("", "2**9", "__import__('os')", "True+1", "1j", "9" * 50, "a", "\0")
        ),
    ],
)
def test_expressions_have_their_values(expression: str, value: str) -> None:
    assert value_of(expression) == value


def test_a_call_is_answered_and_an_answer_ends_the_episode() -> None:
    calculator: Environment = Calculator(cost=0.1)
    state = calculator.reset({"answer": "1,020", "question": "?"})
    asked = [{"role": "user", "content": "12*85?"}, {"role": "assistant", "content": "<<1+1>> no, <<12*85>>"}]
    observation, reward, done, state = calculator.step(asked, state)
    assert (observation, reward, done) == ([{"role": "user", "content": "1020"}], -0.1, False)
    for text, expected in (("It is 1020.", 1.0), ("It is 1021", 0.0), ("no idea", 0.0)):
        assert calculator.step([{"role": "assistant", "content": text}], state)[:3] == ([], expected, True)
    asked = [{"role": "assistant", "content": "12 * 34 = <<12*34=409>>"}]  # GSM8K's notation, with a wrong value
    assert calculator.step(asked, state)[0] == [{"role": "user", "content": "408"}]
    with pytest.raises(ValueError, match="needs an example with a number in `answer`"):
        Calculator().reset({"answer": "many"})


def test_the_documented_environment_works(tmp_path: Path) -> None:
    block = re.search(r"A file `guess\.py`:\n\n((?:    .*\n|\n)+)", DOCS.read_text())
    assert block
    (tmp_path / "guess.py").write_text(textwrap.dedent(block[1]))
    named = f"{tmp_path}/guess.py:Guess", '{"bonus": 0.5}'
    (state,) = worker_functions.reset(*named, {"answer": "42", "task_name": "numbers"})

    def turn(text: str, state: dict[str, Any]) -> list[Any]:
        return worker_functions.step(*named, [{"role": "assistant", "content": text}], state)

    hints = []
    for guess in ("7", "50", "what?"):
        observation, rewards, done, state = turn(guess, state)
        hints.append(observation[0]["content"])
        assert (rewards, done) == ({"reward": 0.0}, False)
    assert hints == ["higher", "lower", "lower"]
    assert turn(" 42 ", state)[:3] == [[], {"found": 1.0, "early": 0.125}, True]
