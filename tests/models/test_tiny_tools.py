"""The built-in model's calls of tools: its format, and the examples of a warm start with them."""

from __future__ import annotations

import pytest
import torch

from grpocli.models.tiny import CALCULATOR, make_tokenizer, with_calls
from grpocli.models.warm_start import IGNORED, _kinds
from grpocli.rollout.turns import CallParser, TurnEncoder
from grpocli.tasks.generated import Arithmetic

PRODUCTS = Arithmetic(digits=2, operation="*").examples("train")[:200]


def test_the_tokenizer_finds_its_own_calls() -> None:
    tokenizer = make_tokenizer()
    parser = CallParser(TurnEncoder(tokenizer, [CALCULATOR]))
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "47*85"}}}
    said = tokenizer("calculator(expression=47*85)<end>", add_special_tokens=False).input_ids
    assert parser.message(said) == {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = tokenizer("3995<end>", add_special_tokens=False).input_ids
    assert parser.message(answer) == {"role": "assistant", "content": "3995"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert parser.encoder.render([turn]).endswith("<assistant>calculator(expression=47*85)<end>")


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_every_second_example_has_a_tool_and_a_share_of_these_call_it(share: float) -> None:
    examples = with_calls(PRODUCTS, share)
    with_tools = [one for one in examples if "tools" in one]
    called = [one for one in with_tools if one["answer"].startswith("calculator(")]
    assert (len(with_tools), len(called)) == (100, 100 * share)


def test_the_warm_start_learns_calls_and_answers_but_no_results() -> None:
    tokenizer = make_tokenizer()
    kinds = _kinds(with_calls(PRODUCTS, 0.1), tokenizer)
    assert [kind.share for kind in kinds] == pytest.approx([0.5, 0.45, 0.05])
    direct, shown, calls = kinds
    assert not direct.exact
    assert not shown.heard_NT.any()
    assert calls.exact
    row, heard = calls.answers_NT[0], calls.heard_NT[0]
    learned = tokenizer.decode(row[~heard & (row != IGNORED)])
    assert torch.equal(calls.answers_NT[:, 0], torch.full((10,), tokenizer.convert_tokens_to_ids("c")))
    call, result, answer = learned.split("<end>")[0], tokenizer.decode(row[heard]), learned.split("<end>")[1]
    assert call.startswith("calculator(expression=")
    assert result == f"<system>{answer}<end><assistant>"
