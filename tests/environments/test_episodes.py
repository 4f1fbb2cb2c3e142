"""Episodes of several turns: their tokens are the engine's, and the mask selects the model's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environments import tool_families

from grpocli.environments.environment import EnvironmentConfig
from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.progress import Watch
from grpocli.rollout.engine import Listener, OnGroup, ignore_group
from grpocli.rollout.multi_turn import MultiTurnEngine, _pools_of, check_environment
from grpocli.rollout.turns import TurnEncoder
from grpocli.types import Completion, Prompt, Request, Sampling

SCRIPTED = Path(__file__).with_name("scripted.py")
COUNTING = EnvironmentConfig(name=f"{SCRIPTED}:Counting")
TALK = [{"role": "user", "content": "47+85="}, {"role": "user", "content": "look\nagain"}]
FAMILIES = {"tiny": make_tokenizer, **{name: tool_families.FAMILIES[name].tokenizer for name in ("qwen", "llama")}}


class Scripted:
    """An engine that writes `a`, `bb`, `ccc` in its turns, plus i letters in the i-th completion."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.seen: list[list[Request]] = []
        self.found_kept: list[list[Any]] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        turn = len(self.seen)
        self.seen.append(list(requests))
        self.found_kept.append([reusable.state for request in requests for reusable in request.reusable_kv])
        for reusable in (reusable for request in requests for reusable in request.reusable_kv):
            reusable.state = turn
        found = []
        for k, request in enumerate(requests):
            limit = request.under(sampling).max_tokens
            ids = [self.tokenizer(chr(97 + turn) * (turn + 1 + i)).input_ids for i in range(request.n)]
            ended = [[*one, self.tokenizer.eos_token_id] for one in ids]
            found.append(
                [
                    Completion(one[:limit], [-0.5] * len(one[:limit]), "stop" if len(one) <= limit else "length", turn)
                    for one in ended
                ]
            )
            on_group(k, found[-1])
        return found


@pytest.fixture
def make_episodes() -> Iterator[Any]:
    made: list[MultiTurnEngine] = []

    def episodes(engine: Any, environment: EnvironmentConfig, tokenizer: Any) -> MultiTurnEngine:
        made.append(MultiTurnEngine(engine.generate, tokenizer, {"game": environment}, bool))
        return made[-1]

    yield episodes
    for one in made:
        one.close()


