"""Chat templates of the model families: where a completion ends, today's date, thinking, and arguments."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import CHAT_FAMILIES
from composed import refused

from grpocli.chat_clock import with_date
from grpocli.errors import ConfigError
from grpocli.models.chat_template import end_of_turn, variables
from grpocli.models.loading import HuggingFace, configured_end_ids, end_token_ids, load_tokenizer
from grpocli.models.tiny import make_model
from grpocli.rollout.sampler import sample
from grpocli.rollout.sampling import keep_stop_token_ids, stop_token_ids
from grpocli.rollout.turns import TurnEncoder
from grpocli.tasks.prompts import Targets, rendered, tokenize
from grpocli.types import Request, Sampling

ASK = [{"role": "user", "content": "47+85="}]
THINKING = ("qwen3", "qwen3-base", "qwen3.5", "smollm3")
WITH_DATE = ("smollm3", "llama3.2", "gpt-oss")


@pytest.fixture(params=CHAT_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def loaded(family: str, folder: Path, **keys: Any) -> Any:
    """The tokenizer as a run loads it."""
    CHAT_FAMILIES[family].tokenizer().save_pretrained(folder)
    return load_tokenizer(HuggingFace(path=str(folder), **keys), str(folder))


def prompt_text(tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True))


# where a completion ends


def test_a_completion_ends_where_the_family_ends_a_turn(family: str) -> None:
    one = CHAT_FAMILIES[family]
    tokenizer = one.tokenizer()
    written = end_of_turn(tokenizer)
    assert (None if written is None else tokenizer.convert_ids_to_tokens(written)) == one.template_ends
    configured = tokenizer.convert_tokens_to_ids(list(one.configured))
    ends = {tokenizer.convert_ids_to_tokens(i) for i in end_token_ids(configured, tokenizer)}
    assert ends == set(one.ends)
    model = make_model(0)
    model.generation_config.eos_token_id = configured
    assert set(stop_token_ids(model, tokenizer)) == end_token_ids(configured, tokenizer)
    without = {tokenizer.convert_ids_to_tokens(i) for i in end_token_ids(None, tokenizer)}  # no generation_config.json
    assert {one.template_ends or one.eos} <= without <= set(one.ends)


@pytest.mark.parametrize("family", ["qwen3-base", "gemma3"])
def test_the_end_of_a_turn_is_sampled_and_trained(family: str) -> None:
    """The in-process engine; vLLM gets the same ids with each request, and returns the last token too."""
    tokenizer, model = CHAT_FAMILIES[family].tokenizer(), make_model(0)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    stops = stop_token_ids(model, tokenizer)
    requests = [Request(tokenize([ASK], tokenizer)[0], 16, 0)]
    (group,) = sample(model, requests, Sampling(max_tokens=48), stops, version=0)
    stopped = [one for one in group if one.finish_reason == "stop"]
    ends = {tokenizer.convert_ids_to_tokens(one.token_ids[-1]) for one in stopped}
    assert ends == set(CHAT_FAMILIES[family].ends)
    assert all(token not in stops for one in group for token in one.token_ids[:-1])
    assert all(len(one.logprobs) == len(one.token_ids) for one in group)


def test_the_saved_model_ends_where_training_did(tmp_path: Path) -> None:
    """A base model of Qwen learns to end with <|im_end|>, which its generation config does not name."""
    tokenizer, model = CHAT_FAMILIES["qwen3-base"].tokenizer(), make_model(0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    keep_stop_token_ids(model, tokenizer)
    model.save_pretrained(tmp_path)
    saved = configured_end_ids(HuggingFace(path=str(tmp_path)), str(tmp_path))
    assert saved == sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    tokenizer = CHAT_FAMILIES["gemma3"].tokenizer()
    both = [tokenizer.convert_tokens_to_ids(token) for token in ("<end_of_turn>", "<eos>")]
    model.generation_config.eos_token_id = list(both)
    keep_stop_token_ids(model, tokenizer)
    assert model.generation_config.eos_token_id == both, "a family with all ends keeps its config"


def test_the_end_of_a_config_counts_if_there_is_no_generation_config(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    part = HuggingFace(path=str(tmp_path))
    assert configured_end_ids(part, str(tmp_path)) == 3
    (tmp_path / "generation_config.json").unlink()
    assert configured_end_ids(part, str(tmp_path)) == 3


def test_a_taught_answer_ends_with_the_end_of_a_turn(family: str) -> None:
    one = CHAT_FAMILIES[family]
    tokenizer = one.tokenizer()
    if family == "gpt-oss":  # its generation prompt is followed by a channel
        return
    ends = end_token_ids(tokenizer.convert_tokens_to_ids(list(one.configured)), tokenizer)
    (ids,) = Targets(tokenizer, 64, end_ids=ends).token_ids([ASK], ["132"])
    assert tokenizer.convert_ids_to_tokens(ids[-1]) in one.ends
    assert sum(token in ends for token in ids) == (2 if family == "phi3" else 1)


# token-exactness


def test_a_prompt_has_one_bos(family: str) -> None:
    tokenizer = CHAT_FAMILIES[family].tokenizer()
    (ids,) = tokenize([ASK], tokenizer)
    assert tokenizer.decode(ids) == prompt_text(tokenizer)
    if tokenizer.bos_token is not None:
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_after_a_turn_comes_what_the_template_writes(family: str) -> None:
    """A sampled turn with its end, the environment's message and the next prompt are one rendered conversation."""
    one = CHAT_FAMILIES[family]
    tokenizer = one.tokenizer()
    end = one.template_ends or ("<|end|>" if family == "gpt-oss" else "<|im_end|>")
    sampled = tokenizer("132" + end, add_special_tokens=False).input_ids
    heard = [{"role": "user", "content": "and 1+1?"}]
    between = TurnEncoder(tokenizer).encode_observation(sampled, heard, chat=True)
    said = {"role": "assistant", "content": "132"}
    whole = tokenizer.apply_chat_template([*ASK, said, *heard], tokenize=False, add_generation_prompt=True)
    assert whole.endswith(tokenizer.decode([*sampled, *between]))
    again = TurnEncoder(tokenizer).encode_observation(sampled[:3], heard, chat=True)
    assert again == [sampled[3], *between], "a turn that was cut is ended"


