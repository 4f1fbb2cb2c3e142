"""Failures at the start of a run or during it: one sentence, the right exit code, no partial files."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.running import EVEN, SMALL, metrics
from tables import table

from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.types import Completion

pytestmark = pytest.mark.processes

SMALL_RUN = ["train", *SMALL, "eval.problems=0"]


def failed(grpocli, code: int, *argv: str) -> str:
    """The sentence with which a command ends, and nothing else on stderr."""
    _, _, err = grpocli(*argv, code=code)
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("grpocli: error: ")
    return lines[0]


def test_an_engine_that_reports_other_tokens_than_it_sampled_is_detected(
    grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are valid, so only the trainer's log-probs reveal it."""
    generate = TransformersEngine.generate

    def backwards(self: TransformersEngine, *arguments: Any, **_: Any) -> list[list[Completion]]:
        return [
            [replace(one, token_ids=one.token_ids[::-1]) for one in group] for group in generate(self, *arguments[:2])
        ]

    monkeypatch.setattr(TransformersEngine, "generate", backwards)
    run = tmp_path / "run"
    said = failed(grpocli, 1, *SMALL_RUN, "checkpoint.every=1", f"hydra.run.dir={run}")
    assert re.search(r"step 1: token_mult_prob_error is \S+, above rollout\.max_prob_error=10: ", said)
    assert not list(run.glob("checkpoints/*"))


def test_a_missing_column_of_a_reward_is_reported(grpocli, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(completions, ground_truth, **kwargs):\n    return [0.0]\n")
    said = failed(grpocli, 2, *SMALL_RUN, "reward=[python]", "reward.python.function=r.py:score")
    assert f"reward.python.function={tmp_path}/r.py:score" in said
    assert "ground_truth" in said


REWARDS = {
    "slow": ("import time; time.sleep(60)", "it took longer than 0.5 s (reward.python.timeout)"),
    "raises": ("raise KeyError('oops')", "it raised KeyError"),
    "exits": ("import sys; sys.exit(0)", "it raised SystemExit"),
    "leaves": ("import os; os._exit(3)", "its worker process died"),
}


@pytest.mark.parametrize("kind", table(REWARDS, 2, pytest.mark.survival))
def test_a_failing_reward_ends_the_run(kind: str, grpocli, tmp_path: Path) -> None:
    body, reason = REWARDS[kind]
    (tmp_path / "r.py").write_text(f"def score(completions, **kwargs):\n    {body}\n")
    reward = ["reward=[python]", "reward.python.function=r.py:score", "reward.python.timeout=0.5"]
    said = failed(grpocli, 1, *SMALL_RUN, *reward, f"hydra.run.dir={tmp_path}/run")
    assert "reward.python (r.py:score) could not score 16 of 16 samples" in said
    assert reason in said
    assert "reward.python" in json.loads((tmp_path / "run" / "summary.json").read_text())["exit"]


def test_occasional_reward_errors_are_counted_rather_than_scored_as_zero(grpocli, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def score(completions, **kwargs):\n    return [float('nan'), *[1.0] * (len(completions) - 1)]\n"
    )
    reward = ["reward=[python]", "reward.python.function=r.py:score"]
    grpocli(*SMALL_RUN, *reward, f"hydra.run.dir={tmp_path}/run", code=0)
    row = metrics(tmp_path / "run")[0]
    assert (row["rewards/python/errors"], row["rewards/python/mean"]) == (1, 1.0)


def test_a_folder_that_cannot_be_written_is_refused(grpocli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", Path("/proc/run")):
        said = failed(grpocli, 2, *SMALL_RUN, f"hydra.run.dir={folder}")
        assert "hydra.run.dir" in said
        assert "cannot be written" in said


def test_a_busy_port_is_reported(grpocli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = failed(grpocli, 2, "vllm-serve", f"port={port}")
        assert f"port={port}" in said


def test_a_policy_with_nan_is_not_saved(grpocli, tmp_path: Path) -> None:
    options = ["optim.lr=1e30", "optim.max_grad_norm=0", *EVEN]
    said = failed(grpocli, 1, *SMALL_RUN, *options, "checkpoint.every=1", f"hydra.run.dir={tmp_path}/run")
    assert "lower optim.lr=1e+30" in said
    last = max((tmp_path / "run" / "checkpoints").iterdir())
    assert f"and remove {last}: it holds the weights that this step began with" in said
    assert "resume=" not in said
    assert not (tmp_path / "run" / "model").exists()


def test_weights_with_nan_after_the_last_update_are_not_saved(grpocli, tmp_path: Path) -> None:
    options = ["optim.lr=1e308", "train.steps=1", *EVEN]
    said = failed(grpocli, 1, *SMALL_RUN, *options, f"hydra.run.dir={tmp_path}/run")
    assert "step 1: its update left weights that are not finite; lower optim.lr=1e+308" in said
    assert "and begin again" in said
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_user_code_that_exits_ends_the_run_with_an_error(grpocli, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(TransformersEngine, "generate", leave)
    said = failed(grpocli, 1, *SMALL_RUN)
    assert "user code ended the process: SystemExit: 0" in said
