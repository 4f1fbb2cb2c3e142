"""Definitions of other trainers that grpocli can express, as their settings and as grpocli's overrides.

docs/peers.md lists them, so this file imports no trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One definition, as the `settings` of a peer and as grpocli's `overrides`.

    rows: `updated` (policy, old policy and sampler differ), `first` (the first update of a step: old policy = policy)
    or `no gap` (sampler = old policy). guard: where the peer adds 1e-8 to a denominator, which is then done on our
    side too: `rows` (to the tokens of a completion), `tokens` (to those of the update), `batch` (to both numbers of
    a mean over completions). single: the peer computes in float32 whatever it is given. value: whether the values are
    equal, too; otherwise only the gradients. limit: of the difference, where a guard cannot be done on our side.
    """

    peer: str
    name: str
    settings: dict[str, Any]
    overrides: tuple[str, ...]
    rows: str = "updated"
    guard: str = ""
    single: bool = False
    value: bool = True
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
ON_POLICY = ("algorithm.kl.on_policy=true",)


def kl(name: str) -> tuple[str, ...]:
    return (f"algorithm/kl={name}", "algorithm.kl.beta=0.04")


def correction(name: str, high: float, low: float = 0.0) -> tuple[str, ...]:
    bounds = (f"algorithm.correction.max={high}", f"algorithm.correction.min={low}")
    return (f"algorithm/correction={name}", *bounds)


def verl(name: str, settings: dict[str, Any], overrides: tuple[str, ...], **more: Any) -> PeerCase:
    return PeerCase("verl", name, settings, overrides, **more)


def nemo(name: str, settings: dict[str, Any], overrides: tuple[str, ...], **more: Any) -> PeerCase:
    guard = "tokens" if settings.get("token_level_loss", True) else "batch"
    return PeerCase("NeMo RL", name, settings, overrides, **{"guard": guard, **more})


def slime(name: str, settings: dict[str, Any], overrides: tuple[str, ...], **more: Any) -> PeerCase:
    return PeerCase("slime", name, settings, overrides, **more)


def skyrl(name: str, settings: dict[str, Any], overrides: tuple[str, ...], **more: Any) -> PeerCase:
    return PeerCase("SkyRL", name, settings, overrides, **{"single": True, **more})


CLIP_HIGH = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
VERL = [
    verl("vanilla", {}, TOKENS),
    verl("vanilla, clip-higher", CLIP_HIGH, TOKENS + HIGH),
    verl("vanilla, clip_ratio_c", {"clip_ratio_c": 1.3}, TOKENS + DUAL),
    verl("vanilla, seq-mean-token-mean", {"loss_agg_mode": "seq-mean-token-mean"}, GRPO, guard="rows"),
    verl("vanilla, seq-mean-token-sum", {"loss_agg_mode": "seq-mean-token-sum"}, SUM),
    verl("vanilla, seq-mean-token-sum-norm", {"loss_agg_mode": "seq-mean-token-sum-norm"}, HORIZON),
    verl(
        "gspo",
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", **CLIP_HIGH},
        GRPO + SEQUENCE + HIGH,
        guard="rows",
    ),
    verl("gspo, token-mean", {"loss_mode": "gspo"}, TOKENS + SEQUENCE),
    verl("sapo", {"loss_mode": "sapo", "tau_pos": 1.5, "tau_neg": 1.75}, GRPO + SAPO, guard="rows"),
    verl(
        "cispo, no lower bound",
        {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28},
        TOKENS + CISPO,
    ),
    verl("vanilla, kl", {"kl_loss_type": "kl"}, TOKENS + kl("k1")),
    verl("vanilla, mse", {"kl_loss_type": "mse"}, TOKENS + kl("k2")),
    verl("vanilla, low_var_kl", {"kl_loss_type": "low_var_kl"}, TOKENS + kl("k3")),
    verl(
        "vanilla, low_var_kl, seq-mean-token-mean",
        {"kl_loss_type": "low_var_kl", "loss_agg_mode": "seq-mean-token-mean"},
        GRPO + kl("k3"),
        guard="rows",
    ),
    verl("vanilla, low_var_kl+", {"kl_loss_type": "low_var_kl+"}, TOKENS + kl("k2"), value=False),
    verl(
        "vanilla, rollout_is=token",
        {"rollout_is": "token", "rollout_is_threshold": 1.3},
        TOKENS + correction("token_truncate", 1.3),
    ),
    verl(
        "vanilla, rollout_is=token, 0.7_1.3",
        {"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"},
        TOKENS + correction("token_mask", 1.3, 0.7),
    ),
    verl(
        "cispo, rollout_is=token",
        {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28, "rollout_is": "token"},
        TOKENS + CISPO + correction("token_truncate", 2.0),
    ),
]

