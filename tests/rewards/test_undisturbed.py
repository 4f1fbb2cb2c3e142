"""What a reward changes in the process that trains is put back, and what it draws repeats."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.scoring import call


def reward(does: Callable[[], float]) -> BaseReward:
    class Mine(BaseReward):
        def __call__(self, samples: list[Sample]) -> list[Score]:  # type: ignore[override]
            return [does() for _ in samples]

    return Mine()


def drawn() -> float:
    return random.random() + float(np.random.random()) + torch.rand(()).item()


def settings() -> tuple[bool, torch.dtype, int]:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ],
)
def test_settings_of_torch(change: Callable[[], None], sample, caplog: pytest.LogCaptureFixture) -> None:
    def disturb() -> float:
        change()
        return 1.0

    before = settings()
    with caplog.at_level(logging.WARNING):
        assert call(reward(disturb), [sample("a")]) == [1.0]
    assert settings() == before
    assert "Mine changed torch's gradients, default dtype or threads, which were put back" in caplog.text


def test_also_after_an_error(sample) -> None:
    def disturb() -> float:
        torch.set_grad_enabled(False)
        random.seed(1)
        raise KeyError("oops")

    state = random.getstate()
    assert isinstance(call(reward(disturb), [sample("a")])[0], Failure)
    assert torch.is_grad_enabled()
    assert random.getstate() == state


def test_random_numbers_are_the_samples_own_and_nobody_elses(sample) -> None:
    def seeded() -> float:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        return 1.0

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = drawn()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    call(reward(seeded), [sample("a")])
    assert drawn() == expected
    first, again, other = (call(reward(drawn), [sample("a", tokens=n)])[0] for n in (1, 1, 2))
    assert first == again != other


def test_an_exit_fails_its_samples(sample) -> None:
    leave = os._exit
    (failure,) = call(reward(lambda: os._exit(3)), [sample("a")])
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(
        "it raised SystemExit: os._exit(3), which would have ended the run without a word ("
    )
    assert "test_undisturbed.py" in failure.reason
    assert os._exit is leave


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_a_reward_forks_may_end_so(sample) -> None:
    def forks() -> float:
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(4,))
        child.start()
        child.join(20)
        return float(child.exitcode or 0)

    assert call(reward(forks), [sample("a")]) == [4.0]
