"""Tools: Python functions that a model calls between its turns, as `task.tools` names them.

A tool is a function with type hints and a docstring in Google's format, as TRL takes it. Worker processes make its JSON
schema from these and run its calls; the trainer never imports the user's file.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

from grpocli.config.user_code import load
from grpocli.environments.calculator import value_of
from grpocli.environments.environment import TOOL_SCHEMAS, TOOLS, TOOLS_KEY, WORKER, EnvironmentConfig
from grpocli.errors import ConfigError
from grpocli.rewards.reward import Failure
from grpocli.rewards.worker_pool import WorkerPool
from grpocli.text import one_line, shorten
from grpocli.types import Message

READY = {name: f"grpocli.environments.tools:{name}" for name in ("calculator", "python")}
"""The tools that come with grpocli."""
LONGEST = 200_000
"""Most characters of a result."""
LONGEST_ERROR = 300
"""Most characters of an error that the model sees."""
SCHEMA_TIMEOUT = 120.0
"""Seconds to import all tools and make their schemas."""

UNKNOWN = "unknown"
"""The name in answers to malformed calls. What the model wrote is never part of a rendered message."""
NO_CALLS_LEFT = "error: no more calls are allowed; answer now"

RUNNER = """
import ast
import random

random.seed({seed})

def execute(code):
    tree = ast.parse(code, "<program>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space = {{"__name__": "__main__"}}
    exec(compile(tree, "<program>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), space)
        if value is not None:
            print(repr(value))

execute({code!r})
"""
"""The program that runs the model's: as in a notebook, the value of a last expression is printed."""
Schema = dict[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""


def tools_of(environment: EnvironmentConfig | None) -> list[Schema]:
    """The schemas of a task's tools; empty if it has none. Raises ConfigError for a function that cannot be a tool."""
    if environment is None:
        return []
    given: list[Schema] | None = environment.arguments.get(TOOL_SCHEMAS)
    if environment.name == TOOLS:
        given = json.loads(_schemas(tuple(environment.arguments["tools"]), tuple(environment.env)))
    found = given or []
    names = [name_of(one) for one in found]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(
            f"two tools have the name {twice}: rename one of them",
            key=TOOLS_KEY if environment.name == TOOLS else "task",
        )
    return found


@lru_cache(maxsize=64)
def _schemas(specs: tuple[str, ...], variables: tuple[str, ...]) -> str:
    given, value = ["schemas", list(specs)], f"[{','.join(specs)}]"
    return json.dumps(call_in_worker(WORKER, given, SCHEMA_TIMEOUT, variables, TOOLS_KEY, value))


def call_in_worker(
    function: str, arguments: Sequence[Any], seconds: float, variables: Sequence[str], key: str, value: str
) -> list[Any]:
    """The list that `module:function` returns within `seconds`. Raises ConfigError, naming `key`, if it fails.

    variables: names of the environment variables that the function needs.
    """
    with closing(WorkerPool(function, 1, seconds, variables)) as pool:
        (found,) = pool.map([list(arguments)])
    if isinstance(found, Failure):
        raise ConfigError(one_line(found.reason), key=key, value=value)
    result: list[Any] = found
    return result


def name_of(schema: Schema) -> str:
    name: str = schema["function"]["name"]
    return name


def calls_in(turn: Message) -> list[dict[str, Any]]:
    """The calls of a turn of the model: `name`, `arguments`, perhaps `id`; `malformed` if one cannot be read."""
    written = turn.get("tool_calls") or ([{"malformed": turn["malformed"]}] if "malformed" in turn else [])
    empty = {"name": UNKNOWN, "arguments": {}}
    more = [{key: call[key] for key in ("id", "malformed") if key in call} for call in written]
    return [{**empty, **call.get("function", {}), **rest} for call, rest in zip(written, more, strict=True)]


def refusal(call: Mapping[str, Any], names: Collection[str]) -> str:
    """Why a call is not run, for the model; empty if it can be. names: of the tools."""
    if "malformed" in call:
        return f"error: the call cannot be read: {call['malformed']}"
    return "" if call["name"] in names else f"error: there is no such tool; there are {', '.join(names)}"


def read_arguments(given: Any) -> Any:
    """The arguments of a call, which may be the JSON of an object; "" and null are none. Raises ValueError."""
    if isinstance(given, str):
        given = json.loads(given) if given.strip() else None
    return {} if given is None else given


def answer_to(call: Mapping[str, Any], names: Collection[str], content: Any, failed: bool) -> Message:
    """The message of the role `tool` that answers a call."""
    name = call["name"] if call["name"] in names else UNKNOWN
    identity = {"tool_call_id": call["id"]} if "id" in call else {}
    return {"role": "tool", "name": name, "content": content, **identity, **({"is_error": True} if failed else {})}


def schemas(specs: Sequence[str]) -> list[Schema]:
    """The schemas of tools. Runs in a worker process.

    Raises an error of transformers if a function cannot be a tool, SandboxError if no sandbox holds.
    """
    if {"python", READY["python"]} & set(specs):
        sandbox()
    return [_schema(spec) for spec in specs]


def run_tool(spec: str, arguments: dict[str, Any], seed: int) -> list[str]:
    """The result of a call as [text]; raises RuntimeError with a text for the model. Runs in a worker process."""
    function = _function(spec)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    try:
        inspect.signature(function).bind(**arguments)
        result = function(**arguments)
        text = str(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RuntimeError(encodable(shorten(reason, LONGEST_ERROR))) from error
    return [encodable(text[:LONGEST])]


def encodable(text: str) -> str:
    """A text without lone surrogates, which no tokenizer accepts."""
    return text.encode(errors="replace").decode()


@lru_cache(maxsize=64)
def _function(tool: str) -> Callable[..., Any]:
    return load(READY.get(tool, tool), TOOLS_KEY)


def _schema(tool: str) -> Schema:
    from transformers.utils.chat_template_utils import get_json_schema

    schema: Schema = get_json_schema(_function(tool))
    return schema


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % and parentheses, such as 12*(3+4).
    """
    value = value_of(expression)
    if value.startswith("error: "):
        raise ValueError(value.removeprefix("error: "))
    return value


def python(code: str) -> str:
    """Run a Python program in a sandbox without network, and return what it prints.

    Args:
        code: The program. The value of its last line is printed, too. Each call starts anew.
    """
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import Limits, Submission, run

    backend = backend_named(sandbox(), None)
    program = RUNNER.format(code=code, seed=random.getrandbits(32))  # the call's seed
    result = run(Submission(program, ["pass"]), Limits(), backend)
    if not all(result.passed):
        raise RuntimeError(f"{result.printed}{result.error}")
    return result.printed.rstrip("\n") or "the program printed nothing"


@lru_cache(maxsize=1)
def sandbox() -> str:
    """The name of a sandbox that holds on this machine. Raises SandboxError without one: nothing runs unprotected."""
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import Limits

    return select_backend(None, Limits())
