"""conf/ has a YAML for every choice, equal to its dataclass."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conf_files import RUN, WRITTEN_FROM, files, write

from grpocli.composition.hydra_sources import conf_dir

FILES = files()


def test_every_choice_has_its_file() -> None:
    conf = Path(conf_dir())
    written = {str(path.relative_to(conf)): path.read_text() for path in conf.rglob("*.yaml")}
    ours = {name: text for name, text in written.items() if WRITTEN_FROM in text}
    assert ours == FILES, "conf/ differs from the classes: run make conf"


def test_the_keys_of_a_run_are_documented() -> None:
    content = yaml.safe_load(FILES[RUN])
    assert content["rollout"]["group_size"] == 8
    assert "# Number of completions of a prompt, at least 2." in FILES[RUN]
    assert "task" not in content  # a config group, whose choices have files


@pytest.mark.parametrize("name", sorted(set(FILES) - {RUN}))
def test_a_file_is_yaml_that_begins_with_its_schema(name: str) -> None:
    content = yaml.safe_load(FILES[name])
    assert content["defaults"] == [f"/hydra/schema/{name.removesuffix('.yaml')}@_here_", "_self_"]


def test_files_of_removed_choices_are_deleted_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "gone.yaml").write_text(f"{WRITTEN_FROM}Gone.\n")
    (tmp_path / "reward" / "mine.yaml").write_text("weight: 1\n")
    write(tmp_path)
    assert not (tmp_path / "reward" / "gone.yaml").exists()
    assert (tmp_path / "reward" / "mine.yaml").exists()
    assert (tmp_path / "reward" / "math.yaml").read_text() == FILES["reward/math.yaml"]
