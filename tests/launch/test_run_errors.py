"""What remains of a run that did not begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpocli.errors import ConfigError
from grpocli.launch.run import run_errors
from grpocli.runs.run_dir import RunDir


@pytest.mark.parametrize(("log", "kept"), [("rank_0.log", False), ("vllm_0.log", True)])
def test_the_folder_is_kept_if_it_has_the_log_of_a_server(log: str, kept: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "logs" / log).touch()
    with pytest.raises(ConfigError), run_errors(run, new=True):
        raise ConfigError("there is no such model", key="model", value="one")
    assert run.path.exists() == kept
