"""What remains of a run that did not begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpocli.errors import ConfigError
from grpocli.launch.run import run_errors
from grpocli.runs.run_dir import RunDir


@pytest.mark.parametrize(("problem", "kept"), [("there is no such model", False), ("vLLM ended (see {log})", True)])
def test_the_folder_is_kept_if_a_log_in_it_explains_the_error(problem: str, kept: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    log = run.path / "logs" / "vllm_0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    with pytest.raises(ConfigError), run_errors(run, new=True):
        raise ConfigError(problem.format(log=log), key="model", value="one")
    assert log.exists() == kept
