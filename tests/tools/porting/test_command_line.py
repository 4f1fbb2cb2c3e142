"""The arguments of a script's command line, a config of TrlParser, a config of accelerate, and files of from-trl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.composition.overrides import from_command_line

Command = Callable[..., tuple[int, str, str]]
PLAIN = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

GROUP = 4

def short(completions, **kwargs):
    return [float(len(text) <= GROUP) for text in completions]

def main():
    config = GRPOConfig(
        "out", num_generations=GROUP, per_device_train_batch_size=8, num_train_epochs=2,
        generation_kwargs={"stop": ["\\n\\n"]},
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    GRPOTrainer("a/b", short, config, rows).train()

main()
"""
PARSED = """
from trl.rewards import accuracy_reward
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
GRPOTrainer(model_args.model_name_or_path, accuracy_reward, training_args,
            load_dataset(script_args.dataset_name), peft_config=get_peft_config(model_args))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "parsed.py").write_text(PARSED)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(12)))
    (tmp_path / "dapo.yaml").write_text(
        "model_name_or_path: a/b\nattn_implementation: eager\ndataset_name: c/d\ncolumn: problem\nmax_steps: 40\n"
        "gradient_accumulation_steps: 2\nsteps_per_generation: 8\nper_device_train_batch_size: 4\n"
    )
    return tmp_path


def overrides(text: str) -> list[str]:
    return shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)


def test_epochs_need_the_number_of_prompts(folder: Path, grpocli: Command) -> None:
    _, text, _ = grpocli("from-trl", "plain.py")
    assert "train.steps=???" in overrides(text)
    assert "train.steps=2 x prompts / 2; give the number of its prompts with --prompts N" in text
    _, text, _ = grpocli("from-trl", "plain.py", "--prompts", "20")
    assert "train.steps=20" in overrides(text)  # 2 epochs of 20 prompts, 2 a step


def test_line_breaks_of_stop_strings_arrive(folder: Path, grpocli: Command) -> None:
    _, text, _ = grpocli("from-trl", "plain.py")
    stop = next(one for one in overrides(text) if one.startswith("rollout.stop="))
    assert "\n" not in stop
    assert list(compose(from_command_line([stop])).rollout.stop) == ["\n\n"]


def test_the_command_to_try_first_builds_a_run(folder: Path, grpocli: Command) -> None:
    _, text, _ = grpocli("from-trl", "plain.py", "--rewards", "own.py")
    command = text.rpartition("# try the data and rewards first: grpocli train ")[2]
    run = build_run(compose(from_command_line(shlex.split(command))))
    assert list(run.reward) == ["short"]
    assert run.train.steps == 2


def test_arguments_of_a_script_are_read_after_two_dashes(folder: Path, grpocli: Command) -> None:
    words = ["--model_name_or_path", "a/b", "--learning_rate", "1e-5", "--use_peft", "--lora_target_modules", "q,", "v"]
    code, text, _ = grpocli("from-trl", "parsed.py", "--", *words)
    assert code == 0
    assert {"model.path=a/b", "optim.lr=1e-05", "model.lora.target_modules=[q,v]"} <= set(overrides(text))
    assert "from its command line" not in text
    assert "give the arguments after `--`" in grpocli("from-trl", "parsed.py")[1]
    code, _, err = grpocli("from-trl", "parsed.py", "--", "1e-5")
    assert code == 2
    assert "must be --NAME" in err


def test_a_config_of_trl_parser_is_read(folder: Path, grpocli: Command) -> None:
    words = ["--config", "dapo.yaml", "--max_steps", "80", "--use_peft"]
    code, text, _ = grpocli("from-trl", "parsed.py", "--", *words)
    assert code == 0
    wanted = {"model.path=a/b", "model.attention=eager", "task.path=c/d", "reward=[math]"}
    assert wanted | {"train.minibatches=4", "train.steps=20", "model.lora.rank=16"} <= set(overrides(text))
    assert "# check: column=problem: grpocli does not know this setting" in text
    code, _, err = grpocli("from-trl", "parsed.py", "--", "--config", "nowhere.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no such file" in err


def test_a_config_of_accelerate(folder: Path, grpocli: Command) -> None:
    (folder / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 6\nnum_machines: 1\nmixed_precision: fp16\n"
        "deepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n  offload_optimizer_device: none\n"
    )
    code, text, _ = grpocli("from-trl", "plain.py", "--accelerate", "zero3.yaml")
    assert code == 0
    wanted = {"hardware.processes=6", "hardware.parallel=zero3", "rollout.prompts_per_step=12", "model.dtype=float16"}
    assert wanted <= set(overrides(text))
    assert "# no counterpart: offload_param_device=cpu" in text
    assert "this assumes" not in text
    code, _, err = grpocli("from-trl", "zero3.yaml")
    assert code == 2
    assert "give the script, and --accelerate zero3.yaml beside it" in err
    code, _, err = grpocli("from-trl", "plain.py", "--accelerate", "dapo.yaml")
    assert code == 2
    assert "is not a config of accelerate" in err


def test_overwrite_replaces_only_files_of_from_trl(folder: Path, grpocli: Command) -> None:
    assert grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml")[0] == 0
    code, _, err = grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml")
    assert code == 2
    assert "add --overwrite" in err
    assert grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml", "--overwrite", "--prompts", "40")[0] == 0
    assert "steps: 40" in (folder / "recipe" / "mine.yaml").read_text()
    (folder / "recipe" / "mine_rewards.py").write_text("mine = 1\n")
    code, _, err = grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml", "--overwrite")
    assert code == 2
    assert "is not a file that from-trl wrote" in err
