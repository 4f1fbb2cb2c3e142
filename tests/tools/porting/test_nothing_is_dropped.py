"""Every setting of a file is an override or is named with a reason, and the overrides compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from grpocli.composition.compose import compose
from grpocli_tools.porting.equivalent import UNSTATED
from grpocli_tools.porting.from_trl_command import ported, shell_script
from grpocli_tools.porting.nemo_rl_names import NEMO_RL
from grpocli_tools.porting.trl_names import LORA_CONFIG, TRAINER, TRL

SAMPLES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "dataset_name": "a/b",
    "eval_strategy": "steps",
    "generation_kwargs": {"stop": ["END"], "num_beams": 2},
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "lr_scheduler_type": "polynomial",
    "model_init_kwargs": {"attn_implementation": "eager", "device_map": "auto", "variant": "fp16"},
    "model_name_or_path": "c/d",
    "multi_objective_aggregation": "normalize_then_sum",
    "optim": "paged_adamw_8bit",
    "output_dir": "out",
    "report_to": ["wandb", "tensorboard"],
    "reward_funcs": ["accuracy_reward"],
    "reward_model_name_or_path": "e/f",
    "reward_weights": [2.0],
    "run_name": "mine",
    "save_strategy": "epoch",
    "scale_rewards": "batch",
    "target_modules": ["q_proj"],
    "lora_target_modules": ["q_proj"],
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_mode": "server",
    "vllm_server_base_url": "http://127.0.0.1:8000",
}
SETTINGS = [
    name for name in TRL if name not in ("reward_funcs", "model_name_or_path", "dataset_name", "reward_weights")
]
WITHOUT_EFFECT = {"use_vllm": True, "beta": 0.1, "eval_strategy": "steps", "sync_ref_model": True, "use_peft": True}
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
        return default + 1 if name not in ("top_entropy_quantile", "top_p", "adam_beta1", "adam_beta2") else 0.5
    return 3 if default is None else "x"


def script(tmp_path: Path, **arguments: Mapping[str, Any] | str) -> str:
    """What from-trl prints for a script with the arguments, in the places of SCRIPT."""
    text = SCRIPT
    for place in ("SETTINGS", "LORA", "LOADED", "TRAINER"):
        given = arguments.get(place, {})
        text = text.replace(
            place, given if isinstance(given, str) else ", ".join(f"{k}={v!r}" for k, v in given.items())
        )
    file = tmp_path / "train.py"
    file.write_text(text)
    return shell_script(ported(file, prompts=100)[0])


def names(text: str, name: str) -> bool:
    """Whether a comment of the printed script has a name."""
    comments = "\n".join(line.partition("#")[2] for line in text.splitlines())
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", comments) is not None


def composes(text: str) -> None:
    chosen = shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)
    compose(chosen)


def test_every_setting_of_trl_is_in_the_output(tmp_path: Path) -> None:
    for others in ({}, WITHOUT_EFFECT):
        for name in SETTINGS:
            text = script(tmp_path, SETTINGS={**others, name: sample(name, TRL[name].default)})
            assert names(text, name), name
            if TRL[name].default is not UNSTATED:
                assert names(script(tmp_path, SETTINGS={**others, name: TRL[name].default}), name), name


@pytest.mark.parametrize("name", table(SETTINGS, fast=10, other_tier=pytest.mark.survival))
@pytest.mark.parametrize("others", [{}, WITHOUT_EFFECT], ids=["alone", "with vLLM, KL, LoRA"])
def test_every_setting_of_trl_composes(name: str, others: dict[str, Any], tmp_path: Path) -> None:
    composes(script(tmp_path, SETTINGS={**others, name: sample(name, TRL[name].default)}))


def test_every_argument_of_the_trainer_lora_and_the_dataset_is_in_the_output(tmp_path: Path) -> None:
    text = script(tmp_path, LORA={name: sample(name, one.default) for name, one in LORA_CONFIG.items()})
    assert [name for name in LORA_CONFIG if not names(text, name)] == []
    others = [name for name in TRAINER if name not in ("model", "args", "train_dataset", "peft_config")]
    text = script(tmp_path, TRAINER=", ".join(f"{name}=made()" for name in others))
    assert [name for name in others if not names(text, name)] == []
    loaded = {"name": "main", "split": "train", "streaming": True, "revision": "v1", "token": "T", "data_dir": "x"}
    text = script(tmp_path, LOADED=loaded)
    for name in ("streaming", "load_dataset(revision)", "load_dataset(token)", "load_dataset(data_dir)"):
        assert name in text
    assert "task.name=main" in text
    composes(text)


def test_unknown_names_are_listed(tmp_path: Path) -> None:
    text = script(tmp_path, SETTINGS={"use_magic": 3}, LORA={"init": "x"}, TRAINER={"wand": 1})
    for name in ("use_magic", "init", "wand"):
        assert f"# check: {name}=" in text


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return found


@pytest.mark.parametrize("changed", [False, True])
def test_every_key_of_nemo_rl_is_in_the_output(changed: bool, tmp_path: Path) -> None:
    known = {"policy.generation.backend": "vllm", "policy.precision": "float32", "data.train_data_path": "a.jsonl"}
    special = {"policy.scheduler": [{"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 9}}]}
    values = {name: {} if one.default is UNSTATED else one.default for name, one in NEMO_RL.items()}
    if changed:
        values = {
            name: sample("", value) if isinstance(value, bool | int | float) else value
            for name, value in values.items()
        }
        values |= known
    values |= special
    values |= {"data.train_split": "train", "data.val_split": "test", "data.input_key": "q", "data.output_key": "a"}
    values |= {
        name: 2 for name in ("loss_fn.truncated_importance_sampling_ratio", "grpo.dynamic_sampling_max_gen_batches")
    }
    values |= {name: changed for name in ("grpo.use_dynamic_sampling", "grpo.reward_shaping.enabled")}
    values |= {"data.val_data_path": "b.jsonl", "env.game.rounds": 3, "policy.generation.vllm_kwargs": {"seed": 3}}
    values["data.train_data_path"] = "a.jsonl"
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump(nested(values)))
    text = shell_script(ported(file, prompts=1000)[0])
    assert [name for name in values if not names(text, name) and not names(text, f"{name}.seed")] == []
    composes(text)
