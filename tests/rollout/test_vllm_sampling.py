"""What real vLLM samples and returns: penalty and truncation, stop strings, structured outputs, tokens in and out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from rollout.letters import cut, letters
from rollout.vllm_tiny import VOCABULARY, Alone, TinyPolicy, build_model

from grpocli.errors import ConfigError
from grpocli.rollout.distribution import sampling_logits
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.repetition import first_seen
from grpocli.rollout.transformers_engine import Transformers
from grpocli.rollout.vllm.options import Vllm
from grpocli.types import Completion, Request, Sampling

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

TOKENIZER: Any = letters(VOCABULARY)
A, B, AB = TOKENIZER.convert_tokens_to_ids(["a", "b", "ab"])
PROMPTS = [[5, 6, 7, 8, 9], [A, B, A, B], [20] * 30]
FREE = Sampling(40)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> EngineContext:
    folder = tmp_path_factory.mktemp("letters")
    model = build_model(folder / "model", tied=False)
    TOKENIZER.save_pretrained(model)
    job = EngineJob(str(model), "float32", 128, folder / "run", seed=0)
    return EngineContext(job, TinyPolicy(model), TOKENIZER, Alone())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vllm(context: EngineContext) -> Iterator[Any]:
    options = Vllm()
    with options.launch(context.job):
        engine = options.connect(context)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def transformers(context: EngineContext) -> Any:
    return Transformers().connect(replace(context, policy=Sampled(context.policy.model)))  # type: ignore[arg-type]


class Sampled:
    """A policy for the in-process sampler."""

    def __init__(self, model: Any) -> None:
        self.model = model

    sampling_mode = torch.inference_mode


def requests(n: int = 6) -> list[Request]:
    return [Request(prompt, n, seed) for seed, prompt in enumerate(PROMPTS)]


def flat(groups: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
    return [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]


@torch.no_grad()
def expected(model: Any, prompt: list[int], token_ids: list[int], sampling: Sampling) -> list[float]:
    """The trainer's log-probs of exactly these ids after exactly these."""
    ids, n = torch.tensor([prompt + token_ids]), len(token_ids)
    logits_TV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    seen_TV = first_seen(ids, torch.ones_like(ids), n, VOCABULARY) < torch.arange(n)[:, None]
    picked = torch.tensor(token_ids)
    logp_TV = sampling_logits(logits_TV, sampling, keep_N=picked, seen_NV=seen_TV).log_softmax(-1)
    return logp_TV.gather(1, picked[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        replace(FREE, repetition_penalty=1.5),
        replace(FREE, repetition_penalty=0.8),
        replace(FREE, repetition_penalty=1.3, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02),
    ],
    ids=["penalty", "reward", "penalty and truncation"],
)
def test_log_probs_with_a_penalty_are_the_trainers(vllm: Any, context: EngineContext, sampling: Sampling) -> None:
    for prompt, one in flat(vllm.generate(requests(), sampling)):
        assert one.logprobs == pytest.approx(expected(context.policy.model, prompt, one.token_ids, sampling), abs=1e-3)


def test_greedy_with_a_penalty_is_the_same_in_both_engines(vllm: Any, transformers: Any) -> None:
    sampling = replace(FREE, temperature=0.0, repetition_penalty=1.7)
    both = [[c.token_ids for _, c in flat(e.generate(requests(n=2), sampling))] for e in (vllm, transformers)]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("stop", "regex"), [(("a",), None), (("fc", "3"), None), (("dé", "bé"), "[a-d]{1,3}é[a-p]{3}")], ids=str
)
def test_stop_strings_end_a_completion_and_cut_nothing(vllm: Any, stop: tuple[str, ...], regex: str | None) -> None:
    """With the same seeds a completion is the start of the one without stop strings; é is two tokens."""
    free = replace(FREE, regex=regex)
    whole, stopped = vllm.generate(requests(16), free), vllm.generate(requests(16), replace(free, stop=stop))
    reasons = set()
    for (_, a), (_, b) in zip(flat(whole), flat(stopped), strict=True):
        assert b.token_ids == cut(TOKENIZER, a.token_ids, stop)
        assert b.logprobs == pytest.approx(a.logprobs[: len(b.token_ids)], abs=1e-4)
        said = any(one in TOKENIZER.decode(b.token_ids, skip_special_tokens=True) for one in stop)
        assert b.finish_reason == ("stop" if said else a.finish_reason)
        reasons.add((said, b.finish_reason))
    assert (True, "stop") in reasons


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_completions_match_a_regex(vllm: Any, temperature: float) -> None:
    sampling = replace(FREE, temperature=temperature, regex=r"[a-d]{2,4}-\d{1,3}", stop=())
    for _, one in flat(vllm.generate(requests(), sampling)):
        assert one.finish_reason == "stop"
        assert re.fullmatch(str(sampling.regex), TOKENIZER.decode(one.token_ids, skip_special_tokens=True))


