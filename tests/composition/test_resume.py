"""The config of a resumed run, also after defaults have changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpocli.algorithm.correction import NoCorrection, TokenMask
from grpocli.algorithm.keep import All
from grpocli.composition.compose import build_run, compose, save
from grpocli.composition.resume import Resume, changes, moved_files
from grpocli.config.schema import Run
from grpocli.errors import ConfigError


def resumed(folder: Path, began_with: list[str], now: list[str], *overrides: str) -> Run:
    """A run that began with the defaults `began_with`, which its `overrides` do not name."""
    config = compose([*overrides, *began_with])
    config.overrides = list(overrides)
    (folder / "config.yaml").write_text(save(config))
    return again(Resume(folder, now))


def again(resume: Resume) -> Run:
    return build_run(resume.merged(compose([o for o in resume.overrides([]) if not o.startswith(("resume", "hydra"))])))


@pytest.mark.slow
def test_a_folder_name_may_have_quotes(tmp_path: Path) -> None:
    folder = tmp_path / """it's a "run" \\"""
    folder.mkdir()
    run = resumed(folder, [], ["train.steps=7"])
    assert run.train.steps == 7
    composed = compose([one for one in Resume(folder, []).overrides([]) if one.startswith("resume=")])
    assert composed.resume == str(folder)


def test_a_changed_default_choice_does_not_change_the_run(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["algorithm/correction=none", "algorithm/advantage=center"], ["train.steps=7"])
    assert run.algorithm.correction == NoCorrection()
    assert type(run.algorithm.advantage).__name__ == "Center"
    assert run.train.steps == 7


@pytest.mark.slow
def test_an_override_changes_the_run(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["algorithm/correction=none"], ["algorithm/correction=token_mask"])
    assert run.algorithm.correction == TokenMask()


@pytest.mark.slow
def test_a_key_that_follows_an_override_follows_it(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["engine=vllm"], ["rollout.max_staleness=1"])
    assert run.algorithm.has_correction
    assert resumed_length(tmp_path / "a", "rollout.max_completion_tokens=20") == 30
    assert resumed_length(tmp_path / "b", "algorithm.aggregate.length=20") == 20


@pytest.mark.slow
def test_another_algorithm_drops_the_keys_that_it_lacks(tmp_path: Path) -> None:
    given = ["algorithm=dapo", "reward.overlong.buffer_tokens=2"]
    config = compose(given)
    config.overrides = given
    (tmp_path / "config.yaml").write_text(save(config))
    run = again(Resume(tmp_path, ["algorithm=grpo"]))
    assert run.algorithm.keep == All()
    assert run.reward["overlong"].buffer_tokens == 2, "the run keeps its rewards"


def test_a_resume_continues_in_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    said = "hydra.run.dir=/elsewhere: a resume continues in the run's own folder"
    with pytest.raises(ConfigError, match=re.escape(said)):
        Resume.requested([f"resume={tmp_path}", "hydra.run.dir=/elsewhere"])
    assert Resume.requested([f"resume={tmp_path}", f"hydra.run.dir={tmp_path}"])


def resumed_length(folder: Path, began_with: str) -> int:
    """The length of Dr. GRPO after a resume with another max_completion_tokens."""
    folder.mkdir()
    run = resumed(folder, [], ["rollout.max_completion_tokens=30"], "algorithm=drgrpo", began_with)
    return int(run.algorithm.aggregate.length)


HYDRA_S = {
    "as it was written": "- algorithm=dapo\n- optim.lr=0.5\n",
    "overwritten by a command that was refused": "- algorithm=drgrpo\n- reward=[math]\n- task=gsm8k\n",
    "half written": "- [",
    "missing": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("recorded", HYDRA_S)
def test_a_run_of_an_earlier_version_is_read_from_its_config(tmp_path: Path, recorded: str) -> None:
    """Its config has no `overrides`, and Hydra's record of them may be damaged."""
    config = compose(["algorithm=dapo", "optim.lr=0.5", "train.steps=7"])
    (tmp_path / "config.yaml").write_text(save(config).replace("overrides: []\n", ""))
    if (text := HYDRA_S[recorded]) is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
    run = again(Resume(tmp_path, ["train.steps=9"]))
    began = build_run(config)
    assert (run.algorithm, run.task, run.optim, run.rollout) == (
        began.algorithm,
        began.task,
        began.optim,
        began.rollout,
    )
    assert list(run.reward) == list(began.reward) == ["exact_match", "overlong"]
    assert run.train.steps == 9


def test_changes_lists_only_differences(tmp_path: Path) -> None:
    before = OmegaConf.to_container(compose(["reward=[math]"]), resolve=True)
    given = ["optim.lr=5e-7", "engine=vllm", "reward=[math,format]", "resume=/run", "rollout.stop=[a]"]
    after = OmegaConf.to_container(compose(given), resolve=True)
    assert changes(before, before) == {}
    assert changes(before, after) == {
        "optim.lr": (before["optim"]["lr"], 5e-7),
        "engine": ("auto", "vllm"),
        "reward.format": (None, "format"),
        "rollout.stop": ([], ["a"]),
    }


@pytest.mark.parametrize(
    ("measures", "after", "changed"),
    [(None, ["format", "math"], True), ("math", ["format", "math"], False), (None, ["math", "format"], False)],
)
def test_another_first_reward_counts_if_it_measures(measures: str | None, after: list[str], changed: bool) -> None:
    configs = [{"reward": {name: {} for name in names}, "eval": {"reward": measures}} for names in (["math"], after)]
    assert ("reward" in changes(*configs)) == changed


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (["/new/a.py", "/new/b.py"], {"/gone/a.py": "/new/a.py", "/gone/b.py": "/new/b.py"}),
        (["/new/b.py", "/new/a.py"], {"/gone/a.py": "/new/a.py", "/gone/b.py": "/new/b.py"}),
        (["/new/a.py"], {"/gone/a.py": "/new/a.py"}),
        (["/new/c.py", "/new/d.py"], {}),
    ],
)
def test_functions_of_one_name_are_told_apart_by_their_files(again: list[str], found: dict[str, str]) -> None:
    saved = {"callbacks": ["/gone/a.py:f", "/gone/b.py:f"]}
    assert moved_files(saved, [f"{place}:f" for place in again]) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "line 1: expected ',' or ']'"),
        ("seed: \udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_config_is_reported(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(f"resume={file}: cannot be read: {problem}")):
        Resume(tmp_path, []).overrides([])