def prompt_of(tokenizer: Any, task: str = "game", **columns: Any) -> Prompt:
    text = [{"role": "user", "content": "begin"}]
    ids = tokenizer(
        tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    return Prompt("0", ids.input_ids, text, columns | {"task_name": task})


@pytest.mark.processes
def test_groups_that_are_sampled_alone_share_the_workers_of_a_stateful_environment(make_episodes) -> None:
    tokenizer, environment = make_tokenizer(), replace(COUNTING, stateful=True, workers=4)
    for uid in ("0", "1"):
        prompt = replace(prompt_of(tokenizer, turns=1), uid=uid)
        request = Request(prompt.token_ids, 2, 0)
        make_episodes(Scripted(tokenizer), environment, tokenizer).generate([prompt], [request], Sampling(200))
    assert [len(pool._workers) for pool in _pools_of(environment)] == [1] * 4


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_an_episode_are_the_engines(make_episodes, family: str) -> None:
    tokenizer = FAMILIES[family]()
    engine = Scripted(tokenizer)
    prompts = [prompt_of(tokenizer, turns=3), prompt_of(tokenizer, turns=1)]
    requests = [Request(prompt.token_ids, 2, seed) for seed, prompt in enumerate(prompts)]
    episodes = make_episodes(engine, COUNTING, tokenizer)
    found = episodes.generate(prompts, requests, Sampling(200))
    assert [len(asked) for asked in engine.seen] == [2, 2, 2]
    assert len({request.seed for asked in engine.seen for request in asked}) == 6

    for i, done in enumerate(found[0]):
        last = engine.seen[2][i]
        spoken = [*tokenizer("ccc").input_ids, tokenizer.eos_token_id]
        assert prompts[0].token_ids + done.token_ids == last.token_ids + spoken
        assert done.mask is not None
        written = tokenizer.decode([t for t, m in zip(done.token_ids, done.mask, strict=True) if m])
        end = tokenizer.eos_token
        assert written == f"{'a' * (1 + i)}{end}bb{end}ccc{end}"
        assert [p for p, m in zip(done.logprobs, done.mask, strict=True) if m] == [-0.5] * sum(done.mask)
        assert {p for p, m in zip(done.logprobs, done.mask, strict=True) if not m} == {0.0}
        assert done.version == 0
        assert done.spans is not None
        assert sum(tokens for _, tokens in done.spans) == len(done.token_ids)
        assert done.episode is not None
        assert done.episode.turns == 3
        assert done.episode.last == "ccc"
        assert [m["content"] for m in done.episode.messages] == ["a" * (1 + i), "turn 1", "bb", "turn 2", "ccc"]
        assert done.episode.rewards == {"each": 3.0, "length": 6.0 + i}
        whole = tokenizer.apply_chat_template([*prompts[0].text, *done.episode.messages], tokenize=False)
        assert whole.startswith(tokenizer.decode(prompts[0].token_ids + done.token_ids))
    for i, done in enumerate(found[1]):
        assert done.episode is not None
        assert (done.episode.turns, done.mask) == (1, [1] * (2 + i))
        assert not done.truncated


@pytest.mark.processes
def test_a_task_without_an_environment_has_one_turn(make_episodes) -> None:
    tokenizer = FAMILIES["tiny"]()
    engine, told = Scripted(tokenizer), []
    prompts = [prompt_of(tokenizer), prompt_of(tokenizer, task="other")]
    requests = [Request(prompt.token_ids, 2, 0) for prompt in prompts]
    episodes = make_episodes(engine, COUNTING, tokenizer)
    found = episodes.generate(prompts, requests, Sampling(200), lambda k, _: told.append(k))
    assert told == [1]  # for early scoring; episodes are not over yet
    assert [done.episode for done in found[1]] == [None, None]
    assert [done.mask for done in found[1]] == [None, None]
    assert [len(asked) for asked in engine.seen] == [2, 2, 2]


@pytest.mark.processes
def test_turns_and_tokens_are_limited(make_episodes) -> None:
    tokenizer = FAMILIES["tiny"]()
    prompt = prompt_of(tokenizer, turns=9)
    request = Request(prompt.token_ids, 1, 0)

    def one(limit: int, **settings: Any) -> Completion:
        episodes = make_episodes(Scripted(tokenizer), replace(COUNTING, **settings), tokenizer)
        ((done,),) = episodes.generate([prompt], [request], Sampling(limit))
        return done

    few = one(200, turns=2)
    assert (few.episode and few.episode.turns, few.finish_reason, few.token_ids[-1]) == (2, "length", 3)
    short = one(24)
    assert short.finish_reason == "length"
    assert len(short.token_ids) <= 24
    assert short.mask is not None
    assert short.mask[-1] == 1  # the last token is the model's: a final observation is removed
    cut = one(200, turns=2, turn_tokens=1)
    assert cut.mask is not None
    assert sum(cut.mask) == 2
    at_the_limit = one(14, turn_tokens=8)
    assert at_the_limit.finish_reason == "length"
    done = [prompt_of(tokenizer, turns=1)]
    over = make_episodes(Scripted(tokenizer), COUNTING, tokenizer)
    assert over.generate(done, [request], Sampling(2))[0][0].finish_reason == "stop"
    assert over.generate(done, [request], Sampling(1))[0][0].finish_reason == "length"  # cut, whatever its reward
    ends = [token for token, written in zip(cut.token_ids, cut.mask, strict=True) if not written]
    assert ends[0] == tokenizer.eos_token_id  # the template's end of a turn, after the model was cut


@pytest.mark.processes
def test_the_engine_gets_its_state_of_an_episode_back_until_the_end(make_episodes) -> None:
    tokenizer = FAMILIES["tiny"]()
    engine = Scripted(tokenizer)
    prompts = [prompt_of(tokenizer, turns=turns) for turns in (3, 1, 2)]
    requests = [Request(prompt.token_ids, 2, 0) for prompt in prompts]
    make_episodes(engine, COUNTING, tokenizer).generate(prompts, requests, Sampling(200))
    first, second, third = engine.seen
    assert engine.found_kept == [[None] * 6, [0] * 4, [1] * 2]
    assert [request.reusable_kv for request in second] == [
        (reusable,) for k in (0, 2) for reusable in first[k].reusable_kv
    ]
    assert [request.reusable_kv for request in third] == [(reusable,) for reusable in first[0].reusable_kv]
    assert all(reusable.state is None for request in first for reusable in request.reusable_kv)
    one_turn = Scripted(tokenizer)
    make_episodes(one_turn, replace(COUNTING, turns=1), tokenizer).generate(prompts, requests, Sampling(200))
    assert [request.reusable_kv for request in one_turn.seen[0]] == [()] * 3


@pytest.fixture(scope="module")
def breakable() -> Iterator[Any]:
    """The tokenizer and the episodes of an environment that misbehaves; its two workers serve all tests."""
    tokenizer = FAMILIES["tiny"]()
    games = {"game": EnvironmentConfig(name=f"{SCRIPTED}:Broken", timeout=1.0, workers=2)}
    episodes = MultiTurnEngine(Scripted(tokenizer).generate, tokenizer, games, bool)
    yield tokenizer, episodes
    episodes.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("reset", "the environment's reset failed: RuntimeError: no such episode"),
        ("raise", "the environment's turn 1 failed: RuntimeError: lost the board"),
        ("hang", "the environment's turn 1 failed: it took longer than 1 s"),
        ("regex", "the environment's turn 1 failed: it took longer than 1 s"),
        ("die", "the environment's turn 1 failed: its worker process was killed twice"),
        ("shape", "step returned 5, not (observation, reward, done, metadata)"),
        ("role", "a `role` of system, user, tool, developer"),
        ("message", "step observed 'x'; a message has"),
        ("number", "expected finite numbers"),
        ("metadata", "Object of type set is not JSON serializable"),
        ("long", "step observed 300,000 characters; at most 200,000 are allowed"),
    ],
)
def test_a_broken_environment_ends_only_its_own_episodes(breakable, how: str, said: str) -> None:
    tokenizer, episodes = breakable
    prompts = [prompt_of(tokenizer, how=how), prompt_of(tokenizer, how="fine")]
    (broken,), (fine,) = episodes.generate(prompts, [Request(p.token_ids, 1, 0) for p in prompts], Sampling(50))
    assert broken.episode is not None
    assert said in str(broken.episode.problem)
    assert fine.episode is not None
    assert (fine.episode.problem, fine.episode.rewards) == (None, {"reward": 1.0})


