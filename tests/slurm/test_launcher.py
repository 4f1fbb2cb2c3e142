"""hydra/launcher=slurm without a cluster: found by Hydra, checked, and its dry run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hydra_plugins.grpocli_slurm._cluster import environment, last_error
from hydra_plugins.grpocli_slurm.options import Options, seconds

DRY = ["train", "-m", "hydra/launcher=slurm", "hydra.launcher.dry_run=true", "hydra.launcher.partition=gpu"]
MULTINODE = ["hardware=multinode", "hardware.train_nodes=4", "engine=vllm", "engine.tensor_parallel=8"]
Command = Callable[..., tuple[int, str, str]]


def written(grpocli: Command, tmp_path: Path, *overrides: str) -> str:
    """The script of a dry run, checked with `bash -n`."""
    code, out, err = grpocli(*DRY, f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides)
    assert code == 0, err
    script = (tmp_path / "sweep" / "job.sh").read_text()
    assert script in out
    assert "nothing was submitted" in out
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    return script


@pytest.mark.processes
def test_the_script_in_the_docs_is_the_recipes_script(
    grpocli: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = "/shared/me/.venv/bin/python"
    script = written(
        grpocli,
        tmp_path,
        "recipe=qwen2.5-72b-slurm",
        "hydra.launcher.account=research",
        "hydra.launcher.time=2-00:00:00",
        "hydra.launcher.extra.exclusive=true",
        f"hydra.launcher.python={python}",
    )
    shown = request.config.rootpath / "docs" / "qwen2.5-72b-slurm.sh"
    assert script.replace(str(tmp_path / "sweep"), "/shared/me/runs/qwen72b") == shown.read_text()


GIVEN = {
    "account=us": "--account=us",
    "qos=high": "--qos=high",
    "time=1-12:00:00": "--time=1-12:00:00",
    "cpus=16": "--cpus-per-task=16",
    "memory=64G": "--mem=64G",
    "gpus=h100:4": "--gpus-per-node=h100:4",
    "constraint='a&b'": "--constraint='a&b'",
    "extra.mail_type=END": "--mail-type=END",
    "extra.exclusive=true": "--exclusive",
    "extra.nice=0": "--nice=0",
}
"""{option of the launcher: that of sbatch}."""


@pytest.mark.processes
def test_a_dry_run_of_one_run_has_every_option(grpocli: Command, tmp_path: Path) -> None:
    more = ["modules=[cuda/12.8]", "setup=['export A=\"b c\"','ulimit -n 4096']", "extra.overcommit=false"]
    more += ["container=image.sqsh", "container_mounts=[/data:/data]"]
    script = written(grpocli, tmp_path, *(f"hydra.launcher.{option}" for option in (*GIVEN, *more)))
    lines = script.splitlines()
    always = ("--partition=gpu", "--nodes=1", "--open-mode=append", "--requeue", "--signal=B:USR1@120")
    assert {f"#SBATCH {option}" for option in (*GIVEN.values(), *always)} <= {*lines}
    assert "overcommit" not in script
    assert lines.index("module load cuda/12.8") < lines.index('export A="b c"') < lines.index("ulimit -n 4096")
    mounts = f"--container-mounts={tmp_path}/sweep:{tmp_path}/sweep,/data:/data"
    assert f"SRUN=(--cpus-per-task=16 --container-image=image.sqsh {mounts})" in lines


@pytest.mark.processes
def test_a_sweep_is_one_array_and_its_runs_are_listed(grpocli: Command, tmp_path: Path) -> None:
    script = written(grpocli, tmp_path, "seed=0,1,2", "hydra.launcher.max_parallel=2", "hydra.launcher.max_requeues=0")
    assert "#SBATCH --array=0-2%2" in script
    assert "#SBATCH --no-requeue" in script
    folders = [Path(line) for line in (tmp_path / "sweep" / "job.runs").read_text().splitlines()]
    assert folders == [tmp_path / "sweep" / f"{i}" for i in range(3)]
    assert [f"seed: {i}" in (folder / "config.yaml").read_text() for i, folder in enumerate(folders)] == [True] * 3


@pytest.mark.processes
def test_a_config_folder_is_passed_to_the_job(grpocli: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "short.yaml").write_text("# @package _global_\ntrain:\n  steps: 2\n")
    script = written(grpocli, tmp_path, "--config-dir", "mine", "recipe=short")
    assert f'TRAIN=("$PYTHON" -m grpocli train --config-dir {tmp_path}/mine "resume=$RUN_DIR")' in script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra.launcher.partitio=a"], "there is no key hydra.launcher.partitio"),
        (["seed=0,-1"], "seed=-1: must be 0 or more (job 1: seed=-1; nothing was submitted)"),
        (["hardware=single,multinode", "engine=vllm", "engine.tensor_parallel=8"], "need the same nodes, not one node"),
        (["hydra.launcher.time=2"], "hydra.launcher.signal_before=120: must be less than the time limit"),
    ],
)
def test_bad_input_gives_a_one_sentence_error_and_no_script(
    grpocli: Command, tmp_path: Path, overrides: list[str], said: str
) -> None:
    code, out, err = grpocli(*DRY, f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert "#SBATCH" not in out
    assert not (tmp_path / "sweep" / "job.sh").exists()


@pytest.mark.slow
def test_without_slurm_nothing_is_written(grpocli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = grpocli("train", "-m", "hydra/launcher=slurm", "hydra.sweep.dir=sweep")
    assert code == 2
    assert "there is no sbatch on the path" in err
    assert not (tmp_path / "sweep" / "0").exists()


@pytest.mark.parametrize(
    ("time", "wanted"), [("30", 1800), ("30:10", 1810), ("2:00:01", 7201), ("1-12", 129600), ("1-12:30", 131400)]
)
def test_time_limits_are_read_as_sbatch_reads_them(time: str, wanted: int) -> None:
    assert seconds(time) == wanted


@pytest.mark.slow
def test_a_folder_name_that_a_shell_would_change_is_refused(grpocli: Command, tmp_path: Path) -> None:
    code, _, err = grpocli(*DRY, f"hydra.sweep.dir='{tmp_path}/a\\'b'")
    assert code == 2
    assert "quotes, backslashes and line breaks do not reach the nodes" in err


def test_a_runs_own_error_is_printed_before_slurms(tmp_path: Path) -> None:
    log = tmp_path / "slurm.log"
    log.write_text("grpocli: error: no space left\nsrun: error: node1: task 0: Exited with exit code 1\n")
    assert last_error(log) == "grpocli: error: no space left"
    log.write_text("slurmstepd-node1: error: *** JOB 5 ON node1 CANCELLED DUE TO NODE FAILURE ***\nbye\n")
    assert last_error(log) == "slurmstepd-node1: error: *** JOB 5 ON node1 CANCELLED DUE TO NODE FAILURE ***"
    assert last_error(tmp_path / "none") is None


def test_options_that_would_break_the_script_are_refused() -> None:
    from grpocli.errors import ConfigError

    for values in (
        {"name": "a b"},
        {"gpus": "many"},
        {"extra": {"open_mode": "append"}},
        {"partition": "a\n#SBATCH --uid=0"},
        {"extra": {"comment": "a\n#SBATCH --uid=0"}},
        {"signal_before": 0},
        {"max_requeues": -1},
    ):
        with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{next(iter(values))}="):
            Options(**values)  # type: ignore[arg-type]


def test_a_job_submitted_from_a_job_gets_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "gpu", "WANDB_API_KEY": "k"}
    jobs = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_MEM_PER_CPU")
    jobs += ("SLURM_CPUS_PER_TASK", "SLURMD_NODENAME", "SRUN_DEBUG", "PMI_RANK", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR")
    for name, value in own.items() | dict.fromkeys(jobs, "7").items():
        monkeypatch.setenv(name, value)
    assert own.items() <= environment().items()
    assert not set(jobs) & set(environment())
    monkeypatch.delenv("SLURM_JOB_ID")  # a shell of a user, who chose them
    assert {"CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK"} <= set(environment())


@pytest.mark.processes
def test_the_folder_of_an_earlier_sweep_is_not_changed(grpocli: Command, tmp_path: Path) -> None:
    written(grpocli, tmp_path, "seed=0,1")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "multirun.yaml"]
    before = {path: path.read_bytes() for path in files}
    assert grpocli(*DRY, "seed=0,-1", f"hydra.sweep.dir={tmp_path / 'sweep'}")[0] == 2
    assert all(path.read_bytes() == content for path, content in before.items())
