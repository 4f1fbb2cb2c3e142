"""Definitions of other trainers that grpocli can express, as their settings and as grpocli's overrides.

docs/evidence/peers.md lists them, so this file imports no trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any


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
    verl("vanilla, its default", {"clip_ratio_c": 3.0}, (*TOKENS, "algorithm.objective.dual=3.0")),
    verl("vanilla, clip_ratio_c", {"clip_ratio_c": 1.3}, TOKENS + DUAL),
    verl("vanilla, seq-mean-token-mean", {"loss_agg_mode": "seq-mean-token-mean"}, GRPO, guard="rows"),
    verl(
        "vanilla, seq-mean-token-mean, a completion without tokens",
        {"loss_agg_mode": "seq-mean-token-mean"},
        GRPO,
        rows="one empty",
        guard="rows",
    ),
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

VERL += [
    verl("cispo", {"loss_mode": "cispo", **CLIP_HIGH}, TOKENS + CISPO_LOW),
    verl("gpg", {"loss_mode": "gpg"}, TOKENS + PLAIN),
    verl("dro", {"loss_mode": "dro", "dro_beta": 0.3}, TOKENS + MIRROR),
    verl(
        "geo_mean", {"loss_mode": "geo_mean", **CLIP_HIGH}, GRPO + GEOMETRIC, limit=1e-7
    ),  # as NeMo RL's sequence ratio
    verl(
        "dppo_tv",
        {"loss_mode": "dppo_tv", "clip_ratio_low": 0.1, "clip_ratio_high": 0.05},
        TOKENS + DPPO,
        value=False,
    ),
    verl(
        "dppo_kl",
        {"loss_mode": "dppo_kl", "clip_ratio_low": 0.1, "clip_ratio_high": 0.05},
        TOKENS + DPPO_KL,
        value=False,
    ),
    verl("vanilla, bypass_mode", {"bypass_mode": True}, TOKENS + SAMPLER),
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

SEQ_MASK_TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 1.2,
    "truncated_importance_sampling_ratio_min": 0.9,
}
NEMO += [
    nemo("use_cispo", {"use_cispo": True, "ratio_clip_max": 0.28}, TOKENS + CISPO_LOW),
    nemo("disable_ppo_ratio", {"disable_ppo_ratio": True}, TOKENS + PLAIN),
    nemo("seq-mask-tis", SEQ_MASK_TIS, TOKENS + importance("token", inf, "sequence", 0.9, 1.2)),
    nemo(
        "adv_estimator=opd, first update",
        {"adv_estimator": "opd", "disable_ppo_ratio": True},
        TOKENS + DISTILLED,
        rows="first",
        distilled=True,
        value=False,
    ),
]

SLIME = [
    slime("grpo", {}, GRPO),
    slime("grpo, calculate_per_token_loss", {"calculate_per_token_loss": True}, TOKENS),
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
        {"use_tis": True, "custom_tis_function_path": "icepop_function", "tis_clip": 1.3, "tis_clip_low": 0.7},
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

SLIME += [
    slime(
        "cispo",
        {"advantage_estimator": "cispo", "eps_clip_high": 0.28},
        GRPO + CISPO_LOW,
    ),
    slime("grpo, use_opsm", {"use_opsm": True, "opsm_delta": 0.1}, (*GRPO, "algorithm.objective.drop_above=0.1")),
    slime("grpo, use_rollout_logprobs", {"use_rollout_logprobs": True}, GRPO + SAMPLER),
    slime(
        "grpo, use_opd, first update",
        {"use_opd": True, "opd_kl_coef": 0.5},
        (*GRPO, "algorithm/kl=reverse", "algorithm.kl.beta=0.5"),
        rows="first",
    ),
]

PRIME = [
    PeerCase("prime-rl", "default", {}, ("algorithm=dppo",)),
    PeerCase(
        "prime-rl",
        "default, narrow",
        {"dppo_mask_low": 0.1, "dppo_mask_high": 0.05, "kl_tau": 0.02},
        TOKENS + DPPO + SAMPLER + ("algorithm.objective.drift=0.02",),
    ),
    PeerCase(
        "prime-rl",
        "ref_kl (opd), within its trust region",
        {"loss": "ref_kl"},
        TOKENS + DISTILLED + SAMPLER + ("algorithm/objective=dppo", "algorithm.objective.drift=0.001"),
        rows="near",
        distilled=True,
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
SKYRL += [
    skyrl(
        "regular, prompt_mean",
        {"loss_reduction": "prompt_mean"},
        (*TOKENS, "algorithm.aggregate.scope=group"),
    ),
    skyrl(
        "cispo",
        {"policy_loss_type": "cispo", "cispo": {"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.28}},
        TOKENS + CISPO_LOW,
    ),
    *(
        skyrl(
            f"dppo, {kind}",
            {"policy_loss_type": "dppo", "dppo": {"dppo_type": kind, "delta_low": 0.1, "delta_high": 0.05}},
            TOKENS + ours + SAMPLER,
        )
        for kind, ours in {"binary_tv": DPPO, "binary_kl": DPPO_KL}.items()
    ),
    skyrl(
        "regular, token mask",
        {"off_policy_correction": {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.3}},
        TOKENS + importance("none", inf, "token", 0.7, 1.3),
    ),
    skyrl(
        "regular, tis_ratio_type=token, geometric sequence mask",
        {
            "off_policy_correction": {
                "tis_ratio_type": "token",
                "token_tis_ratio_clip_high": 1.3,
                "sequence_mask_metric": "geometric",
                "geo_mask_low": 0.9,
                "geo_mask_high": 1.2,
            }
        },
        TOKENS + importance("token", 1.3, "sequence", 0.9, 1.2),
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
    """Something that a peer and grpocli define in different ways. key: what gives theirs, if anything does."""

    peer: str
    name: str
    theirs: str
    ours: str
    key: str


def one_by_one() -> Iterator[Difference]:
    yield Difference(
        "verl, NeMo RL",
        "means over tokens",
        "divide by n + 1e-8 (verl: the mean of a completion; NeMo RL: every mean)",
        "divides by n, at least 1",
        "none",
    )
    yield Difference(
        "verl",
        "sapo, geo_mean",
        "the mean over completions whatever `loss_agg_mode` is",
        "as `aggregate` says",
        "algorithm/aggregate=sequence_mean",
    )
    yield Difference(
        "verl, SkyRL",
        "rollout_is=sequence, tis_ratio_type=sequence",
        "a completion weighs min(Π_t π_old/μ, C)",
        "`sequence_truncate` takes the geometric mean over t, not the product",
        "none; the product is near 0 or at C for long completions",
    )
    yield Difference(
        "NeMo RL",
        "use_importance_sampling_correction with sequence_level_importance_ratios",
        "a completion weighs Π_t π_old/μ",
        "every correction takes single ratios or their geometric mean",
        "none",
    )
    yield Difference(
        "verl",
        "rollout_rs, bounds of k1",
        "lower and upper bound μ/π_old",
        "`low` and `high` bound π_old/μ",
        "algorithm.correction.low=1/upper, high=1/lower",
    )
    yield Difference(
        "verl",
        "rollout_rs, denominators",
        "rejected tokens leave the loss and its denominators",
        "dropped tokens weigh 0 and are counted",
        "none",
    )
    yield Difference(
        "verl",
        "gspo with rollout_is=token",
        "the weight of a token scales the gradient of that token's log-prob",
        "the weights of a completion scale its ratio, whose gradient all its tokens share: their mean counts",
        "none",
    )
    yield Difference(
        "verl",
        "geo_mean with rollout_is=token",
        "a completion weighs the geometric mean of its tokens' weights",
        "the mean of its tokens' weights",
        "none",
    )
    yield Difference(
        "verl",
        "dppo_tv, dppo_kl",
        "−M sg[min(r, c)] A log π: beyond c (`clip_ratio_c`, 20) the gradient grows no further",
        "−M r A: the same gradient up to c",
        "none",
    )
    yield Difference(
        "verl, NeMo RL, slime",
        "cispo",
        "the weight has a lower bound, 1 − 0.2 by default (`clip_ratio_low`, `ratio_clip_min`, `eps_clip`)",
        "none by default, as in MiniMax-M1",
        "algorithm.objective.low=0.2",
    )
    yield Difference(
        "NeMo RL",
        "reference_policy_kl_penalty",
        "weighs D by π/sg[π], which is 1: the gradient is that of D plus D times that of log π, in every update",
        "`on_policy=false` has the gradient of D alone, `on_policy=true` weighs D by π/π_old",
        "algorithm.kl.on_policy=true: equal in the first update of a step",
    )
    yield Difference(
        "NeMo RL",
        "use_on_policy_kl_approximation",
        "D weighs π/μ",
        "`on_policy=true` weighs by π/π_old",
        "algorithm/correction=sampler makes π_old = μ",
    )
    yield Difference(
        "NeMo RL",
        "adv_estimator=opd with icepop",
        "the distillation term has the weights of the correction",
        "`kl=reverse` is part of the KL term, which no correction weighs",
        "algorithm.loss(advantages=log T − log π_old), in Python",
    )
    yield Difference(
        "slime",
        "use_opd",
        "A_it = A_i − β (log π_old − log T), inside the clip",
        "`kl=reverse` adds β r sg[log π − log T], outside the clip; equal in the first update of a step",
        "algorithm.loss(advantages=A_it), in Python",
    )
    yield Difference(
        "prime-rl",
        "ref_kl (opd)",
        "a token whose probability fell by more than 0.2 loses its distillation term",
        "`kl=reverse` keeps it",
        "none",
    )
    yield Difference(
        "slime",
        "kl_loss_type=k3",
        "exp(x) − x − 1, without a bound (`low_var_kl` has one)",
        "at most 10, as in verl and NeMo RL",
        "none",
    )
    yield Difference(
        "NeMo RL",
        "adv_estimator=grpo, its default",
        "A is divided by the std of the other completions' scores",
        "`std` by that of the whole group, from whose mean A is taken",
        "algorithm/advantage=leave_one_out algorithm.advantage.scale=others",
    )
    yield Difference(
        "verl",
        "reinforce_plus_plus_baseline",
        "the variance over tokens has ddof 1",
        "`reinforce_pp` over=tokens has ddof 0, as in NeMo RL and OpenRLHF",
        "none",
    )
    yield Difference(
        "verl, SkyRL",
        "grpo, a group of one completion",
        "A = s",
        "A = 0: there is nothing to compare with",
        "none",
    )
    yield Difference(
        "SkyRL",
        "maxrl",
        "A = (s − mean) / (mean + 1e-6)",
        "A = (s − mean) / mean, 0 where the mean is 0",
        "none",
    )


DIFFERENCES = {f"{one.peer}: {one.name}": one for one in one_by_one()}
