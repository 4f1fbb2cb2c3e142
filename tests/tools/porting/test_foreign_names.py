"""Keys of TRL, transformers, NeMo RL and verl raise an error with the equivalent key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from porting.printed import assert_composes

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
