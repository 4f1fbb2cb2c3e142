"""The peers' sides: their own loss and advantage functions, called with the tensors of `Rows`.

A side has `source`, `loss(rows, **settings)` and `advantages(scores_PG, lengths_PG, **settings)`. Settings have the
peer's names.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from parity.peer_source import Source
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Log-probs [B, T] in nats (`logp` with a gradient), a mask [B, T] of 0 and 1, advantages [B]."""

    logp: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def advantages_BT(self) -> Tensor:
        return self.advantages.unsqueeze(1) * self.mask

    def ragged(self, values: Tensor) -> list[Tensor]:
        """Each row without its padding."""
        return [row[:length] for row, length in zip(values, self.lengths, strict=True)]

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.mask.sum(1)]


class Settings(dict[str, Any]):
    """A config with both ways of access; verl's ActorConfig has both."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class Side:
    source: ClassVar[Source]

    @cached_property
    def modules(self) -> dict[str, ModuleType]:
        return self.source.load()

    def module(self, name: str) -> Any:
        return self.modules[name]


class Verl(Side):
    source = Source(
        "verl",
        {
            "verl.trainer.ppo.core_algos": "verl/trainer/ppo/core_algos.py",
            "verl.trainer.ppo.rollout_corr_helper": "verl/trainer/ppo/rollout_corr_helper.py",
            "verl.utils.torch_functional": "verl/utils/torch_functional.py",
        },
        placeholders=("tensordict", "flash_attn", "torch_npu"),
        values={"verl.workers.config": {"ActorConfig": Settings}, "verl.trainer.config": {"AlgoConfig": type(None)}},
    )

    def loss(
        self,
        rows: Rows,
        loss_mode: str = "vanilla",
        loss_agg_mode: str = "token-mean",
        kl_loss_type: str | None = None,
        kl_loss_coef: float = 0.04,
        rollout_is: str | None = None,
        rollout_is_threshold: str | float = 2.0,
        rollout_rs: str | None = None,
        rollout_rs_threshold: str | None = None,
        bypass_mode: bool = False,
        dro_beta: float | None = None,
        **actor: Any,
    ) -> Tensor:
        """The loss of one update. bypass_mode: by their entry point for it, which takes the sampler as old policy."""
        core, helper = self.module("verl.trainer.ppo.core_algos"), self.module("verl.trainer.ppo.rollout_corr_helper")
        weights, mask, gap = None, rows.mask, rows.old - rows.sampler
        if rollout_is is not None:
            weights, _ = helper.compute_rollout_correction_weights(gap, mask, rollout_is, rollout_is_threshold)
        if rollout_rs is not None:
            mask, _ = helper.compute_rollout_rejection_mask(gap, mask, rollout_rs, rollout_rs_threshold)
        counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}  # as `ppo_loss` gives them
        config = Settings({"clip_ratio": 0.2, "clip_ratio_c": 1e9, "global_batch_info": counts, **actor})
        old = rows.old
        config["policy_loss"] = Settings(dro_beta=dro_beta, rollout_correction=Settings(loss_type="ppo_clip"))
        if bypass_mode:
            old, loss_mode = rows.sampler, "bypass_mode"
        policy_loss = core.get_policy_loss_fn(loss_mode)
        loss, _ = policy_loss(old, rows.logp, rows.advantages_BT, mask, loss_agg_mode, config, weights)
        if kl_loss_type is not None:
            kl = core.kl_penalty(rows.logp, rows.ref, kl_loss_type)
            loss = loss + kl_loss_coef * core.agg_loss(kl, mask, loss_agg_mode, **config.global_batch_info)
        return loss

    def advantages(self, scores_PG: Tensor, lengths_PG: Tensor, adv_estimator: str, **options: Any) -> Tensor:
        """[P, G, T]."""
        mask_BT = mask_of(lengths_PG)
        rewards_BT = torch.zeros_like(mask_BT)
        rewards_BT[:, 0] = scores_PG.flatten()
        estimate = self.module("verl.trainer.ppo.core_algos").get_adv_estimator_fn(adv_estimator)
        index = np.arange(len(scores_PG)).repeat(scores_PG.shape[1])
        found_BT, _ = estimate(token_level_rewards=rewards_BT, response_mask=mask_BT, index=index, **options)
        return found_BT.reshape(*scores_PG.shape, -1)


class NemoRL(Side):
    source = Source(
        "nemo_rl",
        {
            "nemo_rl.algorithms.loss.loss_functions": "nemo_rl/algorithms/loss/loss_functions.py",
            "nemo_rl.algorithms.loss.interfaces": "nemo_rl/algorithms/loss/interfaces.py",
            "nemo_rl.algorithms.loss": "nemo_rl/algorithms/loss/__init__.py",
            "nemo_rl.algorithms.utils": "nemo_rl/algorithms/utils.py",
            "nemo_rl.algorithms.advantage_estimator": "nemo_rl/algorithms/advantage_estimator.py",
        },
        repository="NVIDIA-NeMo/RL",
    )

    def loss(self, rows: Rows, adv_estimator: str | None = None, **settings: Any) -> Tensor:
        """Without settings the loss is the policy gradient alone: no KL, unlike NeMo RL's default."""
        losses = self.module("nemo_rl.algorithms.loss.loss_functions")
        config = losses.ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0, **settings})
        first = torch.zeros(len(rows.mask), 1, dtype=rows.mask.dtype)  # the position before the first prediction
        advantages_BT = rows.advantages_BT
        if adv_estimator is not None:
            advantages_BT = self._estimator(adv_estimator).compute_advantage(
                None, None, rows.mask, teacher_logprobs=rows.ref, prev_logprobs=rows.old
            )
        data = {
            "advantages": advantages_BT,
            "prev_logprobs": rows.old,
            "generation_logprobs": rows.sampler,
            "reference_policy_logprobs": rows.ref,
            "token_mask": rows.mask,
        }
        loss, _ = losses.ClippedPGLossFn(config)(
            rows.logp,
            {name: torch.cat([first, values], 1) for name, values in data.items()}
            | {"sample_mask": torch.ones(len(rows.mask), dtype=rows.mask.dtype)},
            torch.tensor(float(len(rows.mask)), dtype=rows.mask.dtype),
            rows.mask.sum(),
        )
        return loss

    def advantages(self, scores_PG: Tensor, lengths_PG: Tensor, name: str = "grpo", **options: Any) -> Tensor:
        """[P, G, T]."""
        prompts = torch.arange(len(scores_PG)).repeat_interleave(scores_PG.shape[1]).unsqueeze(1)
        with default_dtype(scores_PG.dtype):  # the estimator makes matrices without a dtype
            found = self._estimator(name, **options).compute_advantage(
                prompts, scores_PG.flatten(), mask_of(lengths_PG)
            )
        return found.reshape(*scores_PG.shape, -1)

    def _estimator(self, name: str, **options: Any) -> Any:
        module = self.module("nemo_rl.algorithms.advantage_estimator")
        kinds = {
            "grpo": module.GRPOAdvantageEstimator,
            "reinforce_plus_plus": module.ReinforcePlusPlusAdvantageEstimator,
            "opd": module.OPDAdvantageEstimator,
        }
        losses = self.module("nemo_rl.algorithms.loss.loss_functions")
        return kinds[name](module.AdvEstimatorConfig(name=name, **options), losses.ClippedPGLossConfig())


