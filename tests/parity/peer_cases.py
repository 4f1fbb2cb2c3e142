"""Definitions of other trainers that grpocli can express, as their settings and as grpocli's overrides.

docs/evidence/peers.md lists them, so this file imports no trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One definition, as the `settings` of a peer and as grpocli's `overrides`.

    rows: `updated` (policy, old policy and sampler differ), `first` (the first update of a step: old policy = policy),
    `no gap` (sampler = old policy), `near` (no probability differs by more than 0.2) or `one empty` (the last
    completion has no token in the loss).
    guard: where the peer adds 1e-8 to a denominator, which is then done on our side, too: `rows` (to the tokens of a
    completion), `tokens` (to those of the update), `batch` (to both numbers of a mean over completions).
    limit: of the difference, where a guard cannot be done on our side.
    single: the peer computes in float32 whatever it is given.
    value: whether the values are equal, too; otherwise only the gradients.
    distilled: without advantages, which is algorithm/advantage=none.
    """

    peer: str
    name: str
    settings: dict[str, Any]
    overrides: tuple[str, ...]
    rows: str = "updated"
    guard: str = ""
    single: bool = False
    value: bool = True
    distilled: bool = False
    limit: float | None = None

    def __str__(self) -> str:
        return f"{self.peer}: {self.name}"


GRPO = ("algorithm=grpo", "algorithm/kl=none")
TOKENS = (*GRPO, "algorithm/aggregate=token_mean")
SUM = (*GRPO, "algorithm/aggregate=constant", "algorithm.aggregate.length=1")
LENGTH = 7  # of the longest row
HORIZON = (*GRPO, "algorithm/aggregate=constant", f"algorithm.aggregate.length={LENGTH}")
HIGH = ("algorithm.objective.high=0.28",)
DUAL = ("algorithm.objective.dual=1.3",)
SEQUENCE = ("algorithm.objective.level=sequence",)
SAPO = ("algorithm/objective=sapo", "algorithm.objective.tau_positive=1.5", "algorithm.objective.tau_negative=1.75")
CISPO = ("algorithm/objective=cispo", "algorithm.objective.high=0.28")
CISPO_LOW = (*CISPO, "algorithm.objective.low=0.2")
DPPO = ("algorithm/objective=dppo", "algorithm.objective.low=0.1", "algorithm.objective.high=0.05")
DPPO_KL = (*DPPO, "algorithm.objective.divergence=kl")
PLAIN = ("algorithm/objective=mirror", "algorithm.objective.tau=0")
MIRROR = ("algorithm/objective=mirror", "algorithm.objective.tau=0.3")
GEOMETRIC = ("algorithm/objective=geometric", "algorithm.objective.low=0.2", "algorithm.objective.high=0.28")
SAMPLER = ("algorithm/correction=sampler",)
DISTILLED = ("algorithm/advantage=none", "algorithm/kl=reverse")
ON_POLICY = ("algorithm.kl.on_policy=true",)


def kl(name: str) -> tuple[str, ...]:
    return (f"algorithm/kl={name}", "algorithm.kl.beta=0.04")


def correction(name: str, high: float, low: float = 0.0) -> tuple[str, ...]:
    bounds = (f"algorithm.correction.max={high}", *([f"algorithm.correction.min={low}"] if low else []))
    return (f"algorithm/correction={name}", *bounds)


def importance(weigh: str, high: float, drop: str, least: float, most: float) -> tuple[str, ...]:
    fields = {"weigh": weigh, "max": high, "drop": drop, "low": least, "high": most}
    return ("algorithm/correction=importance", *(f"algorithm.correction.{key}={v}" for key, v in fields.items()))


OWN = ("rows", "guard", "single", "value", "distilled", "limit")


def case(peer: str, name: str, overrides: tuple[str, ...], **given: Any) -> PeerCase:
    """given: fields of PeerCase; all others are the peer's settings."""
    settings = {key: value for key, value in given.items() if key not in OWN}
    return PeerCase(peer, name, settings, overrides, **{key: given[key] for key in OWN if key in given})


verl, slime, prime = (partial(case, peer) for peer in ("verl", "slime", "prime-rl"))
skyrl = partial(case, "SkyRL", single=True)


def nemo(name: str, overrides: tuple[str, ...], **given: Any) -> PeerCase:
    return case(
        "NeMo RL", name, overrides, **{"guard": "tokens" if given.get("token_level_loss", True) else "batch", **given}
    )


