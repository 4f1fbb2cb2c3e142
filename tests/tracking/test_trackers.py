"""Trackers of accelerate, with grpocli's metrics."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from grpocli.composition.compose import compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.build import build
from grpocli.errors import ConfigError
from grpocli.tracking import trackers
from grpocli.tracking.trackers import TRACKERS, Accelerate, AccelerateTracker


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)


@pytest.mark.slow
def test_every_tracker_of_accelerate_has_a_name_here(all_installed: None) -> None:
    assert set(TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
    assert {p.stem for p in (Path(conf_dir()) / "tracker").glob("*.yaml")} == {"none", "accelerate", *TRACKERS}
    for name in TRACKERS:
        assert build(compose([f"tracker={name}", "tracker.options.tags=[a]"]).tracker).kind == name


def test_a_missing_tracker_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tracker=comet_ml: it is not installed: pip install comet_ml$"):
        Accelerate(kind="comet_ml").check_ready()
    with pytest.raises(ConfigError, match=r"^tracker=aim: it is not installed: pip install aim$"):
        Accelerate(kind="aim").start("run", tmp_path, {})


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize(("done", "kept"), [(2, [(1, 1.0), (2, 1.0), (3, 2.0)]), (0, [(1, 2.0), (2, 2.0), (3, 2.0)])])
def test_tensorboard_shows_a_step_once_after_a_resume(
    done: int, kept: list[tuple[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    number = itertools.count(1)  # of a file within a second; files are read in the order of their names
    monkeypatch.setattr(event_file_writer, "_global_uid", SimpleNamespace(get=lambda: next(number)))
    for session, (before, steps) in enumerate([(0, [0, 1, 2, 3, 4]), (done, range(done + 1, 4))], start=1):
        live = Accelerate(kind="tensorboard").start("run", tmp_path, {}, before)
        assert live is not None
        for step in steps:
            live.log({"reward": session}, step)
        live.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(e.step, e.value) for e in events if e.step] == kept
    assert len(events) == len(kept) + (done > 0)


ARGUMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "wandb": ("mine", {"name": "run", "dir": "FOLDER/wandb"}),
    "mlflow": ("mine", {"run_name": "run"}),
    "swanlab": ("mine", {"experiment_name": "run", "logdir": "FOLDER/swanlab"}),
    "comet_ml": ("mine", {}),
    "aim": ("run", {"logging_dir": ".", "experiment": "mine"}),
    "tensorboard": ("tensorboard", {"logging_dir": "FOLDER", "purge_step": 0}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_arguments_of_a_tracker_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_installed: None, kind: str
) -> None:
    make = Mock()
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind, make)
    assert Accelerate(kind=kind, project="mine", options={"extra": 1}).start("run", tmp_path, {"a": {"b": 1}})
    first, named = ARGUMENTS[kind]
    folders = {k: v.replace("FOLDER", str(tmp_path)) if isinstance(v, str) else v for k, v in named.items()}
    make.assert_called_once_with(first, **folders, extra=1)
    make().start.assert_called_once_with()
    make().store_init_configuration.assert_called_once_with({"a.b": 1})


def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    down = ConnectionError("the dashboard is down")
    behind = Mock(log=Mock(side_effect=[down, down, None]), finish=Mock(side_effect=down))
    live = AccelerateTracker(behind, "wandb")
    for step in (1, 2, 3):
        live.log({"reward": 1.0}, step)
    live.finish()
    assert behind.log.call_args_list == [call({"reward": 1.0}, step=step) for step in (1, 2, 3)]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["tracker=wandb: step 1 could not be logged", "tracker=wandb: it could not be closed"]
