"""Settings of NeMo RL whose translation depends on each other."""

from __future__ import annotations

from typing import Any

from grpocli_tools.porting.nemo_rl import NemoRl


def overrides(**grpo: Any) -> dict[str, str]:
    lines = NemoRl({"grpo": grpo}).translate().lines
    return dict(line.override.split("=", 1) for line in lines)


def test_the_metric_that_ends_a_run_has_its_name_here() -> None:
    stop = {"stop_at_validation_metric": "accuracy", "stop_at_validation_threshold": 0.9}
    found = overrides(**stop)
    assert (found["eval.stop_at.metric"], found["eval.stop_at.threshold"]) == ("accuracy", "0.9")
    grouped = overrides(**stop | {"stop_at_validation_metric": "pass_k", "val_num_generations_per_prompt": 8})
    assert (grouped["eval.samples"], grouped["eval.stop_at.metric"].strip('"')) == ("8", "pass@8")
    assert not any(key.startswith(("eval.stop_at", "eval.samples")) for key in overrides(val_period=5))
    for without in ({**stop, "val_period": 0}, {"stop_at_validation_metric": "accuracy"}):
        assert not any(key.startswith("eval.stop_at") for key in overrides(**without)), "NeMo RL refuses both"
