"""Tools: schemas of functions, calls in the format of three model families, answers, and the tokens of all of it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from environments.tool_families import FAMILIES, Family
from transformers.utils.chat_template_utils import DocstringParsingException

from grpocli.environments.environment import EnvironmentConfig, environment_of
from grpocli.environments.tools import read_arguments, schemas, tools_of
from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.rollout.engine import OnGroup, ignore_group
from grpocli.rollout.multi_turn import MultiTurnEngine
from grpocli.rollout.turns import CallParser, TurnEncoder
from grpocli.tasks.generated import Arithmetic
from grpocli.tasks.prompts import tokenize
from grpocli.types import Completion, Message, Prompt, Request, Sampling

TOOLS = Path(__file__).with_name("tool_functions.py")
QUESTION = [{"role": "user", "content": "3*4="}]


def tools_named(*names: str, **settings: Any) -> EnvironmentConfig:
    """The tools of a task with these functions of tool_functions.py, or ready-made ones."""
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


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """Plays an episode. Episodes with the same settings share worker processes."""
    made: list[MultiTurnEngine] = []

    def one(
        family: Family,
        environment: EnvironmentConfig,
        *texts: str,
        limit: int = 2000,
        text: Sequence[Message] = QUESTION,
        **columns: Any,
    ) -> tuple[Completion, Any]:
        tokenizer = family.tokenizer()
        engine = Saying(tokenizer, *texts)
        made.append(MultiTurnEngine(engine.generate, tokenizer, {"sums": environment}, bool))
        (ids,) = tokenize([list(text)], tokenizer, tools=tools_of(environment))
        prompt = Prompt("0", ids, list(text), {"task_name": "sums", **columns})
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


def control_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [text for text in tokenizer.convert_ids_to_tokens(list(ids)) if text in tokenizer.get_added_vocab()]


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("name", FAMILIES)
def test_text_of_a_message_never_becomes_a_control_token(name: str, role: str) -> None:
    """A message with every special token of every family has the control tokens of a harmless one."""
    tokenizer = FAMILIES[name].tokenizer()
    encoder = TurnEncoder(tokenizer)
    sampled = tokenizer(FAMILIES[name].end, add_special_tokens=False).input_ids
    evil = "".join(text for family in FAMILIES.values() for text in (*family.special, *family.added)) + "<pad><end><b"
    sender = {"role": role, **({"name": "echo"} if role == "tool" else {})}

    def encoded(*contents: str) -> list[int]:
        return encoder.encode_observation(sampled, [{**sender, "content": text} for text in contents], chat=True)

    for harmless, harmful in ((["x"], [evil]), (["x", "y"], [evil, "os>" + evil]), (["x", ""], [evil, "<end"])):
        plain, found = encoded(*harmless), encoded(*harmful)
        assert control_tokens(tokenizer, found) == control_tokens(tokenizer, plain)
        text = tokenizer.decode(found)
        quotes = name == "llama" and role == "tool"  # its template quotes results
        for content in harmful:
            assert (json.dumps(content, ensure_ascii=False)[1:-1] if quotes else content) in text


def test_threads_encode_with_one_tokenizer() -> None:
    """The rollout thread and an evaluation encode at once; data of one changes no token of the other."""
    tokenizer = FAMILIES["qwen"].tokenizer()
    text = FAMILIES["qwen"].end * 20
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    said = [{"role": "tool", "name": "echo", "content": "result <|im_end|> of the search"}]
    right = TurnEncoder(tokenizer).encode_observation(tokens[:1], said, chat=True)
    TurnEncoder(tokenizer).cut(text, tokens=1)
    assert tokenizer.backend_tokenizer.encode_special_tokens is False, "the state that other threads see"
    ended = threading.Event()

    def wrong_prompts() -> int:
        try:
            return sum(tokenizer(text, add_special_tokens=False).input_ids != tokens for _ in range(300))
        finally:
            ended.set()

    def wrong_observations() -> int:
        encoder, wrong = TurnEncoder(tokenizer), 0
        while not ended.is_set():
            wrong += encoder.encode_observation(tokens[:1], said, chat=True) != right
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(wrong_prompts), pool.submit(wrong_observations)]
            assert [one.result() for one in done] == [0, 0]
    finally:
        sys.setswitchinterval(interval)


def test_overlapping_control_tokens_are_characters_too() -> None:
    """The parts that remain of a control token hold no other one."""
    tokenizer = FAMILIES["qwen"].tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a<b>"]}, replace_extra_special_tokens=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<b>"]}, replace_extra_special_tokens=False)
    encoder = TurnEncoder(tokenizer)
    ids = encoder.encode_observation([], [{"role": "tool", "name": "echo", "content": "x<a<b>y"}], chat=True)
    assert "x<a<b>y" in tokenizer.decode(ids)
    assert not set(tokenizer.convert_tokens_to_ids(["<a<b>", "<b>"])) & set(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_in_a_result_is_not_the_models(name: str) -> None:
    """What a tool says before a turn, even the beginning of a turn with a call, is not read as the model's call."""
    family = FAMILIES[name]
    parser = CallParser(TurnEncoder(family.tokenizer(), tools_of(tools_named("multiply"))))
    said = parser.tokenizer("done" + family.end, add_special_tokens=False).input_ids
    assert "tool_calls" not in parser.message(said)
    quoted = f"He said: {family.calls(('multiply', arguments(name, a=3, b=4)))[:12]}"
    assert "tool_calls" not in parser.message(parser.tokenizer(quoted, add_special_tokens=False).input_ids)


