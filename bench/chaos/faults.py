"""A server behind a proxy that fails or answers nonsense: passing faults change nothing, nonsense is not trained on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from chaos.servers import REAL, STAND_IN, Answer, BrokenConnection, behind_proxy, server
from chaos.trial import Kind, PromiseBroken, require, spread
from chaos.workspace import SMALL, CommandResult, Workspace, check_equal, metrics

from grpocli.rollout.vllm.client import GENERATE

STEPS, PROMPTS = 4, 4  # of `SMALL`; a step has one request for each prompt
ALWAYS = 10**9
CALLS = ("/pause", "/resume", "/weight_info", "/start_weight_update", "/update_weights", "/finish_weight_update")
Choices = list[dict[str, Any]]


def reversed_tokens(choices: Choices) -> None:
    for choice in choices:
        choice["token_ids"] = [*choice["token_ids"][:-1][::-1], choice["token_ids"][-1]]


def logprobs(change: Callable[[float], float]) -> Callable[[Choices], None]:
    def spoil(choices: Choices) -> None:
        for token in choices[0]["logprobs"]["content"]:
            token["logprob"] = change(token["logprob"])

    return spoil


def tokens(change: Callable[[list[int]], list[int]]) -> Callable[[Choices], None]:
    """Change the tokens, and repeat or drop log-probs to match."""

    def spoil(choices: Choices) -> None:
        one = choices[-1]
        one["token_ids"] = change(one["token_ids"])
        one["logprobs"]["content"] = (one["logprobs"]["content"] * len(one["token_ids"]))[: len(one["token_ids"])]
        for label in one.get("weight_versions") or []:
            label["end"] = len(one["token_ids"])

    return spoil


def first(**changes: Any) -> Callable[[Choices], None]:
    return lambda choices: choices[0].update(changes)


def longer(choices: Choices) -> None:
    choices[0]["logprobs"]["content"].append({"logprob": -0.5})


def cut_off(choices: Choices) -> None:
    """One token, with the finish reason of the limit. With another reason it could not be detected."""
    tokens(lambda ids: ids[:1])(choices)
    choices[-1]["finish_reason"] = "length"


def wrong_spans(choices: Choices) -> None:
    for label in choices[0].get("weight_versions") or []:
        label["end"] += 5


NONSENSE: dict[str, Callable[[Choices], None]] = {
    "positive log-probs": logprobs(lambda value: 0.5),
    "log-probs that are NaN": logprobs(lambda value: math.nan),
    "log-probs of minus infinity": logprobs(lambda value: -math.inf),
    "log-probs that are texts": logprobs(lambda value: "x"),  # type: ignore[arg-type,return-value]
    "completions longer than asked": tokens(lambda ids: (ids * 40)[:40]),
    "ids outside the vocabulary": tokens(lambda ids: [10**6, *ids[1:]]),
    "negative ids": tokens(lambda ids: [-1, *ids[1:]]),
    "ids that are no integers": tokens(lambda ids: [0.5, *ids[1:]]),  # type: ignore[list-item]
    "no tokens": tokens(lambda ids: []),
    "a completion too few": lambda choices: choices.pop() and None,
    "a completion too many": lambda choices: choices.append(dict(choices[0])),
    "the same completion twice": lambda choices: choices[0].update(choices[1]),
    "more log-probs than tokens": longer,
    "an unknown reason": first(finish_reason="tired"),
    "cut off before its end": cut_off,
    "spans that do not add up": wrong_spans,
    "no log-probs": first(logprobs=None),
}
EVERYWHERE: dict[str, Callable[[Choices], None]] = {
    "reversed tokens": reversed_tokens,
    "log-probs of other weights": lambda choices: [logprobs(lambda v: 4 * v - 4)([one]) for one in choices] and None,
}
GARBAGE = {
    "HTML": b"<html><body>Welcome</body></html>",
    "half of JSON": b'{"choices": [{"index": 0,',
    "a list": b"[1, 2]",
    "nothing": b"",
    "escapes": b'{"error": "\\u001b]0;owned\\u0007"}',
}
BREAKS = ("a reset", "half an answer", "no answer")
PASSES = ("status 429", "status 500", "status 502", "status 503", *BREAKS, "late")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the tables above in `times` answers to `path`, after `after` correct ones. kind: of server."""

    what: str
    path: str
    after: int
    times: int
    kind: str
    attacks = 1

    def __str__(self) -> str:
        times = "always" if self.times == ALWAYS else f"{self.times} times"
        return f"{self.kind}: {self.what}, {self.path}, {times} after {self.after}"

    def execute(self, workspace: Workspace) -> None:
        upstream = server(workspace, self.kind)
        run = workspace.folder / "run"
        with behind_proxy(workspace, upstream, self.path, self.spoil) as proxy:
            more = [f"engine.base_url={proxy.url}", f"hydra.run.dir={run}"]
            if self.times == ALWAYS:
                more.append("engine.reconnect_timeout=4")
            if self.what in EVERYWHERE:
                more.append("rollout.max_prob_error=1.5")  # the model's tokens are almost equally likely
            ended = workspace.run("train", *SMALL, "engine=vllm", *more)
            url, reached = proxy.url, proxy.count
        require(reached > self.after, f"the fault was never reached{ended.tail}")
        if self.at_first_contact:
            ended.check(2, url)
        elif self.what in PASSES and self.times < ALWAYS:
            ended.check(0)
            check_equal(run, workspace.shared.once(f"with {self.kind}", lambda: undisturbed(workspace, self.kind)))
        else:
            self.check_stopped(ended, run, url)

    @property
    def at_first_contact(self) -> bool:
        """Whether the connection breaks at the first request, as if no server existed."""
        return (self.path, self.after) == ("/weight_info", 0) and self.what in BREAKS

    def check_stopped(self, ended: CommandResult, run: Path, url: str) -> None:
        """The run stopped with one error before a wrong answer, and after a checkpoint if the server failed."""
        rows = metrics(run)
        done = self.after // PROMPTS if self.path == GENERATE else STEPS
        require(len(rows) <= done, f"it trained {len(rows)} steps, including wrong answers{ended.tail}")
        if self.what in PASSES or (self.what in GARBAGE and ended.code == 3):
            ended.check(3)
            require(url in ended.text, f"it does not name the server{ended.tail}")
            last = run / "checkpoints" / f"step_{len(rows):06d}"
            require(not rows or (last / "trainer.json").exists(), f"there is no checkpoint of step {len(rows)}")
        elif self.what in EVERYWHERE:
            ended.check(1, "rollout.max_prob_error")
        else:
            ended.check(1, url)

    def spoil(self, number: int, ask: Callable[[], Answer]) -> Answer:
        if not self.after <= number < self.after + self.times:
            return ask()
        if self.what.startswith("status"):
            return int(self.what.split()[1]), b'{"error": {"message": "busy", "code": 0}}'
        if self.what == "a reset":
            raise BrokenConnection
        if self.what == "no answer":  # although the server has computed it
            ask()
            raise BrokenConnection
        status, data = ask()
        if self.what == "half an answer":
            raise BrokenConnection(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(data) + 1) + data[: len(data) // 2]
            )
        if self.what == "late":
            time.sleep(8)
            return status, data
        if self.what in GARBAGE:
            return 200, GARBAGE[self.what]
        answer = json.loads(data)
        (NONSENSE | EVERYWHERE)[self.what](answer["choices"])
        return status, json.dumps(answer).encode()