@pytest.mark.parametrize("family", ["qwen3", "qwen3-base", "qwen3.5"])
def test_thoughts_of_earlier_turns_stay_in_the_context(family: str) -> None:
    """The template would drop them, but the tokens that were sampled are the context of all that follow."""
    tokenizer = CHAT_FAMILIES[family].tokenizer()
    thought = "<think>\n7 and 5\n</think>\n\n12"
    said, heard = {"role": "assistant", "content": thought}, {"role": "user", "content": "again"}
    whole = tokenizer.apply_chat_template([*ASK, said, heard], tokenize=False, add_generation_prompt=True)
    assert "7 and 5" not in whole
    sampled = tokenizer(thought + "<|im_end|>", add_special_tokens=False).input_ids
    between = TurnEncoder(tokenizer).encode_observation(sampled, [heard], chat=True)
    assert tokenizer.decode(between) == whole.rpartition("12<|im_end|>")[2]


def test_without_thinking_each_turn_begins_after_an_empty_thought(tmp_path: Path) -> None:
    tokenizer = loaded("qwen3", tmp_path, chat_template_arguments={"enable_thinking": False})
    sampled = tokenizer("132<|im_end|>", add_special_tokens=False).input_ids
    between = TurnEncoder(tokenizer).encode_observation(sampled, ASK, chat=True)
    assert tokenizer.decode(between).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# today's date


@pytest.mark.parametrize("family", WITH_DATE)
def test_a_prompt_does_not_depend_on_the_day(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded(family, tmp_path)
    today = prompt_text(tokenizer)
    assert "2025" in today
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", None)  # the clock
    assert prompt_text(tokenizer) == today


@pytest.mark.parametrize("format_", ["%d %B %Y", "%-d %b %y, %A", "%Y-%m-%d", "%H:%M", "today"])
@pytest.mark.parametrize("around", ["{}", "\n  {}", "{{% if strftime_now is defined %}}{}{{% endif %}}"])
def test_the_clock_of_a_template_writes_as_strftime(format_: str, around: str, tmp_path: Path) -> None:
    tokenizer = CHAT_FAMILIES["qwen3"].tokenizer()
    tokenizer.chat_template = with_date(around.format(f"{{{{ strftime_now('{format_}') }}}}"), "2031-01-05")
    expected = date(2031, 1, 5).strftime(format_)
    assert prompt_text(tokenizer) == ("\n  " if around.startswith("\n") else "") + expected


def test_the_clock_stands_in_the_template_for_tools_too(tmp_path: Path) -> None:
    """transformers takes the template called tool_use for a conversation with tools."""
    tokenizer = CHAT_FAMILIES["qwen3"].tokenizer()
    tokenizer.chat_template = {name: f"{name} {{{{ strftime_now('%Y') }}}}" for name in ("default", "tool_use")}
    tokenizer.save_pretrained(tmp_path)
    kept = load_tokenizer(HuggingFace(path=str(tmp_path)), str(tmp_path))
    texts = [rendered(ASK, kept, "a prompt", tools=tools) for tools in ([], [{"name": "add"}])]
    assert texts == ["default 2025", "tool_use 2025"]
    assert "macro" not in str(kept.chat_template), "it is saved with the model"


# thinking


@pytest.mark.parametrize("family", THINKING)
def test_thinking_is_a_switch(family: str, tmp_path: Path) -> None:
    on, off, unset = (
        prompt_text(loaded(family, tmp_path, chat_template_arguments=given))
        for given in ({"enable_thinking": True}, {"enable_thinking": False}, {})
    )
    assert off != on == unset
    assert off.rstrip().endswith("</think>")


# arguments


def test_variables_are_those_that_a_user_can_set() -> None:
    found = {name: variables(family.tokenizer()) for name, family in CHAT_FAMILIES.items()}
    switch = {name: {"enable_thinking"} for name in THINKING}
    others = {"llama3.2": {"date_string"}, "gpt-oss": {"reasoning_effort"}}
    assert all(found[name] >= wanted for name, wanted in (switch | others).items())
    assert not any("enable_thinking" in found[name] for name in CHAT_FAMILIES if name not in THINKING)


def test_an_argument_that_no_template_reads_is_refused(tmp_path: Path) -> None:
    arguments = {"enable_thnking": False}
    with refused("model.chat_template_arguments.enable_thnking", match='did you mean "enable_thinking"'):
        loaded("qwen3", tmp_path, chat_template_arguments=arguments)
    with pytest.raises(ConfigError, match="it reads none"):
        loaded("qwen3-2507", tmp_path, chat_template_arguments=arguments)


def test_a_template_of_a_file_that_is_broken_or_missing(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}{{ x }}")
    given = {"chat_template": str(template), "chat_template_arguments": {"x": 1}}
    assert prompt_text(loaded("qwen3", tmp_path, **given)) == "47+85=1"
    template.write_text("{% if %}")
    with pytest.raises(ConfigError, match="not valid Jinja: "):
        loaded("qwen3", tmp_path, **given)
    with pytest.raises(ConfigError, match=r"model\.chat_template=nowhere"):
        HuggingFace(path="x", chat_template="nowhere")
