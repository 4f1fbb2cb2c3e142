"""Settings of TRL, transformers, NeMo RL and verl: each is an override or is named, and a foreign key is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from porting.printed import assert_composes, checks, overrides, printed

from grpocli.composition.compose import compose
from grpocli_tools.porting.foreign_names import CHOICES, KEYS, LORA_CONFIG, TRAINER, TRL, UNSTATED

SAMPLES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "eval_strategy": "steps",
    "generation_kwargs": {"stop": ["END"], "num_beams": 2},
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "lr_scheduler_type": "polynomial",
    "model_init_kwargs": {"attn_implementation": "eager", "device_map": "auto", "variant": "fp16"},
    "multi_objective_aggregation": "normalize_then_sum",
    "optim": "paged_adamw_8bit",
    "output_dir": "out",
    "report_to": ["wandb", "tensorboard"],
    "reward_model_name_or_path": "e/f",
    "save_strategy": "epoch",
    "scale_rewards": "batch",
    "target_modules": ["q_proj"],
    "lora_target_modules": ["q_proj"],
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_mode": "server",
    "vllm_server_base_url": "http://127.0.0.1:8000",
}
FRACTIONS = ("top_entropy_quantile", "top_p", "adam_beta1", "adam_beta2")
ELSEWHERE = ("reward_funcs", "model_name_or_path", "dataset_name", "reward_weights")
OTHERS: list[dict[str, Any]] = [
    {},
    {"use_vllm": True, "beta": 0.1, "eval_strategy": "steps", "sync_ref_model": True, "use_peft": True},
]
SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
GRPOTrainer(model="a/b", reward_funcs=accuracy_reward, train_dataset=load_dataset("c/d", LOADED),
            args=GRPOConfig(SETTINGS), peft_config=LoraConfig(LORA), TRAINER)
"""


def sample(name: str, default: Any) -> Any:
    """A value that is not the default."""
    if name in SAMPLES:
        return SAMPLES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return 0.5 if name in FRACTIONS else default + 1
    return 3 if default is None else "x"


def script(tmp_path: Path, **arguments: Mapping[str, Any] | str) -> str:
    """What from-trl prints for a script with the arguments, in the places of SCRIPT."""
    text = SCRIPT
    for place in ("SETTINGS", "LORA", "LOADED", "TRAINER"):
        given = arguments.get(place, {})
        words = given if isinstance(given, str) else ", ".join(f"{name}={value!r}" for name, value in given.items())
        text = text.replace(place, words)
    return printed(tmp_path / "train.py", text, prompts=100)


def unnamed(text: str, names: Any) -> list[str]:
    """The names that no comment of the printed script has."""
    comments = "\n".join(line.partition("#")[2] for line in text.splitlines())
    return [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", comments)]


@pytest.mark.parametrize("others", OTHERS, ids=["alone", "with vLLM, KL, LoRA"])
def test_every_setting_of_trl_is_in_the_output_and_composes(others: dict[str, Any], tmp_path: Path) -> None:
    for name in TRL.keys() - ELSEWHERE:
        values = [sample(name, TRL[name].default), TRL[name].default]
        for value in values if TRL[name].default is not UNSTATED else values[:1]:
            text = script(tmp_path, SETTINGS={**others, name: value})
            assert not unnamed(text, [name])
            assert_composes(overrides(text))


def test_every_argument_of_the_trainer_lora_and_the_dataset_is_in_the_output(tmp_path: Path) -> None:
    text = script(tmp_path, LORA={name: sample(name, one.default) for name, one in LORA_CONFIG.items()})
    assert not unnamed(text, LORA_CONFIG)
    others = [name for name in TRAINER if name not in ("model", "args", "train_dataset", "peft_config")]
    assert not unnamed(script(tmp_path, TRAINER=", ".join(f"{name}=made()" for name in others)), others)
    text = script(tmp_path, LOADED={"name": "main", "streaming": True, "revision": "v1", "token": "T", "data_dir": "x"})
    assert all(name in text for name in ("streaming", "load_dataset(revision)", "load_dataset(token)"))
    assert "task.name=main" in overrides(text)
    compose(overrides(text))


def test_unknown_names_are_listed(tmp_path: Path) -> None:
    text = script(tmp_path, SETTINGS={"use_magic": 3}, LORA={"init": "x"}, TRAINER={"wand": 1})
    assert {one.partition("=")[0] for one in checks(text)} >= {"use_magic", "init", "wand"}


VALUES = {"model": "tiny", "algorithm": "dapo", "engine": "vllm", "tracker": "wandb", "rollout.stop": "[a]"}
VALUES |= {"algorithm/correction": "token_mask", "optim.betas": "[0.9,0.99]"}
NEEDS = dict.fromkeys(("model.chat_template", "model.revision", "model.trust_remote_code"), "model=hf")
NEEDS |= {"task.": "task=jsonl"}


def test_every_override_of_the_tables_composes() -> None:
    rows = [*KEYS.values(), *(one for choices in CHOICES.values() for one in choices.values())]
    for advised in sorted({example for here in rows for example in here.examples()}):
        assert_composes([one.format(VALUES.get(one.partition("=")[0], "1")) for one in advised.split()], NEEDS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["learning_rate=1e-6"], "there is no key learning_rate; write optim.lr=1e-6"),
        (["rollout.num_generations=8"], "there is no key rollout.num_generations; write rollout.group_size=8"),
        (["log_completions=true"], "nothing to set: every completion is in RUN/rollouts, and `grpocli rollouts RUN`"),
        (["fp16=true"], "write model.dtype=float16"),
        (["scale_rewards=false"], "write algorithm/advantage=center"),
        (["algorithm=GSPO"], "algorithm=GSPO: write algorithm=gspo"),
        (["algorithm=ppo"], "write algorithm=grpo; there is no value model"),
        (["algorithm=dpo"], "it learns from pairs of a better and a worse answer"),
        (["output_dir=my runs/a"], "write 'hydra.run.dir=my runs/a'"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "there is no option --model: write model=Qwen/Qwen2.5-0.5B"),
        (["--learning_rate", "1e-6", "--max_steps=5"], "write optim.lr=1e-6; there is no option --max_steps: write tr"),
        (["--config-dri", "x"], 'did you mean "--config-dir"?'),
        (["--xyzzy"], "settings are KEY=VALUE without dashes"),
        (["model=gpt2"], "or model=hf model.path=gpt2 for a folder or a name on the hub"),
        (["task=sums.jsonl"], "task=jsonl task.path=sums.jsonl for a file"),
    ],
)
def test_a_foreign_key_raises_the_equivalent(argv: list[str], said: str, grpocli) -> None:
    code, _, err = grpocli("train", *argv)
    assert (code, err.startswith("grpocli: error: "), said in err) == (2, True, True), err


def test_tools_give_the_same_advice(grpocli) -> None:
    for argv in (["learning_rate=1e-6"], ["--max_steps=5"]):
        assert grpocli("plan", *argv) == grpocli("train", *argv)
