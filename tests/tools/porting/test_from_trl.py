"""`grpocli from-trl`: scripts and configs of TRL become overrides that compose; broken files are one sentence."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli_tools.porting.from_trl_command import ported, shell_script
from grpocli_tools.porting.translation import Port

Command = Callable[..., tuple[int, str, str]]
SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this script must never run")
G = 8
def prompt(x): return {"prompt": x["question"]}
def correct(completions, answer, **kw): return [1.0 for c in completions]
data = load_dataset("openai/gsm8k", "main", split="train").map(prompt)
args = GRPOConfig("out", learning_rate=LR(), num_generations=G, per_device_train_batch_size=4,
                  gradient_accumulation_steps=8, steps_per_generation=16, num_iterations=2, max_steps=100, SETTINGS)
GRPOTrainer(model="a/b", reward_funcs=[correct], args=args, train_dataset=data).train()
"""
VARIANTS = [
    "beta=0.04",
    "loss_type='dr_grpo', scale_rewards=False",
    "loss_type='bnpo'",
    "loss_type='luspo', importance_sampling_level='sequence'",
    "loss_type='cispo', epsilon_high=5.0",
    "loss_type='sapo', beta=0.001",
    "loss_type='vespo'",
    "epsilon_high=0.28, delta=1.5, off_policy_mask_threshold=0.5, top_entropy_quantile=0.2, entropy_coef=0.01",
    "use_vllm=True, vllm_gpu_memory_utilization=0.4",
    "use_vllm=True, vllm_mode='server', vllm_importance_sampling_mode='token_mask'",
    "max_completion_length=16384, warmup_ratio=0.1, lr_scheduler_type='cosine', bf16=True",
]


def overrides(text: str) -> list[str]:
    """The overrides of a printed script, as the shell reads them."""
    return shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_scripts_overrides_compose_and_build(settings: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("SETTINGS", settings))
    chosen = [one for one in overrides(shell_script(ported(file)[0])) if not one.startswith("hydra.")]
    reward = next(one for one in chosen if one.startswith("reward="))
    assert reward == "reward=[train_rewards.py:correct]"
    chosen[chosen.index(reward)] = "reward=[math]"
    run = build_run(compose(chosen))
    assert (run.rollout.prompts_per_step, run.rollout.group_size) == (8, 8)
    assert (run.train.minibatches, run.train.epochs, run.train.steps) == (2, 2, 25)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [("bf16=True", "bfloat16"), ("fp16=True", "float16"), ("model_init_kwargs={'dtype': 'float16'}", "float16")],
)
def test_sixteen_bits_keep_their_kind(settings: str, dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("SETTINGS", settings))
    assert f"model.dtype={dtype}" in overrides(shell_script(ported(file)[0]))


def test_what_is_no_literal_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("SETTINGS", "optim='paged_adamw_8bit'"))
    text = shell_script(ported(file, 2)[0])
    assert "# check: learning_rate=LR() (line 9): it is not a literal; set optim.lr=VALUE yourself" in text
    assert "# check: train_rewards.py is not written: --rewards train_rewards.py moves the functions" in text
    assert "no counterpart: optim=paged_adamw_8bit" in text
    assert "rollout.prompts_per_step=16" in text


def test_a_yaml_is_translated(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [accuracy_reward]\nlearning_rate: 1e-5\n"
        "use_peft: true\nnum_train_epochs: 2\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}\n"
    )
    chosen = overrides(shell_script(ported(file, 1, 100)[0]))
    run = build_run(compose(chosen))
    assert run.optim.lr == 1e-5
    assert run.optim.schedule_arguments == {"min_lr": 1e-7}
    assert run.train.steps == 200
    assert run.model.lora.rank == 16
    assert run.task.answer_column == "solution"


def test_a_recipe_composes(tmp_path: Path, grpocli: Command) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\nbeta: 0.1\n")
    out = tmp_path / "recipe" / "mine.yaml"
    code, text, _ = grpocli("from-trl", str(file), "--out", str(out))
    assert code == 0
    assert f"# grpocli train --config-dir {tmp_path} recipe=mine" in text
    config = compose([f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine"])
    assert build_run(config).algorithm.kl.beta == 0.1
    assert config.algorithm == compose(overrides(text)).algorithm
    code, _, err = grpocli("from-trl", str(file), "--out", str(tmp_path / "mine.yaml"))
    assert code == 2
    assert "write --out recipe/mine.yaml" in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", b"x = (\n", "line 1: "),
        ("a.py", b"x = 1\n", "has no GRPOConfig(...) and no GRPOTrainer(...)"),
        ("a.py", b"\xff\xfe", "is not UTF-8"),
        ("a.yaml", b"- 1\n", "has a list, not a mapping"),
        ("a.py", b"x = " + b"+".join([b"1"] * 30_000), "nested too deep, or has too many terms"),
        ("a.yaml", b"a: 1\n", "has no key of TRL"),
    ],
)
def test_a_hostile_file_is_one_sentence(name: str, content: bytes, said: str, tmp_path: Path, grpocli: Command) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = grpocli("from-trl", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_folder_is_named_as_such(tmp_path: Path, grpocli: Command) -> None:
    assert f"{tmp_path}: is a folder; give a file in it" in grpocli("from-trl", str(tmp_path))[2]


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("max_steps: many", "max_steps=many: it is not a number; TRL's default, -1, is used"),
        ("grpo: {num_prompts_per_step: .nan}", "grpo.num_prompts_per_step=nan: it is not a number; 32 of"),
    ],
)
def test_a_number_that_trains_nothing_is_a_remark_and_the_default(setting: str, check: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{setting}\n")
    text = shell_script(ported(tmp_path / "a.yaml")[0])
    assert f"# check: {check}" in text
    assert "nan" not in "".join(overrides(text))


def test_durations_that_are_no_literals_are_not_said_to_be_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from trl import GRPOConfig\nGRPOConfig(max_steps=N, num_train_epochs=E)\n")
    text = shell_script(ported(tmp_path / "a.py")[0])
    assert "# check: max_steps=N (line 2): it is not a literal; set train.steps=VALUE yourself" in text
    assert "# check: num_train_epochs=E (line 2): it is not a literal; train.steps is its value x prompts" in text
    assert "max_steps=-1" not in text


def test_words_of_a_note_are_not_settings() -> None:
    port = Port()
    port.set("optim.lr", 1e-5, "learning_rate", note="of seed and beta")
    assert (port.named, port.lines[0].comment) == ({"learning_rate"}, "learning_rate: of seed and beta")