BY_COMPLETION = {"guard": "rows", "loss_agg_mode": "seq-mean-token-mean"}
CLIP_HIGH = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
VERL = [
    verl("vanilla", TOKENS),
    verl("vanilla, clip-higher", TOKENS + HIGH, **CLIP_HIGH),
    verl("vanilla, its default", (*TOKENS, "algorithm.objective.dual=3.0"), clip_ratio_c=3.0),
    verl("vanilla, clip_ratio_c", TOKENS + DUAL, clip_ratio_c=1.3),
    verl("vanilla, seq-mean-token-mean", GRPO, **BY_COMPLETION),
    verl(
        "vanilla, seq-mean-token-mean, a completion without tokens",
        GRPO,
        rows="one empty",
        **BY_COMPLETION,
    ),
    verl("vanilla, seq-mean-token-sum", SUM, loss_agg_mode="seq-mean-token-sum"),
    verl("vanilla, seq-mean-token-sum-norm", HORIZON, loss_agg_mode="seq-mean-token-sum-norm"),
    verl("gspo", GRPO + SEQUENCE + HIGH, loss_mode="gspo", **BY_COMPLETION, **CLIP_HIGH),
    verl("gspo, token-mean", TOKENS + SEQUENCE, loss_mode="gspo"),
    verl("sapo", GRPO + SAPO, guard="rows", loss_mode="sapo", tau_pos=1.5, tau_neg=1.75),
    verl("cispo, no lower bound", TOKENS + CISPO, loss_mode="cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
    verl("vanilla, kl", TOKENS + kl("k1"), kl_loss_type="kl"),
    verl("vanilla, mse", TOKENS + kl("k2"), kl_loss_type="mse"),
    verl("vanilla, low_var_kl", TOKENS + kl("k3"), kl_loss_type="low_var_kl"),
    verl(
        "vanilla, low_var_kl, seq-mean-token-mean",
        GRPO + kl("k3"),
        kl_loss_type="low_var_kl",
        **BY_COMPLETION,
    ),
    verl("vanilla, low_var_kl+", TOKENS + kl("k2"), value=False, kl_loss_type="low_var_kl+"),
    verl(
        "vanilla, rollout_is=token",
        TOKENS + correction("token_truncate", 1.3),
        **{"rollout_is": "token", "rollout_is_threshold": 1.3},
    ),
    verl(
        "vanilla, rollout_is=token, 0.7_1.3",
        TOKENS + correction("token_mask", 1.3, 0.7),
        **{"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"},
    ),
    verl(
        "cispo, rollout_is=token",
        TOKENS + CISPO + correction("token_truncate", 2.0),
        **{"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28, "rollout_is": "token"},
    ),
    verl("cispo", TOKENS + CISPO_LOW, loss_mode="cispo", **CLIP_HIGH),
    verl("gpg", TOKENS + PLAIN, loss_mode="gpg"),
    verl("dro", TOKENS + MIRROR, loss_mode="dro", dro_beta=0.3),
    verl("geo_mean", GRPO + GEOMETRIC, limit=1e-7, loss_mode="geo_mean", **CLIP_HIGH),  # as NeMo RL's sequence ratio
    verl("dppo_tv", TOKENS + DPPO, value=False, loss_mode="dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.05),
    verl("dppo_kl", TOKENS + DPPO_KL, value=False, loss_mode="dppo_kl", clip_ratio_low=0.1, clip_ratio_high=0.05),
    verl("vanilla, bypass_mode", TOKENS + SAMPLER, bypass_mode=True),
]


def corrected(kind: str, high: float, low: float | None = None) -> dict[str, Any]:
    """NeMo RL's settings of a correction."""
    name = "truncated_importance_sampling"
    least = {} if low is None else {f"{name}_ratio_min": low}
    return {"use_importance_sampling_correction": True, f"{name}_type": kind, f"{name}_ratio": high, **least}


BY_ROW = {"token_level_loss": False}
KL = {"reference_policy_kl_penalty": 0.04}
NEMO = [
    nemo("clip", TOKENS),
    nemo("clip-higher", TOKENS + HIGH, ratio_clip_max=0.28),
    nemo("clip, per sequence", GRPO, **BY_ROW),
    nemo("ratio_clip_c", TOKENS + DUAL, ratio_clip_c=1.3),
    nemo(
        "sequence_level_importance_ratios", GRPO + SEQUENCE, limit=1e-7, **BY_ROW, sequence_level_importance_ratios=True
    ),
    nemo("use_cispo, no lower bound", TOKENS + CISPO, use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.28),
    nemo("force_on_policy_ratio", TOKENS, rows="first", force_on_policy_ratio=True),
    *(
        nemo(f"{name}, first update", TOKENS + kl(name) + ON_POLICY, rows="first", **KL, reference_policy_kl_type=name)
        for name in ("k1", "k2", "k3")
    ),
    nemo("k3, per sequence, first update", GRPO + kl("k3") + ON_POLICY, rows="first", **KL, **BY_ROW),
    nemo(
        "k3, use_on_policy_kl_approximation",
        TOKENS + kl("k3") + ON_POLICY,
        rows="no gap",
        **KL,
        use_on_policy_kl_approximation=True,
    ),
    nemo(
        "tis",
        TOKENS + correction("token_truncate", 1.3),
        **corrected("tis", 1.3),
    ),
    nemo(
        "tis, from 0.7, per sequence",
        GRPO + correction("token_truncate", 1.3, 0.7),
        **BY_ROW,
        **corrected("tis", 1.3, 0.7),
    ),
    nemo(
        "icepop",
        TOKENS + correction("token_mask", 1.3, 0.7),
        **corrected("icepop", 1.3, 0.7),
    ),
    nemo("use_cispo", TOKENS + CISPO_LOW, use_cispo=True, ratio_clip_max=0.28),
    nemo("disable_ppo_ratio", TOKENS + PLAIN, disable_ppo_ratio=True),
    nemo(
        "seq-mask-tis", TOKENS + importance("token", inf, "sequence", 0.9, 1.2), **corrected("seq-mask-tis", 1.2, 0.9)
    ),
    nemo(
        "adv_estimator=opd, first update",
        TOKENS + DISTILLED,
        **{"rows": "first", "distilled": True, "value": False, "adv_estimator": "opd", "disable_ppo_ratio": True},
    ),
]

SLIME = [
    slime("grpo", GRPO),
    slime("grpo, calculate_per_token_loss", TOKENS, calculate_per_token_loss=True),
    slime("grpo, clip-higher", GRPO + HIGH, eps_clip_high=0.28),
    slime("grpo, eps_clip_c", GRPO + DUAL, eps_clip_c=1.3),
    slime("gspo", GRPO + SEQUENCE, advantage_estimator="gspo"),
    slime("cispo, no lower bound", GRPO + CISPO, advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.28),
    slime("grpo, use_tis", GRPO + correction("token_truncate", 1.3), use_tis=True, tis_clip=1.3),
    slime(
        "grpo, icepop",
        GRPO + correction("token_mask", 1.3, 0.7),
        **{"use_tis": True, "custom_tis_function_path": "icepop_function", "tis_clip": 1.3, "tis_clip_low": 0.7},
    ),
    *(
        slime(f"grpo, {name}", GRPO + kl(ours), single=True, use_kl_loss=True, kl_loss_type=name)
        for name, ours in {"k1": "k1", "k2": "k2", "low_var_kl": "k3"}.items()
    ),
    slime(
        "grpo, k3, use_unbiased_kl",
        GRPO + kl("k3") + ON_POLICY,
        **{"single": True, "use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True},
    ),
    slime("cispo", GRPO + CISPO_LOW, advantage_estimator="cispo", eps_clip_high=0.28),
    slime("grpo, use_opsm", (*GRPO, "algorithm.objective.drop_above=0.1"), use_opsm=True, opsm_delta=0.1),
    slime("grpo, use_rollout_logprobs", GRPO + SAMPLER, use_rollout_logprobs=True),
    slime(
        "grpo, use_opd, first update",
        (*GRPO, "algorithm/kl=reverse", "algorithm.kl.beta=0.5"),
        rows="first",
        use_opd=True,
        opd_kl_coef=0.5,
    ),
]

PRIME = [
    prime("default", ("algorithm=dppo",)),
    prime(
        "default, narrow",
        TOKENS + DPPO + SAMPLER + ("algorithm.objective.drift=0.02",),
        **{"dppo_mask_low": 0.1, "dppo_mask_high": 0.05, "kl_tau": 0.02},
    ),
    prime(
        "ref_kl (opd), within its trust region",
        TOKENS + DISTILLED + SAMPLER + ("algorithm/objective=dppo", "algorithm.objective.drift=0.001"),
        **{"rows": "near", "distilled": True, "loss": "ref_kl"},
    ),
]

SKYRL = [
    skyrl("regular", TOKENS),
    skyrl("regular, sequence_mean", GRPO, loss_reduction="sequence_mean"),
    skyrl("regular, seq_mean_token_sum_norm", HORIZON, loss_reduction="seq_mean_token_sum_norm"),
    skyrl("dual_clip", TOKENS + DUAL, policy_loss_type="dual_clip", clip_ratio_c=1.3),
    skyrl("gspo", GRPO + SEQUENCE, policy_loss_type="gspo", loss_reduction="sequence_mean"),
    skyrl(
        "sapo",
        GRPO + SAPO,
        policy_loss_type="sapo",
        loss_reduction="sequence_mean",
        sapo={"tau_pos": 1.5, "tau_neg": 1.75},
    ),
    skyrl(
        "cispo, no lower bound",
        TOKENS + CISPO,
        policy_loss_type="cispo",
        cispo={"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 0.28},
    ),
    skyrl(
        "regular, tis_ratio_type=token",
        TOKENS + correction("token_truncate", 1.3),
        off_policy_correction={"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3},
    ),
    skyrl("regular, prompt_mean", (*TOKENS, "algorithm.aggregate.scope=group"), loss_reduction="prompt_mean"),
    skyrl(
        "cispo",
        TOKENS + CISPO_LOW,
        policy_loss_type="cispo",
        cispo={"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.28},
    ),
    *(
        skyrl(
            f"dppo, {kind}",
            TOKENS + ours + SAMPLER,
            policy_loss_type="dppo",
            dppo={"dppo_type": kind, "delta_low": 0.1, "delta_high": 0.05},
        )
        for kind, ours in {"binary_tv": DPPO, "binary_kl": DPPO_KL}.items()
    ),
    skyrl(
        "regular, token mask",
        TOKENS + importance("none", inf, "token", 0.7, 1.3),
        off_policy_correction={"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.3},
    ),
    skyrl(
        "regular, tis_ratio_type=token, geometric sequence mask",
        TOKENS + importance("token", 1.3, "sequence", 0.9, 1.2),
        off_policy_correction={
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1.3,
            "sequence_mask_metric": "geometric",
            "geo_mask_low": 0.9,
            "geo_mask_high": 1.2,
        },
    ),
]
LOSSES = VERL + NEMO + SLIME + PRIME + SKYRL


@dataclass(frozen=True, slots=True)
class AdvantageCase:
    """As `PeerCase`, from the scores of groups to advantages."""

    peer: str
    name: str
    settings: dict[str, Any]
    overrides: tuple[str, ...]
    single: bool = False

    def __str__(self) -> str:
        return f"{self.peer}: {self.name}"


STD = ("algorithm/advantage=std", "algorithm.advantage.eps=1e-6")
CENTER, OTHERS = ("algorithm/advantage=center",), ("algorithm/advantage=leave_one_out",)
WITHOUT_STD = {"normalize_rewards": False}
ADVANTAGES = [
    AdvantageCase("verl", "grpo", {"adv_estimator": "grpo"}, STD),
    AdvantageCase("verl", "grpo, no std", {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, CENTER),
    AdvantageCase("verl", "rloo", {"adv_estimator": "rloo"}, OTHERS),
    AdvantageCase("NeMo RL", "grpo, mean of all", {"use_leave_one_out_baseline": False}, STD, single=True),
    AdvantageCase("NeMo RL", "grpo, mean of all, no std", {"use_leave_one_out_baseline": False, **WITHOUT_STD}, CENTER),
    AdvantageCase("NeMo RL", "grpo, no std", WITHOUT_STD, OTHERS),
    AdvantageCase("NeMo RL", "grpo", {}, (*OTHERS, "algorithm.advantage.scale=others"), single=True),
    AdvantageCase(
        "NeMo RL",
        "reinforce_plus_plus",
        {"name": "reinforce_plus_plus"},
        ("algorithm/advantage=reinforce_pp", "algorithm.advantage.over=tokens", "algorithm.advantage.eps=0"),
    ),
    AdvantageCase("prime-rl", "grpo", {"algorithm": "grpo"}, CENTER, single=True),
    AdvantageCase("prime-rl", "max_rl", {"algorithm": "max_rl"}, ("algorithm/advantage=max_rl",), single=True),
    AdvantageCase("SkyRL", "grpo", {"advantage_estimator": "grpo"}, STD),
    AdvantageCase("SkyRL", "grpo, no std", {"advantage_estimator": "grpo", "grpo_norm_by_std": False}, CENTER),
    AdvantageCase("SkyRL", "rloo", {"advantage_estimator": "rloo"}, OTHERS),
]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that a peer and grpocli define in different ways (differences.yaml)."""

    peer: str
    name: str
    theirs: str
    ours: str
    key: str


DIFFERENCES = {
    f"{one['peer']}: {one['name']}": Difference(**one)
    for one in yaml.safe_load(Path(__file__).with_name("differences.yaml").read_text(encoding="utf-8"))
}
