"""`grpocli eval`: models and checkpoints, the same results as during training, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.running import SMALL, run_here

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.processes


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())["models"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the tiny model with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    more = ["train.steps=2", "checkpoint.every=1", "checkpoint.keep=0", "eval.problems=12", "eval.samples=3"]
    assert run_here("train", *SMALL, *more, "optim.lr=0.01", f"hydra.run.dir={folder}") == 0
    return folder


def test_checkpoints_have_the_accuracies_measured_in_training(grpocli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--run", str(run), "--checkpoints", "all", "--problems", "12", "--samples", "3", "--out", str(out)]
    _, said, err = grpocli("eval", *words, code=0)
    assert "fewer than" not in err
    models = results(out)
    assert [model["name"] for model in models] == ["step 1", "step 2"]
    summary = json.loads((run / "summary.json").read_text())
    last = models[1]["tasks"][0]
    scores = {name: score["value"] for name, score in last["scores"].items()}
    found = {"accuracy": scores["mean@3"], "accuracy_greedy": scores["greedy"]}
    found |= {name: scores[name] for name in ("pass@2", "pass@3", "maj@3")}
    found |= {name: last[name] for name in ("mean_length", "truncated")}
    assert found == pytest.approx({name: summary[f"eval/{name}"] for name in found})
    assert scores["mean@3"] <= scores["pass@2"] <= scores["pass@3"]
    assert "step 2" in said
    files = {kind: out / "samples" / f"001_step_2_{kind}.parquet" for kind in ("greedy", "sampled")}
    assert {kind: len(read_rollouts(path)) for kind, path in files.items()} == {"greedy": 12, "sampled": 12 * 3}


def test_the_final_model_is_evaluated_on_several_tasks(grpocli, run: Path, tmp_path: Path) -> None:
    tasks = ["task=[arithmetic,letter_counting]", "task.letter_counting.rewards=[number]"]
    tasks += ["task.letter_counting.eval_size=4", "reward=[exact_match,number]"]
    tasks += ["rollout.max_prompt_tokens=128", "rollout.max_completion_tokens=8"]
    for model, out in (([f"model.path={run}/model", *tasks], tmp_path / "a"), (["--run", str(run)], tmp_path / "b")):
        _, _, err = grpocli("eval", *model, "--problems", "6", "--samples", "0", "--out", str(out), code=0)
        few = "letter_counting has 4 problems to evaluate on, fewer than the 6 asked for"
        assert (few in err) == (out.name == "a")
    (both,), (alone,) = results(tmp_path / "a"), results(tmp_path / "b")
    assert [task["task"] for task in both["tasks"]] == ["arithmetic", "letter_counting"]
    assert len(list((tmp_path / "a" / "samples").glob("*_greedy.parquet"))) == 1
    assert both["tasks"][0]["scores"]["greedy"] == alone["tasks"][0]["scores"]["greedy"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--no-greedy", "--samples", "0"], "--no-greedy"),
        (["--checkpoints", "all"], "needs --run RUN"),
        (["--run", "nowhere"], "resume=nowhere"),
        (["--run", "RUN", "--checkpoints", "1,7"], "--checkpoints=1,7"),
        (["--run", "RUN", "--out", "RUN"], "--out"),
        (["hardware.processes=2"], "hardware.processes=2"),
        (["model.path=nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_named(grpocli, run: Path, tmp_path: Path, options: list[str], named: str) -> None:
    code, _, err = grpocli("eval", "--out", str(tmp_path / "out"), *(one.replace("RUN", str(run)) for one in options))
    assert code == 2
    assert named in err


def test_a_task_without_training_data_is_evaluated(grpocli, run: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "test.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5)))
    task = ["task=jsonl", f"task.path={data}", "task.split=null", "reward=[exact_match]"]
    code, _, err = grpocli("eval", f"model.path={run}/model", *task, "--samples", "0", "--out", str(out))
    assert (code, results(out)[0]["tasks"][0]["questions"]) == (0, 5), err
