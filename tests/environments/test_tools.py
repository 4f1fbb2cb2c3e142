"""Tools: schemas of functions, calls in the format of three model families, answers, and the tokens of all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from environments.test_episodes import Alone
from environments.tool_families import FAMILIES, Family

from grpocli.environments.environment import EnvironmentConfig, environment_of
from grpocli.environments.tools import tools_of
from grpocli.rollout.engine import OnGroup, ignore_group
from grpocli.rollout.multi_turn import MultiTurnEngine
from grpocli.tasks.arithmetic import Arithmetic
from grpocli.tasks.prompts import tokenize
from grpocli.types import Completion, Prompt, Request, Sampling

TOOLS = Path(__file__).with_name("tool_families.py")
QUESTION = [{"role": "user", "content": "3*4="}]


def tools_named(*names: str, **settings: Any) -> EnvironmentConfig:
    """The tools of a task with these functions of tool_families.py, or ready-made ones."""
    specs = [name if name in ("calculator", "python") else f"{TOOLS}:{name}" for name in names]
    limits = {key: settings.pop(key) for key in ("max_tool_calls", "max_tool_tokens") if key in settings}
    found = environment_of(Arithmetic(tools=specs, environment=EnvironmentConfig(**settings), **limits))
    assert found is not None
    return found


def arguments(family: str, **values: Any) -> str:
    """Arguments of a call as a family writes them."""
    if family != "gemma":
        return json.dumps(values)
    written = [f'{key}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{key}:{json.dumps(v)}" for key, v in values.items()]
    return "{" + ",".join(written) + "}"


class Saying:
    """An engine that says the n-th of the texts in turn n; each text ends with its family's end of a turn."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.seen: list[list[Request]] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        text = self.texts[len(self.seen)]
        self.seen.append(list(requests))
        found = []
        for k, request in enumerate(requests):
            limit = request.under(sampling).max_tokens
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            done = Completion(ids[:limit], [-0.5] * len(ids[:limit]), "stop" if len(ids) <= limit else "length", 0)
            found.append([done] * request.n)
            on_group(k, found[-1])
        return found


@pytest.fixture
def run() -> Iterator[Any]:
    made: list[MultiTurnEngine] = []

    def one(family: Family, environment: EnvironmentConfig, *texts: str, limit: int = 2000) -> tuple[Completion, Any]:
        tokenizer = family.tokenizer()
        engine = Saying(tokenizer, *texts)
        made.append(MultiTurnEngine(engine, tokenizer, {"sums": environment}, Alone()))  # type: ignore[arg-type]
        (ids,) = tokenize([QUESTION], tokenizer, tools=tools_of(environment))
        prompt = Prompt("0", ids, QUESTION, {"task_name": "sums"})
        ((done,),) = made[-1].generate([prompt], [Request(ids, 1, 7)], Sampling(limit))
        return done, engine

    yield one
    for episodes in made:
        episodes.close()


@pytest.mark.processes
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_run_and_its_result_is_read_but_not_trained_on(run, name: str) -> None:
    """Tokens are the engine's; with the result between them they are those of the whole conversation."""
    family = FAMILIES[name]
    call, answer = family.calls(("multiply", arguments(name, a=3, b=4))), f"It is 12{family.end}"
    done, engine = run(family, tools_named("multiply"), call, answer)
    tokenizer, prompt_ids = engine.tokenizer, engine.seen[0][0].token_ids
    assert done.mask is not None
    assert done.episode is not None
    written = tokenizer.decode([t for t, m in zip(done.token_ids, done.mask, strict=True) if m])
    assert written == call + answer
    spoken = tokenizer(answer, add_special_tokens=False).input_ids
    assert engine.seen[1][0].token_ids + spoken == prompt_ids + done.token_ids
    function = {"name": "multiply", "arguments": {"a": 3, "b": 4}}
    assert done.episode.messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "assistant", "content": "It is 12"},
    ]
    assert (done.episode.calls, done.episode.failures) == ({"multiply": 1}, {"multiply": 0})
    whole = tokenizer.apply_chat_template(
        [*QUESTION, *done.episode.messages], tools=tools_of(tools_named("multiply")), tokenize=False
    )
    text = tokenizer.decode(prompt_ids + done.token_ids)
    if name == "gemma":  # its template closes the turn of a call without a new header, the model does not
        whole = whole.replace("<|turn>model\nIt is", "It is")
    assert whole.startswith(text)
    assert whole[len(text) :].strip() == ""
    assert tokenizer(text, add_special_tokens=False).input_ids == prompt_ids + done.token_ids
