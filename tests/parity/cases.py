"""The compared definitions, as TRL's settings and as grpocli's overrides, and grpocli's loss of TRL's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity.trl_side import Batch, Peer, random_batch
from torch import Tensor

from grpocli.algorithm import Algorithm

GROUP, LENGTH = 4, 7
RAGGED = (3, 7, 1, 5, 6, 2, 4, 7)
REWARDS: dict[str, list[float | None]] = {
    "correct": [0.0, 1.0, None, 1.0, 1.0, 0.0, 0.0, 1.0],
    "format": [None, 1.0, None, 0.5, 0.0, 0.25, 0.0, 1.0],
}
METRICS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


@dataclass(frozen=True, slots=True)
class Case:
    """One definition, as TRL's `settings` and as grpocli's `overrides`."""

    name: str
    settings: dict[str, Any]
    overrides: tuple[str, ...]
    pieces: int = 1
    sampler: bool = False
    lengths: tuple[int, ...] = RAGGED
    finished: tuple[bool, ...] | None = None
    metrics: dict[str, str] = field(default_factory=lambda: {name: name for name in METRICS})

    def __str__(self) -> str:
        return self.name

    def peer(self, folder: Path, **more: Any) -> Peer:
        settings = {**self.settings, **more}
        return Peer(folder, len(self.lengths), LENGTH, REWARDS, pieces=self.pieces, sampler=self.sampler, **settings)

    def batch(self, dtype: torch.dtype, seed: int) -> Batch:
        return random_batch(dtype, seed, self.lengths, self.finished)


GRPO = ("algorithm=grpo", "algorithm/kl=none")
# by default TRL multiplies the KL term by pi / pi_old, which is `on_policy` in grpocli
KL, KL_WEIGHTED = {"beta": 0.04, "use_bias_correction_kl": False}, {"beta": 0.04}
OUR_KL, OUR_KL_WEIGHTED = ("algorithm/kl=k3",), ("algorithm/kl=k3", "algorithm.kl.on_policy=true")
# "dapo" in TRL is a token mean over the window and nothing else: clip-higher is `epsilon_high`.
DAPO = ("algorithm=dapo", "algorithm.objective.high=0.2")
DR_GRPO = ("algorithm=drgrpo", f"algorithm.aggregate.length={LENGTH}")  # TRL's is always max_completion_length
# "bnpo" divides by the tokens of a micro-batch, "luspo" by rows only, which is Dr. GRPO's with length 1.
BNPO = (*DAPO, "algorithm.aggregate.scope=micro_batch")
LUSPO = (*GRPO, "algorithm.objective.level=sequence", "algorithm/aggregate=constant", "algorithm.aggregate.length=1")
SEQUENCE = {"importance_sampling_level": "sequence"}
OUR_SEQUENCE = ("algorithm.objective.level=sequence",)
# TRL's epsilon_high is CISPO's bound itself, ours how far it is above 1.
CISPO = {"loss_type": "cispo", "epsilon_high": 1.5}
OUR_CISPO = ("algorithm=dapo", "algorithm/objective=cispo", "algorithm.objective.high=0.5")
CISPO_METRICS = {"kl": "kl", "clip_ratio/high_mean": "cispo_clip_ratio"}
# TRL rounds the temperatures to float32 for every dtype; 1.25 is exact
SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.25}
OUR_SAPO = (*GRPO, "algorithm/objective=sapo", "algorithm.objective.tau_negative=1.25")
SAPO_METRICS = {"kl": "kl"}  # it has no clip
HIGH, OUR_HIGH = {"epsilon_high": 0.28}, ("algorithm.objective.high=0.28",)
DELTA, OUR_DELTA = {"delta": 1.4}, ("algorithm.objective.delta=1.4",)
TOP, OUR_TOP = {"top_entropy_quantile": 0.3}, ("algorithm/tokens=top_entropy", "algorithm.tokens.quantile=0.3")
BONUS, OUR_BONUS = {"entropy_coef": 0.05}, ("algorithm/entropy=bonus", "algorithm.entropy.coefficient=0.05")
CUT = (True, False, True, True, False, True, True, True)


def case(name: str, loss_type: str, settings: dict[str, Any], overrides: tuple[str, ...], **more: Any) -> Case:
    return Case(name, {"loss_type": loss_type, **settings}, overrides, **more)


WHOLE = [
    case("grpo", "grpo", {}, GRPO),
    case("grpo, KL", "grpo", KL, GRPO + OUR_KL),
    case("grpo, KL x ratio", "grpo", KL_WEIGHTED, GRPO + OUR_KL_WEIGHTED),
    case("grpo, clip-higher", "grpo", HIGH, GRPO + OUR_HIGH),
    case("grpo, delta", "grpo", DELTA, GRPO + OUR_DELTA),
    case("grpo, delta, KL", "grpo", DELTA | KL, GRPO + OUR_DELTA + OUR_KL),
    case("grpo, sequence level (GSPO)", "grpo", SEQUENCE, GRPO + OUR_SEQUENCE),
    case("grpo, sequence level, KL", "grpo", SEQUENCE | KL, GRPO + OUR_SEQUENCE + OUR_KL),
    case("grpo, top entropy", "grpo", TOP, GRPO + OUR_TOP),
    case("dapo", "dapo", {}, DAPO),
    case("dapo, KL", "dapo", KL, DAPO + OUR_KL),
    case("dapo, KL x ratio", "dapo", KL_WEIGHTED, DAPO + OUR_KL_WEIGHTED),
    case("dapo, clip-higher", "dapo", HIGH, DAPO + OUR_HIGH),
    case("dapo, delta", "dapo", DELTA, DAPO + OUR_DELTA),
    case("dapo, sequence level", "dapo", SEQUENCE, DAPO + OUR_SEQUENCE),
    case("dapo, top entropy, KL", "dapo", TOP | KL, DAPO + OUR_TOP + OUR_KL),
    case("dapo, entropy bonus", "dapo", BONUS, DAPO + OUR_BONUS),
    case("dr_grpo", "dr_grpo", {}, DR_GRPO),
    case("dr_grpo, KL", "dr_grpo", KL, DR_GRPO + OUR_KL),
    case("dr_grpo, delta", "dr_grpo", DELTA, DR_GRPO + OUR_DELTA),
    case("luspo, sequence level", "luspo", SEQUENCE, LUSPO),
    case("cispo", "cispo", CISPO, OUR_CISPO, metrics=CISPO_METRICS),
    case("cispo, KL", "cispo", CISPO | KL, OUR_CISPO + OUR_KL, metrics=CISPO_METRICS),
    case("cispo, KL x ratio", "cispo", CISPO | KL_WEIGHTED, OUR_CISPO + OUR_KL_WEIGHTED, metrics=CISPO_METRICS),
    case("sapo", "sapo", SAPO, OUR_SAPO, metrics=SAPO_METRICS),
    case("sapo, KL", "sapo", SAPO | KL, OUR_SAPO + OUR_KL, metrics=SAPO_METRICS),
]


def correction(mode: str, low: float | None = None, **more: Any) -> Case:
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5}
    overrides = (*DAPO, f"algorithm/correction={mode}", "algorithm.correction.max=1.5")
    if low is not None:
        settings["vllm_importance_sampling_clip_min"] = low
        overrides += (f"algorithm.correction.min={low}",)
    name = f"dapo, {mode}" + (f" from {low}" if low else "") + (", 1 token" if "lengths" in more else "")
    return case(name, "dapo", settings, overrides, sampler=True, **more)


# Where every completion is one token, TRL's sequence ratio (a product) is ours (a geometric mean).
# Longer ones are in test_differences.py.
ONE_TOKEN = (1,) * 8
CORRECTED = [
    correction("token_truncate"),
    correction("token_truncate", low=0.7),
    correction("token_mask"),
    correction("token_mask", low=0.7),
    correction("sequence_truncate", low=0.7, lengths=ONE_TOKEN),
    correction("sequence_mask", low=0.7, lengths=ONE_TOKEN),
]
# A step of two micro-batches. TRL logs the mean of their clip ratios, each over its own tokens; ours are over the
# window's. So only loss and gradient are compared.
SPLIT = [
    case(f"{name}, 2 micro-batches", name, KL, overrides + OUR_KL, pieces=2, metrics={})
    for name, overrides in {"grpo": GRPO, "dapo": DAPO, "dr_grpo": DR_GRPO, "bnpo": BNPO}.items()
]
# Completions cut at the limit are taken out of the loss, but stay rows.
MASKED = [
    case(f"{name}, truncated masked", name, {"mask_truncated_completions": True}, overrides, finished=CUT)
    for name, overrides in {"grpo": GRPO, "dapo": DAPO, "dr_grpo": DR_GRPO}.items()
]


def our_loss(
    algorithm: Algorithm,
    batch: Batch,
    logp: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    pieces: int = 1,
    old_logp: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """grpocli's loss of all rows, in one piece or as the sum of several pieces with the window's totals."""
    ids = torch.arange(len(mask)) // GROUP
    tensors = {
        "logp": logp,
        "old_logp": batch.old_logp if old_logp is None else old_logp,
        "advantages": advantages,
        "mask": mask,
        "group_ids": ids,
        "ref_logp": batch.ref_logp,
        "rollout_logp": batch.rollout_logp,
        "entropy": entropy,
    }
    if pieces == 1:
        return algorithm.loss(**tensors)
    totals = algorithm.totals(advantages, mask, ids, micro_batches=pieces)
    rows = torch.arange(len(mask)).chunk(pieces)
    parts = [algorithm.loss(**{k: v[r] for k, v in tensors.items()}, totals=totals) for r in rows]
    return torch.stack([loss for loss, _ in parts]).sum(), {}