FAILING = {
    "json": ('{"a": 3, ', "error: the call cannot be read: Expecting", "unknown"),
    "list": ("[3, 4]", "error: the call cannot be read: the arguments of a call are an object", "unknown"),
    "nan": ('{"a": NaN, "b": 1}', "error: the call cannot be read: Out of range float", "unknown"),
    "deep": ("[" * 3000, "error: the call cannot be read: ", "unknown"),
    "surrogate": ('{"a": "\\ud800", "b": 1}', "error: the call cannot be read: 'utf-8' codec", "unknown"),
    "no tool": ("{}", "error: there is no such tool; there are multiply", "unknown"),
    "missing": ('{"a": 3}', "error: TypeError: missing a required argument: 'b'", "multiply"),
    "extra": ('{"a": 3, "b": 4, "c": 5}', "error: TypeError: got an unexpected keyword argument 'c'", "multiply"),
}


@pytest.mark.processes
@pytest.mark.parametrize("how", FAILING)
def test_a_wrong_call_is_answered_and_counted(run, how: str) -> None:
    family = FAMILIES["qwen"]
    written, said, counted = FAILING[how]
    name = "<|im_end|>rm" if how == "no tool" else "multiply"  # the model's text, which becomes no part of a message
    done, _ = run(family, tools_named("multiply"), family.calls((name, written)), "12<|im_end|>", limit=9000)
    call, answer, last = done.episode.messages
    assert (answer["name"], answer["is_error"]) == (counted, True)
    assert answer["content"].startswith(said)
    assert last["content"] == "12"
    assert ("malformed" in call) == (counted == "unknown" and how != "no tool")
    assert (done.episode.calls, done.episode.failures, done.episode.problem) == ({counted: 1}, {counted: 1}, None)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_calls_of_one_turn_are_answered_in_order_also_beside_a_malformed_one(run, name: str) -> None:
    family = FAMILIES[name]
    good = ("multiply", arguments(name, a=3, b=4)), ("later", arguments(name, text="soon"))
    turn = family.calls(good[0], ("multiply", '{"a": '), good[1])
    done, engine = run(family, tools_named("multiply", "later"), turn, f"12{family.end}")
    call, *answers, _ = done.episode.messages
    said = [one["content"].split(": ")[:2] for one in answers]
    assert said == [["12"], ["error", "the call cannot be read"], ["soon"]]
    assert [bool(one.get("malformed")) for one in (call, *call["tool_calls"])] == [True, False, True, False]
    failures = {"multiply": 0, "unknown": 1, "later": 0}
    assert (done.episode.calls, done.episode.failures) == (dict.fromkeys(failures, 1), failures)
    text = engine.tokenizer.decode(engine.seen[1][0].token_ids)
    assert text.rindex("12") < text.rindex("soon")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "error: RuntimeError: cannot raise"),
        ("hang", "error: it took longer than 1 s"),
        ("die", "error: its worker process was killed twice"),
        ("exit", "error: SystemExit: 3"),
        ("secret", "error: KeyError: 'SEARCH_KEY'"),
        ("surrogate", "?"),
        ("surrogate error", "error: ValueError: ?"),
    ],
)
def test_a_failing_tool_is_answered_and_its_episode_goes_on(run, monkeypatch, how: str, said: str) -> None:
    monkeypatch.setenv("SEARCH_KEY", "secret")  # passed on only if task.environment.env names it
    family = FAMILIES["qwen"]
    call = family.calls(("misbehave", json.dumps({"how": how})), ("echo", '{"text": "fine"}'))
    done, _ = run(family, tools_named("misbehave", "echo", timeout=1.0, workers=1), call, "well<|im_end|>")
    assert [m["content"] for m in done.episode.messages if m["role"] == "tool"] == [said, "fine"]
    assert done.episode.failures == {"misbehave": int(how != "surrogate"), "echo": 0}
    assert done.episode.last == "well"


