"""A finished run to replay, made once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.running import SMALL, run_here


@pytest.fixture(scope="module", autouse=True)
def with_the_shared_cache(shared_cache: Path) -> Iterator[None]:
    """Model cache of the session, also for runs of module fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        yield


def trained(folder: Path, *options: str) -> Path:
    """A small run with these options."""
    run = folder / "run"
    assert run_here("train", *SMALL, "eval.problems=0", *options, f"hydra.run.dir={run}") == 0
    return run


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with groups that are filtered, and completions that are cut off and masked."""
    return trained(
        tmp_path_factory.mktemp("dapo"),
        "algorithm=dapo",
        "algorithm.keep.mask_truncated=true",
        "rollout.max_completion_tokens=3",
        "rollout.prompts_per_step=8",
        "train.steps=2",
        "checkpoint.every=1",
        "checkpoint.keep=0",
    )


TINY = [
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "optim.lr=3e-3",
    "optim.weight_decay=0.1",
    "reward=[format]",
    "reward.format.pattern='.*[02468]'",
]
"""Steps with something to learn, whose weights always change."""