class Slime(Side):
    source = Source(
        "slime",
        {
            "slime.backends.megatron_utils.loss": "slime/backends/megatron_utils/loss.py",
            "slime.backends.megatron_utils.cp_utils": "slime/backends/megatron_utils/cp_utils.py",
            "slime.utils.ppo_utils": "slime/utils/ppo_utils.py",
        },
        placeholders=("megatron",),
        values={
            "megatron.core": {
                "mpu": Namespace(get_context_parallel_world_size=lambda: 1, is_pipeline_last_stage=lambda: True)
            }
        },
        repository="THUDM/slime",
    )

    def loss(self, rows: Rows, **settings: Any) -> Tensor:
        """`policy_loss_function`; only the forward is replaced, which hands out the rows' log-probs."""
        losses = self.module("slime.backends.megatron_utils.loss")
        args = Namespace(
            **{
                **dict.fromkeys(("use_rollout_logprobs", "use_opsm", "use_tis", "get_mismatch_metrics"), False),
                **dict.fromkeys(("use_kl_loss", "use_unbiased_kl", "use_opd", "calculate_per_token_loss"), False),
                **{"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None},
                **{"tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None},
                **{"entropy_coef": 0.0, "kl_loss_coef": 0.04, "opd_kl_coef": 1.0, **settings},
            }
        )
        per_token = args.calculate_per_token_loss
        logp = rows.ragged(rows.logp)
        losses.get_log_probs_and_entropy = lambda *_, **__: (
            None,
            {"log_probs": logp, "entropy": rows.ragged(rows.mask)},
        )
        losses.get_rollout_top_p_logprob_kwargs = lambda *_: {}
        losses.all_gather_with_cp = lambda values, *_: values
        losses._maybe_capture_log_probs = lambda *_: None
        losses.load_function = lambda name: getattr(losses, name)
        masks = rows.ragged(rows.mask)
        batch = {
            "advantages": [a * m for a, m in zip(rows.advantages, masks, strict=True)],
            "log_probs": rows.ragged(rows.old),
            "rollout_log_probs": rows.ragged(rows.sampler),
            "ref_log_probs": rows.ragged(rows.ref),
            "teacher_log_probs": rows.ragged(rows.ref),
            "loss_masks": masks,
            "rollout_mask_sums": [m.sum() for m in masks],
            "response_lengths": rows.lengths,
            "total_lengths": rows.lengths,
            "unconcat_tokens": None,
        }
        if args.use_opd:
            losses.apply_opd_kl_to_advantages(args, batch, batch["advantages"], batch["log_probs"])
            batch.pop("opd_reverse_kl")
        reduce_ = losses.get_sum_of_sample_mean(rows.lengths, rows.lengths, masks, None, per_token)
        loss, _ = losses.policy_loss_function(args, batch, rows.logp, reduce_)
        return loss / (rows.mask.sum() if per_token else len(rows.mask))


class PrimeRL(Side):
    source = Source(
        "prime_rl",
        {
            "prime_rl.trainer.rl.loss": "src/prime_rl/trainer/rl/loss.py",
            "prime_rl.orchestrator.algo.base": "src/prime_rl/orchestrator/algo/base.py",
            "prime_rl.orchestrator.algo.grpo": "src/prime_rl/orchestrator/algo/grpo.py",
            "prime_rl.orchestrator.algo.max_rl": "src/prime_rl/orchestrator/algo/max_rl.py",
        },
        placeholders=("beartype", "jaxtyping", "verifiers"),
        values={
            "prime_rl.orchestrator.algo.routing": {
                "assign_advantages": lambda trace, advantage: setattr(trace, "advantage", advantage)
            }
        },
        repository="PrimeIntellect-ai/prime-rl",
    )

    def loss(self, rows: Rows, loss: str = "default", **settings: Any) -> Tensor:
        """`compute_loss` of all rows, as one update: a sum over tokens, divided by their number."""
        losses = self.module("prime_rl.trainer.rl.loss")
        config = Namespace(**{"dppo_mask_high": 0.2, "dppo_mask_low": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3, **settings})
        ones, zeros = rows.ragged(rows.mask), [torch.zeros_like(m) for m in rows.ragged(rows.mask)]
        distilled, tokens = loss == "ref_kl", int(rows.mask.sum())
        found, _ = losses.compute_loss(
            trainer_logprobs=rows.ragged(rows.logp),
            inference_logprobs=rows.ragged(rows.sampler),
            ref_logprobs=rows.ragged(rows.ref),
            advantages=rows.ragged(rows.advantages_BT),
            loss_mask=rows.ragged(rows.mask.bool()),
            rl_weights=zeros if distilled else None,
            ce_weights=None,
            ref_kl_weights=ones if distilled else None,
            rl_loss_fn=lambda inputs: losses.default_loss_fn(inputs, config),
            rl_scale=tokens,
            ce_scale=1,
            ref_kl_scale=tokens,
        )
        return found

    def advantages(self, scores_PG: Tensor, lengths_PG: Tensor, algorithm: str) -> Tensor:
        """[P, G, 1]."""
        if algorithm == "grpo":
            score = self.module("prime_rl.orchestrator.algo.grpo").GRPOAlgorithm.score_group
        else:
            score = self.module("prime_rl.orchestrator.algo.max_rl").MaxRLAlgorithm.score_group
        found = []
        for scores in scores_PG.tolist():
            traces = [
                Namespace(has_error=False, agent=Namespace(trainable=True), nodes=[Namespace(mask=[True])], reward=s)
                for s in scores
            ]
            asyncio.run(score(Namespace(length_penalty=None), [Namespace(traces=traces)]))
            found.append([trace.advantage for trace in traces])
        return torch.tensor(found, dtype=scores_PG.dtype).unsqueeze(2)


class SkyRL(Side):
    source = Source(
        "skyrl",
        {
            "skyrl.backends.skyrl_train.utils.ppo_utils": "skyrl/backends/skyrl_train/utils/ppo_utils.py",
            "skyrl.backends.skyrl_train.utils.off_policy_correction_utils": (
                "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
            ),
            "skyrl.backends.skyrl_train.utils.torch_utils": "skyrl/backends/skyrl_train/utils/torch_utils.py",
        },
        placeholders=("ray", "jaxtyping", "loguru", "cloudpickle"),
    )
    correction: ClassVar[dict[str, Any]] = {"tis_ratio_type": None, "sequence_mask_metric": None} | dict.fromkeys(
        f"{kind}_is_threshold_{side}" for kind in ("outlier_token", "token_mask") for side in ("low", "high")
    )

    def loss(
        self, rows: Rows, policy_loss_type: str = "regular", loss_reduction: str = "token_mean", **settings: Any
    ) -> Tensor:
        utils = self.module("skyrl.backends.skyrl_train.utils.ppo_utils")
        functions = {
            "regular": utils.ppo_policy_loss,
            "dual_clip": utils.ppo_policy_loss,
            "gspo": utils.gspo_policy_loss,
            "sapo": utils.sapo_policy_loss,
            "cispo": utils.compute_policy_loss_cispo,
            "dppo": utils.dppo_policy_loss,
        }
        config = Settings(
            {
                "policy_loss_type": policy_loss_type,
                "loss_reduction": loss_reduction,
                "eps_clip_low": 0.2,
                "eps_clip_high": 0.2,
                "off_policy_correction": Settings(self.correction),
                **{name: Settings(v) if isinstance(v, dict) else v for name, v in settings.items()},
            }
        )
        if "off_policy_correction" in settings:
            config["off_policy_correction"] = Settings(self.correction | settings["off_policy_correction"])
        length = rows.mask.shape[1]
        groups = [(start, start + 4) for start in range(0, len(rows.mask), 4)]
        scaled_BT = utils.apply_loss_reduction_to_advantages_minibatch(
            rows.advantages_BT, rows.mask, loss_reduction, len(rows.mask), length, groups
        )
        loss, _ = functions[policy_loss_type](rows.logp, rows.old, scaled_BT, config, rows.mask, rows.sampler)
        return loss

    def advantages(self, scores_PG: Tensor, lengths_PG: Tensor, advantage_estimator: str, **options: Any) -> Tensor:
        """[P, G, T]."""
        utils = self.module("skyrl.backends.skyrl_train.utils.ppo_utils")
        estimate = {
            "grpo": utils.compute_grpo_outcome_advantage,
            "rloo": utils.compute_rloo_outcome_advantage,
            "maxrl": utils.compute_maxrl_advantage,
        }[advantage_estimator]
        mask_BT = mask_of(lengths_PG)
        rewards_BT = torch.zeros_like(mask_BT)
        rewards_BT[:, 0] = scores_PG.flatten()
        index = np.arange(len(scores_PG)).repeat(scores_PG.shape[1])
        with default_dtype(scores_PG.dtype), self.source.importing():  # one imports its logger when it is called
            found_BT, _ = estimate(token_level_rewards=rewards_BT, response_mask=mask_BT, index=index, **options)
        return found_BT.reshape(*scores_PG.shape, -1)


SIDES: dict[str, Side] = {
    "verl": Verl(),
    "NeMo RL": NemoRL(),
    "slime": Slime(),
    "prime-rl": PrimeRL(),
    "SkyRL": SkyRL(),
}


def mask_of(lengths_PG: Tensor) -> Tensor:
    """[B, T] of 0 and 1."""
    lengths_B = lengths_PG.flatten()
    return (torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)).double()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
