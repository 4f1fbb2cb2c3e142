"""engine=fake: its texts, their ends, and the policy's log-probs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpocli.errors import RunError
from grpocli.models.tiny import make_model, make_tokenizer
from grpocli.rollout.fake_engine import Fake, FakeEngine
from grpocli.training.logprobs import completion_scores
from grpocli.training.packing import MicroBatch
from grpocli.training.policy import Policy
from grpocli.types import Prompt, Request, Row, Sampling

TOKENIZER = make_tokenizer()
SAMPLING = Sampling(20)


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_model(0)
    return Policy(model, model, torch.float32)


def requests(n: int = 4, count: int = 3) -> list[Request]:
    texts = [f"{i}+{i}=" for i in range(count)]
    prompts = [Prompt(str(i), TOKENIZER(text).input_ids, text, {"answer": 2 * i}) for i, text in enumerate(texts)]
    return [Request(prompt.token_ids, n, seed=i, prompt=prompt) for i, prompt in enumerate(prompts)]


def said(part: Fake, policy: Policy, sampling: Sampling = SAMPLING, n: int = 4) -> list[list[str]]:
    found = FakeEngine(part, policy, TOKENIZER).generate(requests(n), sampling)
    return [[TOKENIZER.decode(one.token_ids, skip_special_tokens=True) for one in group] for group in found]


def test_about_half_of_the_default_completions_are_right(policy: Policy) -> None:
    groups = said(Fake(), policy, n=100)
    for i, group in enumerate(groups):
        assert set(group) == {str(2 * i), "wrong"}
        assert 30 < group.count("wrong") < 70


def test_completions_depend_on_the_prompts_seed_and_not_on_the_batch(policy: Policy) -> None:
    assert said(Fake([r"\boxed{{answer}} of {nothing}"]), policy, Sampling(99))[1] == [r"\boxed{2} of {nothing}"] * 4
    engine, asked = FakeEngine(Fake(), policy, TOKENIZER), requests()
    assert engine.generate(asked[2:], SAMPLING) == engine.generate(asked, SAMPLING)[2:]
    assert said(Fake(), policy) == said(Fake(), policy)


def test_a_completion_ends_at_a_stop_string_its_limit_or_an_end_token(policy: Policy) -> None:
    engine, asked = FakeEngine(Fake(["12345"]), policy, TOKENIZER), requests(1, 1)
    ends = {SAMPLING: ("12345<end>", "stop"), replace(SAMPLING, stop=("3",)): ("123", "stop")}
    ends |= {Sampling(5): ("12345", "length"), Sampling(6): ("12345<end>", "stop")}
    for sampling, (text, reason) in ends.items():
        ((one,),) = engine.generate(asked, sampling)
        assert (TOKENIZER.decode(one.token_ids), one.finish_reason) == (text, reason)
        assert len(one.logprobs) == len(one.token_ids)


TRUNCATED = Sampling(20, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1)


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED, replace(SAMPLING, repetition_penalty=1.5)])
@torch.no_grad()
def test_log_probs_are_the_trainers(policy: Policy, sampling: Sampling) -> None:
    asked = requests()
    groups = FakeEngine(Fake(["{answer} and {answer}", "wrong"]), policy, TOKENIZER).generate(asked, sampling)
    done = [(request, one) for request, group in zip(asked, groups, strict=True) for one in group]
    rows = [Row(r.token_ids, c.token_ids, [1] * len(c.token_ids), 1.0, 0, c.logprobs) for r, c in done]
    logp_BT = completion_scores(policy.model, MicroBatch.build(rows, torch.device("cpu")), sampling, nullcontext()).logp
    for (_, one), logp_T in zip(done, logp_BT, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), logp_T[: len(one.logprobs)], rtol=0, atol=1e-4)


WRITER = """
def write(prompt, n, seed, answer, **columns):
    return [f"{prompt}{answer} {seed}"] * n

def counts(n, **others):
    return [str(i) for i in range(n - 1)]
"""


def test_a_user_function_writes_completions(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "texts.py").write_text(WRITER)
    found = said(Fake(function=f"{tmp_path}/texts.py:write"), policy)
    assert found == [["0+0=0 0"] * 4, ["1+1=2 1"] * 4, ["2+2=4 2"] * 4]
    with pytest.raises(RunError, match=r"texts\.py:counts"):
        said(Fake(function=f"{tmp_path}/texts.py:counts"), policy)