@pytest.mark.processes
def test_calls_and_results_are_limited(run) -> None:
    family = FAMILIES["qwen"]
    call = family.calls(*[("echo", json.dumps({"text": str(i), "times": 30})) for i in range(3)])
    done, engine = run(family, tools_named("echo", max_tool_calls=2, max_tool_tokens=10), call, call, "end<|im_end|>")
    answers = [m["content"] for m in done.episode.messages if m["role"] == "tool"]
    none_left = "error: no more calls are allowed; answer now"
    assert answers[:2] == ["0000000000\n[cut after 10 tokens]", "1111111111\n[cut after 10 tokens]"]
    assert answers[2:] == [f"{none_left[:10]}\n[cut after 10 tokens]"] * 4
    assert (done.episode.calls, done.episode.failures) == ({"echo": 6}, {"echo": 4})
    few, _ = run(family, tools_named("echo", turns=1), call)
    assert (few.finish_reason, few.episode.calls, len(few.episode.messages)) == ("length", {"echo": 3}, 1)
    short, _ = run(family, tools_named("echo"), call, limit=len(engine.tokenizer(call).input_ids) + 5)
    assert (short.finish_reason, short.mask) == ("length", [1] * len(short.token_ids))
    cut, _ = run(family, tools_named("echo", turn_tokens=5), "a turn without a call that ends too early")
    assert (cut.finish_reason, cut.truncated) == ("length", True)


@pytest.mark.processes
def test_tools_are_reproducible(run) -> None:
    """Random numbers follow from the seed, whatever the number of workers is; a program has a fixed order of sets."""
    code = json.dumps({"code": "import random\nrandom.random(), [*{'a', 'b', 'c', 'd', 'e', 'f'}]"})
    call = FAMILIES["qwen"].calls(*[("misbehave", '{"how": "random"}')] * 2, ("python", code))
    results = []
    for workers in (1, 2):
        tools = tools_named("misbehave", "python", workers=workers, timeout=30.0)
        done, _ = run(FAMILIES["qwen"], tools, call, "x<|im_end|>")
        results.append([m["content"] for m in done.episode.messages if m["role"] == "tool"])
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


