"""Scripts that read their settings from a command line, a config of TrlParser, and a config of accelerate."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.composition.overrides import from_command_line
from grpocli.config.user_code import load

Command = Callable[..., tuple[int, str, str]]
PLAIN = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

GROUP = 4
LIMIT = 3

def make_short(limit):
    def short(completions, trainer_state=None, **kwargs):
        return [float(len(text) <= limit) for text in completions]
    return short

def within(completions, **kwargs):
    return [float(len(text) <= LIMIT) for text in completions]

def main():
    config = GRPOConfig(
        "out", num_generations=GROUP, per_device_train_batch_size=2 * GROUP, num_train_epochs=2,
        generation_kwargs={"stop": ["\\n\\n"]},
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    trainer = GRPOTrainer("a/b", [make_short(LIMIT), within], config, rows)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model("out/final")

main()
"""
ARGPARSE = """
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="c/d")
parser.add_argument("--lr", type=float, default=2e-5)
args = parser.parse_args()
GRPOTrainer(args.model, accuracy_reward, GRPOConfig(learning_rate=args.lr), load_dataset("c/d"))
"""
DATACLASSES = """
from dataclasses import dataclass, field
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

@dataclass
class Own(ScriptArguments):
    column: str = field(default="question", metadata={"help": "The prompt."})
    hint: str = " Be brief."

@dataclass
class Settings(GRPOConfig):
    learning_rate: float = 3e-6

def short(completions, **kwargs):
    return [float(len(text) < 9) for text in completions]

def main(own, settings, model):
    data = load_dataset(own.dataset_name, split=own.dataset_train_split)
    data = data.map(lambda row: {"prompt": row[own.column] + own.hint})
    settings.model_init_kwargs = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    test = data[own.dataset_test_split] if settings.eval_strategy != "no" else None
    GRPOTrainer(model.model_name_or_path, short, args=settings, train_dataset=data, eval_dataset=test,
                peft_config=get_peft_config(model)).train()

if __name__ == "__main__":
    own, settings, model = TrlParser((Own, Settings, ModelConfig)).parse_args_and_config()
    main(own, settings, model)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "filled.py").write_text(DATACLASSES)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(12)))
    (tmp_path / "dapo.yaml").write_text(
        "model_name_or_path: a/b\nattn_implementation: eager\ndataset_name: c/d\ncolumn: problem\nmax_steps: 40\n"
        "gradient_accumulation_steps: 2\nsteps_per_generation: 8\nper_device_train_batch_size: 4\n"
    )
    return tmp_path


def overrides(text: str) -> list[str]:
    return shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)


def test_arguments_of_argparse_are_read_if_they_are_given(folder: Path, grpocli: Command) -> None:
    (folder / "plain.py").write_text(ARGPARSE)
    _, text, _ = grpocli("from-trl", "plain.py")
    assert "model=???" in overrides(text)
    assert "# check: learning_rate=args.lr (line 6): it is not a literal" in text
    _, text, _ = grpocli("from-trl", "plain.py", "--", "--model", "a/b", "--lr", "1e-4")
    assert {"model.path=a/b", "optim.lr=0.0001"} <= set(overrides(text))


def test_rewards_with_constants_move(folder: Path, grpocli: Command) -> None:
    code, text, _ = grpocli("from-trl", "plain.py", "--rewards", "own.py")
    assert code == 0
    rewards = next(one for one in overrides(text) if one.startswith("reward="))
    for place in rewards.removeprefix("reward=[").removesuffix("]").split(","):
        assert load(f"{folder}/{place}", "reward")(completions=["abc", "abcd"]) == [1.0, 0.0]


def test_the_end_of_a_script_is_named(folder: Path, grpocli: Command) -> None:
    _, text, _ = grpocli("from-trl", "plain.py")
    assert "resume_from_checkpoint=True: resume=RUN continues" in text
    assert "save_model=out/final: the final model is RUN/model" in text


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
    assert list(run.reward)[1] == "within"
    assert run.train.steps == 2


def test_a_config_of_trl_parser_is_read(folder: Path, grpocli: Command) -> None:
    words = ["--rewards", "own.py", "--", "--config", "dapo.yaml", "--max_steps", "80", "--use_peft"]
    code, text, _ = grpocli("from-trl", "filled.py", *words)
    assert code == 0
    wanted = {"model.path=a/b", "model.attention=eager", "task.path=c/d", "task.split=train"}
    wanted |= {"optim.lr=3e-06", "train.minibatches=4", "train.steps=20", "model.lora.rank=16"}
    assert wanted <= set(overrides(text))
    assert "# check: own.py lacks what could not be moved: own is a parameter of main" in text
    assert "# nothing to set: column=problem" in text
    assert "in no table" not in text


def test_a_missing_config_is_an_error(folder: Path, grpocli: Command) -> None:
    code, _, err = grpocli("from-trl", "filled.py", "--", "--config", "nowhere.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert "nowhere.yaml" in err
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


def test_defaults_for_settings_that_are_not_read_say_so(folder: Path, grpocli: Command) -> None:
    (folder / "plain.py").write_text("GRPOTrainer('a/b', f, GRPOConfig(learning_rate=made()), load_dataset('c/d'))\n")
    _, text, _ = grpocli("from-trl", "plain.py")
    line = next(line for line in text.splitlines() if "optim.lr=" in line)
    assert line.endswith("# TRL's default, since learning_rate is not read")


def test_arguments_that_only_trl_passes_are_named(folder: Path, grpocli: Command) -> None:
    (folder / "plain.py").write_text(
        "def f(completions, trainer_state=None, **kw): return [0.0]\n"
        "GRPOTrainer('a/b', f, GRPOConfig(max_prompt_length=99), load_dataset('c/d'))\n"
    )
    _, text, _ = grpocli("from-trl", "plain.py")
    assert "# check: f reads trainer_state, which is not given here" in text
    assert {"rollout.max_prompt_tokens=99", "rollout.long_prompts=truncate"} <= set(overrides(text))


def test_rewards_of_a_registry_are_named_and_left_to_the_reader(folder: Path, grpocli: Command) -> None:
    (folder / "plain.py").write_text(
        "@dataclass\nclass Own:\n    reward_funcs: list[str] = field(default_factory=lambda: ['one', 'two'])\n"
        "def first(completions, **kw): return [1.0]\ndef second(completions, **kw): return [2.0]\n"
        "REWARDS = {'one': first, 'two': second}\n"
        "own, settings = HfArgumentParser((Own, GRPOConfig)).parse_args_into_dataclasses()\n"
        "GRPOTrainer('a/b', [REWARDS[name] for name in own.reward_funcs], settings, load_dataset('c/d'))\n"
    )
    (folder / "one.yaml").write_text("beta: 0.1\n")
    _, text, _ = grpocli("from-trl", "plain.py")
    assert "reward=???" in overrides(text)
    assert "# check: reward_funcs=[REWARDS[name] for name in own.reward_funcs]" in text
    _, text, _ = grpocli("from-trl", "plain.py", "--", "one.yaml")
    assert "algorithm.kl.beta=0.1" in overrides(text)