@pytest.mark.processes
@pytest.mark.parametrize(("how", "said"), [("reset", "RuntimeError: no such episode"), ("fine", "")])
def test_check_environment_needs_no_model(how: str, said: str) -> None:
    task = EnvironmentConfig(name=f"{SCRIPTED}:Broken", timeout=10.0)
    example = {"prompt": "not sent", "how": how, "board": Path("no JSON")}
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_environment("game", task, example)


@pytest.mark.processes
def test_an_environment_gets_only_the_variables_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = EnvironmentConfig(name=f"{SCRIPTED}:Broken", timeout=10.0, env=["SEARCH_KEY"])
    with pytest.raises(
        ConfigError, match=r"task\.environment\.env=\[SEARCH_KEY\]: this environment variable is not set"
    ):
        check_environment("game", environment, {"how": "fine"})
    monkeypatch.setenv("SEARCH_KEY", "secret")
    check_environment("game", environment, {"how": "SEARCH_KEY"})
    with pytest.raises(ConfigError, match="KeyError: 'SEARCH_KEY'"):
        check_environment("game", replace(environment, env=[]), {"how": "SEARCH_KEY"})


@pytest.mark.processes
@pytest.mark.parametrize("turns", [0, 1])
def test_cancelled_episodes_keep_their_turns_so_far(make_episodes, turns: int) -> None:
    """A cancelled engine may return nothing."""
    tokenizer = FAMILIES["qwen"]()
    stop = threading.Event()

    class Cancelled(Scripted):
        def generate(
            self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
        ) -> list[list[Completion]]:
            if len(self.seen) < turns:
                return super().generate(requests, sampling, on_group)
            stop.set()
            return [[] for _ in requests]

    prompt, engine = prompt_of(tokenizer, turns=3), Cancelled(tokenizer)
    episodes = make_episodes(engine, COUNTING, tokenizer)
    listener = Listener(watch=Watch(cancelled=stop.is_set))
    (found,) = episodes.generate([prompt], [Request(prompt.token_ids, 2, 0)], Sampling(200), listener)
    assert [done.episode.turns for done in found if done.episode] == [1, 1][: 2 * turns]
    assert len(engine.seen) == turns


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_turns_together_are_the_whole_conversation(family: str, ended: bool) -> None:
    """Prompt, turn, observation and turn together have the same tokens as the whole conversation."""
    tokenizer = FAMILIES[family]()
    spoken = [{"role": "assistant", "content": "<<47+85>>"}, {"role": "assistant", "content": "132"}]
    whole = tokenizer.apply_chat_template([TALK[0], spoken[0], TALK[1], spoken[1]], tokenize=False)
    prompt = tokenizer.apply_chat_template([TALK[0]], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    for turn, (said, heard) in enumerate(zip(spoken, ([TALK[1]], []), strict=True)):
        sampled = tokenizer(said["content"], add_special_tokens=False).input_ids
        sampled += [tokenizer.eos_token_id] if ended or turn else []
        ids += sampled
        ids += TurnEncoder(tokenizer).encode_observation(sampled, heard, chat=True) if heard else []
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert whole.startswith(text)
    assert whole[len(text) :].strip() == ""
    assert tokenizer(whole, add_special_tokens=False).input_ids[: len(ids)] == ids


def test_several_messages_and_plain_text_are_formatted() -> None:
    tokenizer = FAMILIES["tiny"]()
    several = TurnEncoder(tokenizer).encode_observation([9, 3], TALK, chat=True)
    assert tokenizer.decode(several) == "<user>47+85=<end><user>look\nagain<end><assistant>"
    assert tokenizer.decode(TurnEncoder(tokenizer).encode_observation([9, 3], TALK, chat=False)) == "47+85=look\nagain"


def test_a_template_that_refuses_an_observation_is_reported() -> None:
    tool = [{"role": "developer", "content": "132"}]
    with pytest.raises(ConfigError, match="this model knows the roles"):
        TurnEncoder(FAMILIES["tiny"]()).encode_observation([3], tool, chat=True)
    forgetful = make_tokenizer()
    forgetful.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="drops them"):
        TurnEncoder(forgetful).encode_observation([3], TALK, chat=True)
