"""Kills, signals and resumes: a resume equals never having stopped."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from cli.running import SMALL, finish, metrics, start, without_times
from safetensors.torch import load_file

EVEN = ["reward=[format]", "reward.format.pattern='.*[02468]'"]
"""About half of all answers: every step has something to learn."""
LONG = ["train", *SMALL, *EVEN, "train.steps=12", "checkpoint.every=3", "eval.problems=0", "optim.warmup_steps=4"]


def wait_for(path: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {seconds} s"
        time.sleep(0.02)


def assert_same_run(run: Path, other: Path) -> None:
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))
    assert without_times(metrics(run)) == without_times(metrics(other))
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """The run that nothing happens to."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        code, out = finish(start(*LONG, f"hydra.run.dir={run}"))
    assert code == 0, out
    assert all(row["grad_norm"] > 0 for row in metrics(run)), "a run that learns nothing cannot show a difference"
    return run


def test_kill_9_then_resume(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, f"hydra.run.dir={run}")
    wait_for(run / "checkpoints" / "step_000003")
    process.kill()
    finish(process)
    assert not (run / "summary.json").exists()
    code, out = finish(start("train", f"resume={run}"))
    assert code == 0, out
    assert_same_run(run, undisturbed)


def test_a_kill_while_a_checkpoint_is_written(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out = finish(start(*LONG, "train.steps=4", "checkpoint.every=4", f"hydra.run.dir={run}"))
    assert code == 0, out
    half = run / "checkpoints" / ".tmp-step_000006-1"
    half.mkdir()
    (half / "trainer.json").write_text('{"step": 6')
    torn = run / "checkpoints" / "step_000005"
    torn.mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    code, out = finish(start("train", f"resume={run}", "train.steps=12", "checkpoint.every=3"))
    assert code == 0, out
    assert "going on after step 4" in out
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_a_checkpoint(number: int, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, "checkpoint.every=0", f"hydra.run.dir={run}")
    wait_for(run / "metrics.jsonl")
    process.send_signal(number)
    code, out = finish(process)
    assert code == 3, out
    assert f"go on with: grpocli train resume={run}" in out
    steps = len(metrics(run))
    assert 1 <= steps < 12
    assert (run / "checkpoints" / f"step_{steps:06d}" / "trainer.json").exists()
    assert signal.Signals(number).name in json.loads((run / "summary.json").read_text())["exit"]
    code, out = finish(start("train", f"resume={run}"))
    assert code == 0, out
    assert_same_run(run, undisturbed)


def test_a_run_that_had_no_checkpoint_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, f"hydra.run.dir={run}")
    wait_for(run / "config.yaml")
    process.kill()
    finish(process)
    code, out = finish(start("train", f"resume={run}"))
    assert code == 0, out
    assert_same_run(run, undisturbed)


def test_resuming_a_finished_run_changes_nothing_but_can_go_further(undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    code, out = finish(start("train", f"resume={run}"))
    assert code == 0, out
    assert_same_run(run, undisturbed)
    code, out = finish(start("train", f"resume={run}", "train.steps=13"))
    assert code == 0, out
    assert [row["step"] for row in metrics(run)] == list(range(1, 14))


def test_two_processes_do_what_one_does(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["hardware.processes=2", "hardware.timeout=120"]
    code, out = finish(start(*LONG, "train.steps=4", *options, f"hydra.run.dir={run}"))
    assert code == 0, out
    both = zip(metrics(run), metrics(undisturbed)[:4], strict=True)
    for two, one in both:
        for name in ("reward", "loss", "grad_norm", "kl", "entropy", "tokens/trained", "completions/mean_length"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert (run / "logs" / "rank_1.log").exists()


def test_two_processes_stop_and_resume_as_one(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        *LONG, "hardware.processes=2", "hardware.parallel=fsdp2", "checkpoint.every=0", f"hydra.run.dir={run}"
    )
    wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 3, out
    code, out = finish(start("train", f"resume={run}", "hardware.processes=1"))
    assert code == 0, out
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))
    last, expected = metrics(run)[-1], metrics(undisturbed)[-1]
    assert last["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_a_process_that_dies_ends_the_run_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import os\n\ndef score(completions, **kwargs):\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('rank one is unhappy')\n"
        "    return [0.0] * len(completions)\n"
    )
    reward = ["reward=[python]", "reward.python.function=reward.py:score"]
    started = time.monotonic()
    options = [option for option in LONG if option not in EVEN]
    code, out = finish(start(*options, *reward, "hardware.processes=2", f"hydra.run.dir={tmp_path}/run"))
    assert code == 1, out
    assert "rank one is unhappy" in out.splitlines()[-1]
    assert "rank one is unhappy" in json.loads((tmp_path / "run" / "summary.json").read_text())["exit"]
    assert time.monotonic() - started < 120
