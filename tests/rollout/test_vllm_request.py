"""Requests in vLLM's form, and completions from its answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rollout.stand_in import choice

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import completions, sampling_params
from grpocli.types import Request, Sampling

REQUEST = Request([5], 2, seed=0)


def label(version: int | str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("labels", "version", "spans"),
    [
        (None, 7, None),
        ([label("default", 0, 4)], 7, None),
        ([label(3, 0, 4)], 3, None),
        ([label(3, 0, 1), label(4, 1, 4)], 3, [(3, 1), (4, 3)]),
        ([label("default", 0, 2), label(8, 2, 4)], 7, [(7, 2), (8, 2)]),
        ([label(10, 0, 1), label(9, 1, 2), label(10, 2, 4)], 9, [(10, 1), (9, 1), (10, 2)]),
        ([label("default", 0, 2), label(7, 2, 4)], 7, None),
    ],
)
def test_each_token_has_the_version_of_its_weights(labels: Any, version: int, spans: Any) -> None:
    for one in completions([choice([1] * 4, weight_versions=labels)] * 2, REQUEST, Sampling(4), version=7):
        assert (one.version, one.spans) == (version, spans)
        assert one.spans is None or sum(n for _, n in one.spans) == len(one.token_ids)


@pytest.mark.parametrize("other", ["default", 6, 9])
def test_versions_that_the_run_has_not_sent_are_refused(other: str | int) -> None:
    """After the first sync, a non-numeric label belongs to another server."""
    made = choice([1] * 4, weight_versions=[label(7, 0, 1), label(8, 1, 2), label(other, 2, 4)])
    with pytest.raises(EngineError, match=f'weights of version "{other}", which this run has not sent'):
        completions([made, made], REQUEST, Sampling(4), version=7, newest=8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"logprobs": {"content": [{"logprob": math.nan}] * 4}}, ", nan$"),
        ({"logprobs": {"content": [{"logprob": 0.5}] * 4}}, ", 0.5$"),
        ({"logprobs": {"content": [{"logprob": "x"}] * 4}}, "ValueError"),
        ({"token_ids": [0.5, 8, 8, 8]}, ", 0.5$"),
        ({"token_ids": [0, 8, 9, 8]}, ", 9$"),
        ({"token_ids": [8] * 5, "logprobs": {"content": [{"logprob": -1.0}] * 5}}, "5 tokens"),
        ({"weight_versions": [label(7, 0, 9)]}, "versions of 9"),
        ({"weight_versions": [label(7, 0, 8), label(8, 8, 4)]}, "versions of -1"),
        ({"logprobs": {"content": [{"logprob": None}] * 4}}, "TypeError"),
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": [0]}, "1 tokens, 4 log-probs"),
        ({"finish_reason": "error"}, 'finish reason "error"'),
    ],
)
def test_impossible_completions_are_refused(wrong: dict[str, Any], said: str) -> None:
    """The server may be another program or have a bug."""
    logprobs = {"content": [{"logprob": -9999.0}] * 3 + [{"logprob": 1e-4}]}  # vLLM's lowest log-prob, and rounding
    right = {"token_ids": [0, 8, 8, 8], "logprobs": logprobs, "finish_reason": "length", "server": "the server S"}
    assert len(completions([right, right], REQUEST, Sampling(4), version=7)) == 2
    with pytest.raises(EngineError, match=rf"^the server S returned a broken completion: .*{said}"):
        completions([right, right | wrong], REQUEST, Sampling(4), version=7, vocabulary=9)


def test_text_is_decoded_for_stop_strings_only() -> None:
    plain = sampling_params(REQUEST, Sampling(4), [1])
    assert (plain["detokenize"], plain["stop"]) == (False, [])
    assert "structured_outputs" not in plain
    stopped = sampling_params(REQUEST, Sampling(4, stop=("\n",)), [1])
    assert (stopped["detokenize"], stopped["stop"], stopped["include_stop_str_in_output"]) == (True, ["\n"], True)