def undisturbed(workspace: Workspace, kind: str) -> Path:
    """A run whose proxy changes nothing."""
    run = workspace.shared.folder / f"with_{kind.replace(' ', '_')}"
    with behind_proxy(workspace, server(workspace, kind), GENERATE, lambda number, ask: ask()) as proxy:
        ended = workspace.run("train", *SMALL, "engine=vllm", f"engine.base_url={proxy.url}", f"hydra.run.dir={run}")
    if ended.code != 0:
        raise PromiseBroken(f"the undisturbed run with {kind} failed{ended.tail}")
    return run


def draw(random: Random, count: int) -> Sequence[Fault]:
    cases = [
        *((what, random.choice((GENERATE, *CALLS)), random.randint(1, 2)) for what in PASSES),
        *((what, GENERATE, 1) for what in PASSES),
        *((what, GENERATE, ALWAYS) for what in PASSES if what != "late"),
        *((what, GENERATE, 1) for what in NONSENSE),
        *((what, GENERATE, ALWAYS) for what in EVERYWHERE),
        *((what, GENERATE, 1) for what in GARBAGE),
    ]
    trials = []
    for i, (what, path, times) in enumerate(spread(random, cases, count)):
        requests = PROMPTS * STEPS if path == GENERATE else STEPS - 1
        after = random.randrange(requests if times < ALWAYS else requests - PROMPTS)
        if what in EVERYWHERE:
            after -= after % PROMPTS  # whole steps, so that the first one exceeds the bound
        trials.append(Fault(what, path, after, times, REAL if i % 4 == 0 else STAND_IN))
    return trials


KIND = Kind("faults", 47, draw)