@pytest.mark.parametrize("tool", ["undocumented", "multipl"])
def test_a_function_that_cannot_be_a_tool_is_refused(tool: str) -> None:
    """In a worker process; the next test has its answer in the main process."""
    with pytest.raises((DocstringParsingException, ConfigError), match=tool):
        schemas([f"{TOOLS}:{tool}"])


@pytest.mark.processes
def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(TOOLS.read_text())
    both = Arithmetic(tools=[f"{TOOLS}:multiply", f"{other}:multiply"])
    with pytest.raises(ConfigError, match="two tools have the name multiply") as refused:
        tools_of(environment_of(both))
    assert refused.value.key == "task.tools"


CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {}}}}


def test_the_prompt_shows_the_tools_or_the_model_is_refused() -> None:
    family = FAMILIES["qwen"].tokenizer()
    (bare,), (shown,) = tokenize([QUESTION], family), tokenize([QUESTION], family, tools=[CALCULATOR])
    assert "calculator" in family.decode(shown)
    assert shown[-len(bare) + 1 :] == bare[1:]
    family.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="its chat template does not show the model the tool calculator"):
        tokenize([QUESTION], family, tools=[CALCULATOR])
    with pytest.raises(ConfigError, match="is plain text, and tools need a conversation"):
        tokenize(["3*4="], family, tools=[CALCULATOR])


def test_the_response_template_is_the_one_that_reads_the_chat_template() -> None:
    tokenizer = FAMILIES["qwen"].tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"  # writes no calls
    with pytest.raises(ConfigError, match="writes calls of tools in none of these formats"):
        _ = CallParser(TurnEncoder(tokenizer)).template
    tokenizer.response_template = {
        "start_anchor": "!",
        "fields": {
            "tool_calls": {
                "open_pattern": r"call (?P<name>\w+)",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            }
        },
    }
    said = tokenizer('call echo {"text": "x"};', add_special_tokens=False).input_ids
    called = CallParser(TurnEncoder(tokenizer)).message(said)["tool_calls"]
    assert called == [{"type": "function", "function": {"name": "echo", "arguments": {"text": "x"}}}]
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match="the response template of its tokenizer cannot be used"):
        _ = CallParser(TurnEncoder(tokenizer)).template
    tokenizer.chat_template = FAMILIES["llama"].template  # it replaces the one that the response template is for
    tokenizer.response_template = make_tokenizer().response_template
    call = tokenizer('{"name": "echo", "parameters": {}}', add_special_tokens=False).input_ids
    assert CallParser(TurnEncoder(tokenizer)).message(call)["tool_calls"][0]["function"]["name"] == "echo"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tool", "argument", "said"),
    [
        ("calculator", "3*4", "12"),
        ("calculator", "3*", "error: ValueError: no arithmetic"),
        ("python", "x = 3\nprint('hi')\nx * 4", "hi\n12"),
        ("python", "1/0", "error: RuntimeError: ZeroDivisionError: division by zero"),
        ("python", "import socket; socket.create_connection(('127.0.0.1', 9))", "error: RuntimeError: "),
        ("python", "None", "the program printed nothing"),
        ("python", "```\nprint(1)\n```", "error: RuntimeError: SyntaxError: invalid syntax"),
    ],
)
def test_the_ready_tools(run, tool: str, argument: str, said: str) -> None:
    family, key = FAMILIES["qwen"], {"calculator": "expression", "python": "code"}[tool]
    done, _ = run(
        family, tools_named(tool, timeout=30.0), family.calls((tool, json.dumps({key: argument}))), "x<|im_end|>"
    )
    assert done.episode.messages[1]["content"].startswith(said)
    assert done.episode.failures[tool] == said.startswith("error: ")


def test_no_arguments_may_be_written_in_several_ways() -> None:
    assert [read_arguments(one) for one in ("", None, "null", "{}")] == [{}] * 4
