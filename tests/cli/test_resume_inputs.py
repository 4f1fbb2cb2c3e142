"""A resume with another model, other inputs, or keys with which it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from cli.running import SMALL, metrics, run_here

from grpocli.models.tiny import Tiny
from grpocli.runs.run_dir import BEFORE, RunDir

pytestmark = pytest.mark.processes

CODE = "def f(completions, **columns):\n    return [float(len(str(one)) % 2) for one in completions]\n"


def edited(model: Path, copy: Path, file: str, old: str, new: str) -> None:
    """A copy of a model with another text in one of its files."""
    shutil.copytree(model, copy)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, code, and a run of two steps with `model`."""
    folder = tmp_path_factory.mktemp("made")
    for name, steps in (("model", 20), ("other", 21)):
        shutil.copytree(Tiny(warm_start_steps=steps).prepare(), folder / name)
    edited(folder / "model", folder / "deeper", "config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3')
    edited(folder / "model", folder / "renamed", "tokenizer.json", '"?": ', '"seven": ')
    (folder / "mine.py").write_text(CODE)
    (folder / "bad.py").write_text("def f(completions, **columns):\n    raise ValueError('bad')\n")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 40)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL[1:], "train.steps=2", "checkpoint.every=1", "eval.problems=0", f"model={folder}/model"]
    words += ["task=jsonl", f"task.path={folder}/d.jsonl", "task.format=chat", f"reward=[{folder}/mine.py:f]"]
    words += ["rollout.max_prompt_tokens=32", "rollout.max_completion_tokens=8", f"hydra.run.dir={folder}/run"]
    assert run_here("train", *words) == 0
    return folder


@pytest.fixture
def made(built: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change; its run is with the copies."""
    made = shutil.copytree(built, tmp_path / "made")
    config = made / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(built), str(made)))
    return made


@pytest.fixture
def run(made: Path) -> Path:
    return made / "run"


def state_of(run: Path) -> dict[str, bytes]:
    """The files of a run without locks, logs and those with which processes are started."""
    others = (".lock", ".workers", ".reserve", "run.log", "job.json", "accelerate.json")
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in others]
    return {str(path): path.read_bytes() for path in files if path.parent.name != "logs"}


REFUSED = {
    "other weights": (["model=FOLDER/other"], "model: "),
    "another shape": (["model=FOLDER/deeper"], "model: "),
    "other tokens": (["model.path=FOLDER/renamed"], "model.path="),
    "a reward that raises": (["reward=[FOLDER/bad.py:f]", "optim.lr=1"], "reward.f "),
}
TWO = (["reward=[FOLDER/bad.py:f]", "hardware.processes=2"], "reward.f ")


@pytest.mark.parametrize("case", [*REFUSED, pytest.param("in two processes", marks=pytest.mark.survival)])
def test_a_resume_that_fails_leaves_the_run_as_it_was(case: str, made: Path, run: Path, grpocli) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000002")  # the records of step 2 are later than the checkpoint
    before = state_of(run)
    given, key = REFUSED.get(case, TWO)
    words = [word.replace("FOLDER", str(made)) for word in given]
    code, _, err = grpocli("train", f"resume={run}", "train.steps=3", *words)
    assert code != 0
    assert f"error: {key}" in err
    assert state_of(run) == before


def test_a_resume_that_was_killed_before_its_first_step_leaves_no_key(run: Path) -> None:
    RunDir(run).keep_before()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["optim"]["lr"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"overrides": [*config["overrides"], "optim.lr=0.5"]}))
    assert run_here("train", f"resume={run}", "train.steps=3") == 0
    again = yaml.safe_load((run / "config.yaml").read_text())
    assert again["optim"]["lr"] != 0.5
    assert "optim.lr=0.5" not in again["overrides"]
    assert not (run / BEFORE).exists()
    assert len((run / "sessions.jsonl").read_text().splitlines()) == 2
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


def test_a_resume_tells_and_records_what_has_changed(made: Path, run: Path, grpocli) -> None:
    data, code = made / "d.jsonl", made / "mine.py"
    data.write_text(data.read_text() + json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    code.write_text(CODE.replace("return [", "return [-"))
    shutil.move(made / "model", made / "moved")
    _, out, err = grpocli("train", f"resume={run}", f"model.path={made}/moved", "train.steps=3", code=0)
    told = ["the code of reward.f.function has changed", "the content of task.path has changed"]
    assert [line.partition(" since")[0] for line in out.splitlines() if "has changed" in line] == [
        f"warning: {sentence}" for sentence in told
    ]
    first, second = (json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines())
    changed = {key for key in first["inputs"] if first["inputs"][key] != second["inputs"][key]}
    assert changed == {"reward.f.function", "task.path"}
    assert [sentence.partition(" since")[0] for sentence in second["fallback"]] == told
    words = [f"model.path={made}/other", "train.steps=4", "resume_other_weights=true"]
    _, out, err = grpocli("train", f"resume={run}", *words, code=0)
    assert "warning: the weights of model have changed since the last start" in out
    saved = yaml.safe_load((run / "config.yaml").read_text())
    shutil.rmtree(made / "other")
    shutil.move(made / "moved", made / "other")
    status, out, err = grpocli("train", f"resume={run}", "train.steps=5")
    assert (status, saved["model"]["path"]) == (2, f"{made}/other"), "the key is for one resume"
    assert "resume_other_weights=true to go on" in err
