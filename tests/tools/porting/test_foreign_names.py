"""Keys of TRL, transformers and verl raise an error with the equivalent key."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from tables import table

from grpocli.composition.compose import compose
from grpocli_tools.porting.foreign_names import CHOICES, KEYS

VALUES = {"model": "tiny", "algorithm": "dapo", "engine": "vllm", "tracker": "wandb", "rollout.stop": "[a]"}
VALUES |= {"algorithm/correction": "token_mask", "optim.betas": "[0.9,0.99]"}
ADVISED = sorted({example for here in [*KEYS.values(), *CHOICES.values()] for example in here.examples()})


@cache
def composed(groups: tuple[str, ...]) -> DictConfig:
    return compose(list(groups))


@pytest.mark.parametrize("advised", table(ADVISED, fast=15))
def test_every_override_in_the_table_composes(advised: str) -> None:
    overrides = [one.format(VALUES.get(one.partition("=")[0], "1")) for one in advised.split()]
    read = OverridesParser.create().parse_overrides(overrides)
    needs = {"model.chat_template": "model=hf", "model.revision": "model=hf", "model.trust_remote_code": "model=hf"}
    needs |= {"task.": "task=jsonl"}
    groups = [text for text, one in zip(overrides, read, strict=True) if "." not in one.key_or_group]
    if not any(text.startswith(("model=", "task=")) for text in groups):
        groups += [group for key, group in needs.items() if any(text.startswith(key) for text in overrides)]
    config = composed(tuple(groups)).copy()
    for one in read:
        if "." in one.key_or_group and not one.is_hydra_override():
            OmegaConf.update(config, one.key_or_group, one.value())  # raises if the key does not exist


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["learning_rate=1e-6"], "there is no key learning_rate; write optim.lr=1e-6"),
        (["+beta=0.1"], "there is no key beta; write algorithm.kl.beta=0.1"),
        (["rollout.num_generations=8"], "there is no key rollout.num_generations; write rollout.group_size=8"),
        (["log_completions=true"], "nothing to set: every completion is in RUN/rollouts, and `grpocli rollouts RUN`"),
        (["bf16=true"], "write model.dtype=bfloat16"),
        (["fp16=true"], "write model.dtype=float16"),
        (["actor_rollout_ref.actor.dtype=float16"], "write model.dtype=float16; one dtype for the trainer, its refer"),
        (["actor_rollout_ref.rollout.dtype=half"], "write model.dtype=float16; one dtype"),
        (["policy.precision=float16"], "write model.dtype=float16"),
        (["scale_rewards=false"], "write algorithm/advantage=center"),
        (["gradient_accumulation_steps=4"], "nothing to set: train.micro_batch_tokens bounds the memory"),
        (["actor_rollout_ref.rollout.n=8"], "write rollout.group_size=8"),
        (["algorithm.adv_estimator=rloo"], "write algorithm=rloo"),
        (["algorithm=GSPO"], "algorithm=GSPO: write algorithm=gspo"),
        (["algorithm=ppo"], "write algorithm=grpo; there is no value model"),
        (["algorithm=dpo"], "it learns from pairs of a better and a worse answer"),
        (["output_dir=my runs/a"], "write 'hydra.run.dir=my runs/a'"),
        (["--learning_rate", "1e-6"], "there is no option --learning_rate: write optim.lr=1e-6"),
        (["--learning-rate=1e-6"], "there is no option --learning-rate: write optim.lr=1e-6"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "there is no option --model: write model=Qwen/Qwen2.5-0.5B"),
        (["--reward", "math"], "write reward=[math]"),
        (["--train.steps=5"], "write train.steps=5"),
        (
            ["learning_rate=1e-6", "seed=1", "+beta=0.1", "actor_rollout_ref.rollout.n=8"],
            "there are no keys learning_rate (write optim.lr=1e-6), beta (write algorithm.kl.beta=0.1; algorithm=dapo",
        ),
        (["+bf16=true", "actor_rollout_ref.rollout.n=8"], ", actor_rollout_ref.rollout.n (write rollout.group_size=8)"),
        (["--learning_rate", "1e-6", "--max_steps=5"], "write optim.lr=1e-6; there is no option --max_steps: write tr"),
        (["--config-dri", "x"], "did you mean --config-dir?"),
        (["--nonsense"], "settings are KEY=VALUE without dashes"),
        (["model=gpt2"], "or model=hf model.path=gpt2 for a folder or a name on the hub"),
        (["model=qwen2.5-1.5"], 'did you mean "qwen2.5-1.5b"?'),
        (["task=sums.jsonl"], "task=sums.jsonl: write task=jsonl task.path=sums.jsonl"),
        (["task=openai/gsm8k"], "task=hub task.path=openai/gsm8k for data on the hub"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_foreign_key_raises_the_equivalent(
    command: str, argv: list[str], said: str, grpocli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = grpocli(command, *argv)
    assert code == 2
    assert err.startswith("grpocli: error: ")
    assert said in err
