"""Config files of a user, passed with `--config-dir`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.hydra_sources import conf_dir

MATH = Path(conf_dir(), "reward", "math.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "text", "override", "problem"),
    [
        (
            "optim/adamw",
            "lr: 1",
            "seed=1",
            "optim/adamw.yaml: Hydra would use the file of this name in conf/",
        ),
        (
            "optim/mine",
            "lr: 1",
            "optim=mime",
            'optim=mime: choose one of adafactor, adamw, adamw_8bit, mine, muon, sgd; did you mean "mine"?',
        ),
        ("optim/mine", "lr: 1", "optim=mine", "optim: the keys belong to no choice; choose one with optim=NAME"),
        ("optim/mine", "defaults: adamw", "optim=mine", "Invalid defaults list in 'optim/mine'"),
        (
            "reward/mine",
            MATH,
            "reward=[math,mine]",
            "reward=[math,mine]: two rewards have one name; add one as",
        ),
    ],
    ids=["name of ours", "a typo", "no defaults", "a text", "package of ours"],
)
def test_a_wrong_file_gives_a_one_sentence_error(
    name: str, text: str, override: str, problem: str, grpocli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "mine" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, _, err = grpocli("train", "--config-dir", f"{tmp_path}/mine", override, f"hydra.run.dir={tmp_path}/run")
    assert code == 2, err
    assert problem in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_copied_file_has_its_values(grpocli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "mine" / "reward" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(MATH.replace("@package reward.math", "@package reward.mine").replace("weight: 1.0", "weight: 0.3"))
    command = ["train", "--config-dir", f"{tmp_path}/mine", "reward=[math,mine]", "--cfg", "job", "-p", "reward.mine"]
    code, out, err = grpocli(*command)
    assert code == 0, err
    assert "weight: 0.3" in out
