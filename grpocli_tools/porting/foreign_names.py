"""The equivalents of keys and choices of TRL, NeMo RL, verl and transformers: the hook `foreign_names`.

Errors of the command line, `grpocli explain KEY`, `grpocli from-trl` and docs/from-trl.md read the tables beside this
file. Tests compose every override, and compare fields and defaults of TRL with an installed TRL.
"""

from __future__ import annotations

import difflib

from grpocli_tools.porting.equivalent import ALGORITHMS, UNSTATED, Equivalent, missing
from grpocli_tools.porting.nemo_rl_names import NEMO_RL
from grpocli_tools.porting.trl_names import ALIASES, TRL
from grpocli_tools.porting.verl_names import VERL

NO_CRITIC = Equivalent(
    "algorithm=grpo", "there is no value model: the group is the baseline, under PPO's clipped objective"
)
PREFERENCES = missing(
    UNSTATED, "it learns from pairs of a better and a worse answer; grpocli trains from rewards, or by sft"
)
TRAINERS = {"TRL": TRL, "NeMo RL": NEMO_RL, "verl": VERL}
SHARED_NAMES = ("seed", "optim", "model")
"""Foreign names that are also keys or config groups of grpocli."""
KEYS = {name: equivalent for name, equivalent in (ALIASES | TRL | NEMO_RL | VERL).items() if name not in SHARED_NAMES}

CHOICES = {
    **{("algorithm", name): Equivalent(overrides) for name, overrides in ALGORITHMS.items()},
    ("algorithm", "ppo"): NO_CRITIC,
    ("algorithm", "gae"): NO_CRITIC,
    **{("algorithm", name): PREFERENCES for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
    ("algorithm", "reinforce"): Equivalent(ALGORITHMS["rloo"], "REINFORCE with the rest of the group as the baseline"),
    ("algorithm", "reinforce++"): Equivalent(ALGORITHMS["reinforce_plus_plus"]),
    ("engine", "hf"): Equivalent("engine=transformers"),
    ("engine", "huggingface"): Equivalent("engine=transformers"),
    ("engine", "sglang"): Equivalent("engine=vllm"),
    ("hardware", "cpu"): Equivalent("hardware.device=cpu"),
    ("hardware", "cuda"): Equivalent("hardware.device=cuda"),
    ("hardware", "gpu"): Equivalent("hardware.device=cuda"),
    ("optim", "adam"): Equivalent("optim=adamw"),
    ("optim", "adamw_torch"): Equivalent("optim=adamw"),
    ("optim", "adamw_torch_fused"): Equivalent("optim=adamw"),
    ("optim", "adamw_bnb_8bit"): Equivalent("optim=adamw_8bit"),
    ("optim", "adam8bit"): Equivalent("optim=adamw_8bit"),
    ("optim", "paged_adamw_8bit"): Equivalent("optim=adamw_8bit", "its state stays in the device's memory"),
    ("reward", "accuracy"): Equivalent("reward=[math]"),
    ("reward", "accuracy_reward"): Equivalent("reward=[math]"),
    ("reward", "think_format_reward"): Equivalent("reward=[format]"),
    ("reward", "soft_overlong_punishment"): Equivalent("reward=[math,overlong]"),
}


def key_advice(key: str, value: str) -> str | None:
    """The advice for a key of another trainer; None for an unknown key."""
    here = KEYS.get(key)
    return here.sentence(value) if here else None


def advice_of_like(name: str, value: str) -> str | None:
    """The advice for the key of another trainer that is written almost as `name`; None if there is none."""
    close = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.85)
    return key_advice(close[0], value) if close else None


def choice_advice(group: str, choice: str) -> str | None:
    """The advice for a choice of another trainer; None for an unknown choice."""
    here = CHOICES.get((group, choice.lower().replace("-", "_")))
    return here.sentence(choice) if here else None
