"""`grpocli train` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import SMALL, metrics, run_here

from grpocli.rollout.fake_engine import FakeEngine
from grpocli.training.update import Updater

pytestmark = pytest.mark.processes

SMALL_RUN = ["train", *SMALL]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("train") / "run"
    options = ["checkpoint.every=2", "checkpoint.keep=1", "eval.every=2", "tracker=tensorboard"]
    assert run_here(*SMALL_RUN, *options, f"hydra.run.dir={run}") == 0
    return run


def test_a_run_prints_its_progress(grpocli, tmp_path: Path) -> None:
    code, out, err = grpocli(*SMALL_RUN, "train.steps=1", "engine=fake", f"hydra.run.dir={tmp_path}/run")
    assert (code, err) == (0, "")
    assert "method  algorithm=grpo, engine=fake" in out
    assert "4 prompts x 4 = 16 completions a step" in out
    assert "held-out accuracy after 1 step" in out


def test_a_run_writes_its_files(run: Path) -> None:
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for row in rows)
    named = "reward reward_std loss grad_norm kl entropy frac_reward_zero_std completions/mean_length tokens/trained"
    named += " rewards/exact_match/mean clip_ratio/region_mean sampling_importance_ratio time/train sampling/rounds"
    assert {*named.split()} <= rows[0].keys()
    assert sorted(p.name for p in (run / "rollouts").iterdir()) == [f"step_00000{i}.parquet" for i in (1, 2, 3)]
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000003"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (3, "done")
    assert {"eval/accuracy_before", "eval/accuracy", "seconds"} <= summary.keys()
    assert ["eval/accuracy" in row for row in rows] == [False, True, False]
    assert list(run.rglob("events.out.tfevents*"))


def test_the_final_model_is_a_hugging_face_folder(grpocli, run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12+34="}], tokenize=False)
    assert model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    assert "library_name: transformers" in (run / "model" / "README.md").read_text()
    code, _, err = grpocli(*SMALL_RUN, "model=hf", f"model.path={run}/model", f"hydra.run.dir={tmp_path}/again")
    assert code == 2, "model=hf has no warm start"
    assert "model.warm_start_steps" in err


@pytest.mark.parametrize("algorithm", ["dapo", "rloo"])
def test_every_algorithm_trains(algorithm: str, grpocli, tmp_path: Path) -> None:
    options = ["eval.problems=0", "train.steps=2"]
    code, _, err = grpocli(*SMALL_RUN, f"algorithm={algorithm}", *options, f"hydra.run.dir={tmp_path}/run")
    assert (code, err) == (0, "")
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2
    assert ("kl" in rows[0]) == (algorithm == "rloo")
    if algorithm == "dapo":
        assert rows[0]["sampling/rounds"] >= 1
        assert "rewards/overlong/mean" in rows[0]


def test_a_truncated_distribution_is_scored_under_the_same_truncation(grpocli, tmp_path: Path) -> None:
    options = ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.01", "rollout.temperature=0.8"]
    assert grpocli(*SMALL_RUN, *options, "eval.problems=0", f"hydra.run.dir={tmp_path}/run")[0] == 0
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for row in metrics(tmp_path / "run"))


def test_a_sweep_continues_after_a_failed_run_and_is_compared(grpocli, tmp_path: Path) -> None:
    sweep = ["-m", "eval.reward=nothing,exact_match", "train.steps=1", f"hydra.sweep.dir={tmp_path}/sweep"]
    _, _, err = grpocli(*SMALL_RUN, *sweep, code=2)
    assert "eval.reward=nothing" in err
    _, out, _ = grpocli("compare", str(tmp_path / "sweep"), "--format", "json", code=0)
    assert [row["exit"] for row in json.loads(out)] == ["done"]


def test_the_engine_releases_memory_before_the_updates_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **others: called.append(name) or plain(*given, **others))

    noted(FakeEngine, "generate")
    noted(FakeEngine, "release_memory")
    noted(Updater, "train_step")
    options = ["engine=fake", "train.steps=2", "eval.problems=0"]
    assert run_here("train", *SMALL, *options, f"hydra.run.dir={tmp_path}/run") == 0
    assert called == ["generate", "release_memory", "train_step"] * 2
