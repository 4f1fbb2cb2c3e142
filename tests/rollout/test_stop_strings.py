"""Stop strings of the in-process sampler: where a completion ends, and that its tokens stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout.letters import cut, letters
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from grpocli.rollout.sampler import sample
from grpocli.rollout.sampling import StopStrings
from grpocli.types import Request, Sampling

TOKENIZER = letters(40)
REQUESTS = [Request([5, 6, 7], 8, 1), Request([9], 8, 2), Request([4, 4, 4, 4, 4, 4, 4, 4], 8, 3)]


@pytest.mark.parametrize("stop", [("a",), ("5", "g\n"), ("3", "fc"), ("never said",)])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(little_model, stop: tuple[str, ...]) -> None:
    free = Sampling(40, temperature=1.5)
    whole = sample(little_model, REQUESTS, free, [1], 0)
    stopped = sample(little_model, REQUESTS, replace(free, stop=stop), [1], 0, TOKENIZER)
    ended = set()
    for a, b in zip([c for g in whole for c in g], [c for g in stopped for c in g], strict=True):
        expected = cut(TOKENIZER, a.token_ids, stop)
        assert b.token_ids == expected
        assert b.logprobs == pytest.approx(a.logprobs[: len(expected)], abs=1e-4)
        said = any(one in TOKENIZER.decode(expected, skip_special_tokens=True) for one in stop)
        assert b.finish_reason == ("stop" if said else a.finish_reason)
        ended.add(len(expected) < len(a.token_ids))
    assert (True in ended) == (stop != ("never said",))


def watched(tokenizer: PreTrainedTokenizerFast, stop: list[str], prompt: list[int], ids: list[int]) -> list[bool]:
    watch = StopStrings(tokenizer, stop, prompt)
    return [watch.completed_by(i) for i in ids]


def test_a_stop_string_may_have_a_character_of_several_tokens() -> None:
    tokenizer = letters(96)
    first, second, a = tokenizer.convert_tokens_to_ids(["Ã", "©", "a"])
    assert watched(tokenizer, ["é"], [], [first, second]) == [False, True]
    assert watched(tokenizer, ["aé"], [], [a, first, second]) == [False, False, True]
    assert watched(tokenizer, ["a"], [], [first, a]) == [False, True]


def test_a_space_at_the_start_of_a_word_is_part_of_the_text() -> None:
    """Some decoders drop the space of a text's first word; the prompt before it prevents that."""
    words = {"</s>": 0, "▁a": 1, "▁b": 2, "c": 3}
    core = Tokenizer(BPE(words, []))
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    assert tokenizer.decode([2, 3]) == "bc"
    assert watched(tokenizer, [" bc"], [1, 1], [2, 3]) == [False, True]
    assert watched(tokenizer, ["a b"], [1], [1, 2]) == [False, True]
    assert watched(tokenizer, ["ab"], [1], [1, 2]) == [False, False]


def test_special_tokens_and_the_prompt_do_not_count() -> None:
    core = Tokenizer(WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="</s>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    assert watched(tokenizer, ["ab"], [1], [0, 1, 0, 2]) == [False, False, False, True]
    assert watched(tokenizer, ["ab"], [1], [2, 1]) == [False, False]
    assert watched(tokenizer, ["</s>"], [1], [0, 0]) == [False, False]
