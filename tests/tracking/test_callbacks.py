"""Callbacks of the user: what they get, and what their errors do."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpocli import Callback, StopTraining
from grpocli.errors import ConfigError
from grpocli.tracking.callbacks import Callbacks, StepEnd, check_callback, make_callbacks


class Broken(Callback):
    """Fails in every step."""

    def before_step(self, step: int) -> None:
        raise ValueError(f"step {step}\nis odd")


class Recorded(Callback):
    """Records the steps it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_step(self, step: int) -> None:
        self.seen.append(step)

    def after_step(self, step: StepEnd) -> None:
        self.seen.append(step)


def test_an_error_is_shown_once_and_counted_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    shown: list[str] = []
    other = Recorded()
    callbacks = Callbacks([("x.py:Broken", Broken()), ("x.py:Recorded", other)], warn=shown.append)
    for step in (1, 2, 3):
        callbacks.before_step(step)
    assert other.seen == [1, 2, 3]
    assert len(shown) == len(caplog.records) == 1
    assert "x.py:Broken failed in before_step: ValueError: step 1 is odd (" in shown[0]
    assert Path(__file__).name in shown[0]
    assert "\n" not in shown[0]


class Stops(Callback):
    def before_step(self, step: int) -> None:
        raise StopTraining("good\nenough")


def test_a_callback_can_end_the_training() -> None:
    callbacks = Callbacks([("x.py:Stops", Stops())])
    callbacks.before_step(3)
    assert callbacks.stop == "the callback x.py:Stops ends the run: good enough"
    assert not callbacks.failed


class Draws(Callback):
    def before_step(self, step: int) -> None:
        torch.manual_seed(9), np.random.seed(9), random.seed(9)


def test_random_draws_of_a_callback_do_not_change_the_runs() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    Callbacks([("x.py:Draws", Draws())]).before_step(1)
    assert str((torch.get_rng_state(), np.random.get_state(), random.getstate())) == str(states)


def test_the_data_is_plain_and_a_copy() -> None:
    other = Recorded()
    metrics = {"reward": torch.tensor(0.5), "kl": float("nan"), "inner": {"a": [1, 2]}}
    Callbacks([("x.py:Recorded", other)]).after_step(4, metrics, [])
    (event,) = other.seen
    assert event.metrics == {"reward": 0.5, "kl": None, "inner": {"a": [1, 2]}}
    event.metrics["inner"]["a"].append(3)
    assert metrics["inner"] == {"a": [1, 2]}


CODE = """
from functools import partial
from grpocli import Callback

class Good(Callback):
    def __init__(self, patience=3):
        self.patience = patience

class Other:
    pass

patient = partial(Good, patience=9)

class Raises(Callback):
    def __init__(self):
        raise KeyError("x")

class Misspelt(Callback):
    on_board = 3  # not a method

    def after_stepp(self, step): ...

def misspelt(): return Misspelt()
"""


def test_callbacks_are_made_of_classes_and_factories(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    (name, good), (_, patient) = make_callbacks([f"{file}:Good", f"{file}:patient"])
    assert name == "mine.py:Good"
    assert (good.patience, patient.patience) == (3, 9)  # type: ignore[attr-defined]


def test_code_that_is_no_callback_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    with pytest.raises(ConfigError, match=r"^callbacks=.*mine\.py:Other: Other does not derive from"):
        check_callback(f"{file}:Other")
    with pytest.raises(ConfigError, match=r"mine\.py:Raises: making it raised KeyError: 'x' \("):
        make_callbacks([f"{file}:Raises"])
    for make in (lambda: check_callback(f"{file}:Misspelt"), lambda: make_callbacks([f"{file}:misspelt"])):
        with pytest.raises(
            ConfigError, match=r'never calls its method after_stepp, but .*; did you mean "after_step"\?'
        ):
            make()
    with pytest.raises(ConfigError, match=r'no function or class Goood; did you mean "Good"\?'):
        check_callback(f"{file}:Goood")