def test_completions_match_a_json_schema(vllm: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["c", "d"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for _, one in flat(vllm.generate(requests(), Sampling(60, json_schema=schema))):
        assert one.finish_reason == "stop"
        value = json.loads(TOKENIZER.decode(one.token_ids, skip_special_tokens=True))
        assert set(value) == {"a", "b"}
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("c", "d")


def test_log_probs_of_a_structure_are_those_of_what_it_allows(vllm: Any, context: EngineContext) -> None:
    """The sampler's are of the masked distribution; the trainer's are of all tokens, so they are less."""
    one = vllm.generate([Request(PROMPTS[0], 1, 0)], replace(FREE, regex="[abc]-"))[0][0]
    allowed = [
        TOKENIZER.convert_tokens_to_ids(["a", "b", "c"]),
        TOKENIZER.convert_tokens_to_ids(["-"]),
        [TOKENIZER.eos_token_id],
    ]
    assert len(one.token_ids) == len(allowed)
    ids = torch.tensor([PROMPTS[0] + one.token_ids])
    with torch.no_grad():
        logp_TV = context.policy.model(input_ids=ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    of_all = expected(context.policy.model, PROMPTS[0], one.token_ids, FREE)
    for t, tokens in enumerate(allowed):
        assert one.logprobs[t] == pytest.approx(of_all[t] - float(logp_TV[t, tokens].logsumexp(-1)), abs=1e-3)
    assert sum(of_all) < sum(one.logprobs)


def test_what_vllm_cannot_sample_is_known_at_once(vllm: Any, context: EngineContext) -> None:
    """With the first weights: a run that was killed may have left the server paused."""

    def connect(**changes: Any) -> None:
        engine = Vllm().connect(replace(context, sampling=replace(FREE, **changes)))
        vllm.fleet.clients[0].pause()
        engine.sync(0)
        engine.close()

    connect(regex="a+")
    connect(json_schema={"type": "string"})
    with pytest.raises(ConfigError, match=r"rollout\.regex=\(\?<=a\)b: vLLM cannot use it: .*regex") as caught:
        connect(regex="(?<=a)b")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError, match=r"rollout\.json_schema={'type': 'nonsense'}: vLLM cannot use it"):
        connect(json_schema={"type": "nonsense"})
    with pytest.raises(ConfigError, match=r"rollout\.temperature=2\.5: .*2 at most"):
        connect(temperature=2.5)


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_tokens_in_and_tokens_out(name: str, context: EngineContext, request: pytest.FixtureRequest) -> None:
    """Text does not come back as the same tokens, so it is never on the way: neither in nor out."""
    engine = request.getfixturevalue(name)
    prompt = [A, B, A, B]
    assert TOKENIZER.encode(TOKENIZER.decode(prompt)) == [AB, AB]
    group = engine.generate([Request(prompt, 24, seed=3)], FREE)[0]
    others = 0
    for one in group:
        text = TOKENIZER.decode(one.token_ids, skip_special_tokens=True)
        others += TOKENIZER.encode(text) != [i for i in one.token_ids if i != TOKENIZER.eos_token_id]
        assert one.logprobs == pytest.approx(expected(context.policy.model, prompt, one.token_ids, FREE), abs=1e-3)
    assert others > 12
    reencoded = expected(context.policy.model, [AB, AB], group[0].token_ids, FREE)
    assert group[0].logprobs != pytest.approx(reencoded, abs=1e-2), "another prompt would look the same"
