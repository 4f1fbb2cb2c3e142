"""The output and files of a resume."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
from cli.running import SMALL, metrics
from cli.test_refused import digest

pytestmark = pytest.mark.processes

SECRET = "hunter2-of-the-environment"
TYPED = "rollout.stop=['${oc.env:MY_SECRET}']"


def test_a_resume_reports_changes_and_a_finished_run(grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", SECRET)
    run = tmp_path / "run"
    start = ["train", *SMALL, "train.steps=2", "eval.problems=0", "optim.lr=1e-3", TYPED, f"hydra.run.dir={run}"]
    assert "changed" not in grpocli(*start, code=0)[1]
    for name in ("overrides.yaml", "hydra.yaml", "config.yaml"):  # as Hydra would write them
        assert stat.S_IMODE((run / ".hydra" / name).stat().st_mode) == 0o600  # names the environment variable
    assert stat.S_IMODE((run / "config.yaml").stat().st_mode) == 0o600

    given = ["train.steps=3", "optim.lr=5e-4", "rollout.stop=['${oc.env:MY_SECRET}',b]"]
    _, out, _ = grpocli("train", f"resume={run}", *given, code=0)
    said = [line for line in out.splitlines() if line.startswith("changed ")]
    assert said == [
        "changed optim.lr: 0.001 -> 0.0005",
        "changed train.steps: 2 -> 3",
        "changed rollout.stop: [${oc.env:MY_SECRET}] -> [${oc.env:MY_SECRET},b]",
    ]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    card = (run / "model" / "README.md").read_text()
    assert [json.loads(line)["step"] for line in (run / "sessions.jsonl").read_text().splitlines()] == [0, 2]

    assert "- ${oc.env:MY_SECRET}\n" in card
    assert SECRET not in grpocli("compare", str(run))[1]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []  # safe to copy and publish

    before = digest(run)
    _, out, _ = grpocli("train", f"resume={run}", code=0)
    assert out.strip().endswith("is finished after 3 steps; train.steps=N above 3 trains more")
    assert digest(run) == before

    _, out, _ = grpocli("train", f"resume={run}", "train.steps=4", "algorithm=drgrpo", code=0)
    assert "changed algorithm.advantage: std -> center" in out
    assert "changed algorithm: grpo -> drgrpo" in out
    assert "rewards from now on: exact_match" in out
    card = (run / "model" / "README.md").read_text()
    assert "| algorithm | `drgrpo` |" in card

    for path in run.glob(".hydra/*"):  # a resume needs only the config
        path.write_text("- [")
    for left in ("checkpoints", "model"):  # as after a kill before the first checkpoint
        shutil.rmtree(run / left)
    recorded = metrics(run)
    code, _, err = grpocli("train", f"resume={run}", "train.steps=6")  # they were deleted, it was not killed
    assert code == 2
    assert f"resume={run}: " in err
    assert metrics(run) == recorded
    (run / "summary.json").unlink()
    first, *_ = (run / "sessions.jsonl").read_text().splitlines(keepends=True)
    (run / "sessions.jsonl").write_text(first)
    _, out, _ = grpocli("train", f"resume={run}", "train.steps=1", code=0)
    assert "the run ended before its first checkpoint and starts again" in out
    assert [row["step"] for row in metrics(run)] == [1]
    assert [path.name for path in (run / "rollouts").iterdir()] == ["step_000001.parquet"]