BY_ROW = {"token_level_loss": False}
KL = {"reference_policy_kl_penalty": 0.04}
NEMO = [
    nemo("clip", {}, TOKENS),
    nemo("clip-higher", {"ratio_clip_max": 0.28}, TOKENS + HIGH),
    nemo("clip, per sequence", BY_ROW, GRPO),
    nemo("ratio_clip_c", {"ratio_clip_c": 1.3}, TOKENS + DUAL),
    nemo(
        "sequence_level_importance_ratios",
        {**BY_ROW, "sequence_level_importance_ratios": True},
        GRPO + SEQUENCE,
        limit=1e-7,  # the guard is in the mean log ratio, too
    ),
    nemo(
        "use_cispo, no lower bound", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.28}, TOKENS + CISPO
    ),
    nemo("force_on_policy_ratio", {"force_on_policy_ratio": True}, TOKENS, rows="first"),
    *(
        nemo(
            f"{name}, first update",
            {**KL, "reference_policy_kl_type": name},
            TOKENS + kl(name) + ON_POLICY,
            rows="first",
        )
        for name in ("k1", "k2", "k3")
    ),
    nemo("k3, per sequence, first update", {**KL, **BY_ROW}, GRPO + kl("k3") + ON_POLICY, rows="first"),
    nemo(
        "k3, use_on_policy_kl_approximation",
        {**KL, "use_on_policy_kl_approximation": True},
        TOKENS + kl("k3") + ON_POLICY,
        rows="no gap",
    ),
    nemo(
        "tis",
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.3,
        },
        TOKENS + correction("token_truncate", 1.3),
    ),
    nemo(
        "tis, from 0.7, per sequence",
        {
            **BY_ROW,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.3,
            "truncated_importance_sampling_ratio_min": 0.7,
        },
        GRPO + correction("token_truncate", 1.3, 0.7),
    ),
    nemo(
        "icepop",
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 1.3,
            "truncated_importance_sampling_ratio_min": 0.7,
        },
        TOKENS + correction("token_mask", 1.3, 0.7),
    ),
]

SLIME = [
    slime("grpo", {}, GRPO),
    slime("grpo, calculate_per_token_loss", {"per_token": True}, TOKENS),
    slime("grpo, clip-higher", {"eps_clip_high": 0.28}, GRPO + HIGH),
    slime("grpo, eps_clip_c", {"eps_clip_c": 1.3}, GRPO + DUAL),
    slime("gspo", {"advantage_estimator": "gspo"}, GRPO + SEQUENCE),
    slime(
        "cispo, no lower bound",
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28},
        GRPO + CISPO,
    ),
    slime("grpo, use_tis", {"use_tis": True, "tis_clip": 1.3}, GRPO + correction("token_truncate", 1.3)),
    slime(
        "grpo, icepop",
        {"icepop": True, "tis_clip": 1.3, "tis_clip_low": 0.7},
        GRPO + correction("token_mask", 1.3, 0.7),
    ),
    *(
        slime(f"grpo, {name}", {"use_kl_loss": True, "kl_loss_type": name}, GRPO + kl(ours), single=True)
        for name, ours in {"k1": "k1", "k2": "k2", "low_var_kl": "k3"}.items()
    ),
    slime(
        "grpo, k3, use_unbiased_kl",
        {"use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True},
        GRPO + kl("k3") + ON_POLICY,
        single=True,
    ),
]

SKYRL = [
    skyrl("regular", {}, TOKENS),
    skyrl("regular, sequence_mean", {"loss_reduction": "sequence_mean"}, GRPO),
    skyrl("regular, seq_mean_token_sum_norm", {"loss_reduction": "seq_mean_token_sum_norm"}, HORIZON),
    skyrl("dual_clip", {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.3}, TOKENS + DUAL),
    skyrl("gspo", {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"}, GRPO + SEQUENCE),
    skyrl(
        "sapo",
        {
            "policy_loss_type": "sapo",
            "loss_reduction": "sequence_mean",
            "sapo": {"tau_pos": 1.5, "tau_neg": 1.75},
        },
        GRPO + SAPO,
    ),
    skyrl(
        "cispo, no lower bound",
        {"policy_loss_type": "cispo", "cispo": {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 0.28}},
        TOKENS + CISPO,
    ),
    skyrl(
        "regular, tis_ratio_type=token",
        {"off_policy_correction": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3}},
        TOKENS + correction("token_truncate", 1.3),
    ),
]
LOSSES = VERL + NEMO + SLIME + SKYRL


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
    AdvantageCase("SkyRL", "grpo", {"advantage_estimator": "grpo"}, STD),
    AdvantageCase("SkyRL", "grpo, no std", {"advantage_estimator": "grpo", "grpo_norm_by_std": False}, CENTER),
    AdvantageCase("SkyRL", "rloo", {"advantage_estimator": "rloo"}, OTHERS),
]
