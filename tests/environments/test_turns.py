"""Tokens of an environment's messages, with the chat templates of three model families and as plain text."""

from __future__ import annotations

import pytest
from environments import tool_families

from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.rollout.turns import TurnEncoder

TALK = [{"role": "user", "content": "47+85="}, {"role": "user", "content": "look\nagain"}]


FAMILIES = {"tiny": make_tokenizer, **{name: tool_families.FAMILIES[name].tokenizer for name in ("qwen", "llama")}}


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
