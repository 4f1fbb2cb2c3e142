"""Keys of TRL, transformers, NeMo RL and verl raise an error with the equivalent key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpocli.composition.compose import compose
from grpocli_tools.porting.foreign_names import CHOICES, KEYS

VALUES = {"model": "tiny", "algorithm": "dapo", "engine": "vllm", "tracker": "wandb", "rollout.stop": "[a]"}
VALUES |= {"algorithm/correction": "token_mask", "optim.betas": "[0.9,0.99]"}
NEEDS = {
    "model.chat_template": "model=hf",
    "model.revision": "model=hf",
    "model.trust_remote_code": "model=hf",
    "task.": "task=jsonl",
}


def test_every_override_of_the_tables_composes() -> None:
    rows = [*KEYS.values(), *(one for choices in CHOICES.values() for one in choices.values())]
    composed: dict[tuple[str, ...], DictConfig] = {}
    for advised in sorted({example for here in rows for example in here.examples()}):
        overrides = [one.format(VALUES.get(one.partition("=")[0], "1")) for one in advised.split()]
        read = OverridesParser.create().parse_overrides(overrides)
        groups = [text for text, one in zip(overrides, read, strict=True) if "." not in one.key_or_group]
        if not any(text.startswith(("model=", "task=")) for text in groups):
            groups += [group for key, group in NEEDS.items() if any(text.startswith(key) for text in overrides)]
        if tuple(groups) not in composed:
            composed[tuple(groups)] = compose(groups)
        config = composed[tuple(groups)].copy()
        for one in read:
            if "." in one.key_or_group and not one.is_hydra_override():
                OmegaConf.update(config, one.key_or_group, one.value())  # raises if the key does not exist


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["learning_rate=1e-6"], "there is no key learning_rate; write optim.lr=1e-6"),
        (["rollout.num_generations=8"], "there is no key rollout.num_generations; write rollout.group_size=8"),
        (["log_completions=true"], "nothing to set: every completion is in RUN/rollouts, and `grpocli rollouts RUN`"),
        (["fp16=true"], "write model.dtype=float16"),
        (["actor_rollout_ref.rollout.dtype=half"], "write model.dtype=float16; one dtype"),
        (["policy.precision=float16"], "write model.dtype=float16"),
        (["scale_rewards=false"], "write algorithm/advantage=center"),
        (["algorithm=GSPO"], "algorithm=GSPO: write algorithm=gspo"),
        (["algorithm=ppo"], "write algorithm=grpo; there is no value model"),
        (["algorithm=dpo"], "it learns from pairs of a better and a worse answer"),
        (["output_dir=my runs/a"], "write 'hydra.run.dir=my runs/a'"),
        (["--learning-rate=1e-6"], "there is no option --learning-rate: write optim.lr=1e-6"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "there is no option --model: write model=Qwen/Qwen2.5-0.5B"),
        (["--reward", "math"], "write reward=[math]"),
        (["--train.steps=5"], "write train.steps=5"),
        (["actor_rollout_ref.rollout.n=8", "learning_rate=1e-6"], "write rollout.group_size=8"),
        (["--learning_rate", "1e-6", "--max_steps=5"], "write optim.lr=1e-6; there is no option --max_steps: write tr"),
        (["--config-dri", "x"], 'did you mean "--config-dir"?'),
        (["--xyzzy"], "settings are KEY=VALUE without dashes"),
        (["model=gpt2"], "or model=hf model.path=gpt2 for a folder or a name on the hub"),
        (["model=qwen2.5-1.5"], 'did you mean "qwen2.5-1.5b"?'),
        (["task=sums.jsonl"], "task=jsonl task.path=sums.jsonl for a file"),
        (["task=openai/gsm8k"], "task=hub task.path=openai/gsm8k for data on the hub"),
    ],
)
def test_a_foreign_key_raises_the_equivalent(
    argv: list[str], said: str, grpocli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = grpocli("train", *argv)
    assert code == 2
    assert err.startswith("grpocli: error: ")
    assert said in err


def test_tools_give_the_same_advice(grpocli: Callable[..., tuple[int, str, str]]) -> None:
    for argv in (["learning_rate=1e-6"], ["--max_steps=5"]):
        assert grpocli("plan", *argv) == grpocli("train", *argv)
