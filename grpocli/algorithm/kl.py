"""KL terms towards a reference, the start policy or a teacher, for each token [B, T], in nats.

k1, k2 and k3 are the estimators of http://joschu.net/blog/kl-approx.html, with z = log pi_ref - log pi_theta.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.objective import FARTHEST
from grpocli.config.parts import part, require, section

if TYPE_CHECKING:
    from torch import Tensor


MAX_K3 = 10.0
"""Upper bound of a token's k3, in nats."""


@part("algorithm/kl", "none")
class NoKL:
    """No KL term; no reference model is loaded."""

    beta = 0.0
    sync_every = 0
    sync_alpha = 0.0

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        return logp_BT.new_zeros(())


@section("algorithm.kl")
class KL:
    """Base of the KL terms: the coefficient, and the reference, which is the start policy or a teacher."""

    beta: float = 0.04
    """KL coefficient in the loss; with 0, no reference model is loaded."""
    model: Any = None
    """Reference model, the teacher of a distillation: a folder, a name on the hub or `hub:OWNER/NAME@REVISION`, or a
    mapping from each task to one of these. null: the start policy. Its tokenizer must be that of the policy."""
    sync_every: int = 0
    """Steps between updates of the reference; 0: never. It becomes alpha x policy + (1 - alpha) x reference, TR-DPO
    (arXiv 2404.09656)."""
    sync_alpha: float = 0.6
    """Weight of the policy in the reference update (alpha), 0 to 1."""

    def __post_init__(self) -> None:
        require(self, "beta", 0 <= self.beta < math.inf, "must be a finite number of 0 or more")
        require(self, "model", _names(self.model), "must be a folder, a name on the hub, or a mapping {task: one}")
        require(self, "sync_every", self.sync_every >= 0, "must be 0 (never) or more")
        require(self, "sync_alpha", 0 <= self.sync_alpha <= 1, "must be between 0 and 1")
        problem = "the policy cannot be mixed into a teacher: leave algorithm.kl.model null"
        require(self, "sync_every", not (self.sync_every and self.has_teacher), problem)

    @property
    def models(self) -> dict[str, str]:
        """The folder or name of each task's teacher; the key EVERY_TASK for one teacher of all tasks."""
        if isinstance(self.model, dict):
            return {str(task): str(name) for task, name in self.model.items()}
        return {} if self.model is None else {EVERY_TASK: str(self.model)}

    @property
    def has_teacher(self) -> bool:
        """Whether the reference is a model other than the start policy."""
        return bool(self.models)


EVERY_TASK = ""
"""The key of a teacher of all tasks in `KL.models`."""
BUILT_IN = "tiny-teacher"
"""The value of `algorithm.kl.model` for the teacher of the built-in model (`models/teacher.py`)."""


def key_of_teacher(task: str) -> str:
    """The config key of a task's teacher: `algorithm.kl.model`, or `algorithm.kl.model.gsm8k` in a mapping."""
    return "algorithm.kl.model" + (f".{task}" if task else "")


def has_teacher(kl: object) -> bool:
    """Whether the reference of a KL part is a model other than the start policy; users' parts have no such keys."""
    return isinstance(kl, KL) and kl.has_teacher


def _names(value: Any) -> bool:
    values = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
    return value != {} and all(isinstance(one, str) and one for one in values)


@section("algorithm.kl")
class Estimator(KL):
    """Base of the three estimators of the KL divergence."""

    on_policy: bool = False
    """Multiply by the importance ratio pi_theta / pi_old, so that the estimate is an expectation under the current
    policy (NeMo RL's GRPO guide)."""

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        kl_BT = self.estimate(ref_logp_BT - logp_BT)
        return kl_BT * _ratio(logp_BT, old_logp_BT) if self.on_policy else kl_BT

    def estimate(self, z_BT: Tensor) -> Tensor:
        raise NotImplementedError


def _ratio(logp_BT: Tensor, old_logp_BT: Tensor) -> Tensor:
    return (logp_BT - old_logp_BT).clamp(-FARTHEST, FARTHEST).exp()


@part("algorithm/kl", "reverse")
class Reverse(KL):
    """On-policy distillation: r (log pi - log T) with r = pi_theta / pi_old; the difference has no gradient.

    The policy gradient of the reverse KL divergence from a teacher T, sampled from the policy: each token's advantage
    is log T - log pi. With algorithm/advantage=none it is pure distillation, without rewards. On-policy its gradient
    is that of k2. GKD (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543) minimise the same divergence.
    """

    beta: float = 1.0
    """KL coefficient in the loss; with 0, no reference model is loaded."""

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        return _ratio(logp_BT, old_logp_BT) * (logp_BT - ref_logp_BT).detach()


@part("algorithm/kl", "k1")
class K1(Estimator):
    """-z with z = log pi_ref - log pi_theta: unbiased, high variance, may be negative.

    Its gradient is that of log pi_theta, whose expectation on-policy is 0: it measures the divergence without reducing
    it. `on_policy` gives it the gradient of the divergence.
    """

    def estimate(self, z_BT: Tensor) -> Tensor:
        return -z_BT


@part("algorithm/kl", "k2")
class K2(Estimator):
    """z^2 / 2 with z = log pi_ref - log pi_theta: low variance, biased.

    On-policy, its expected gradient is that of the KL divergence.
    """

    def estimate(self, z_BT: Tensor) -> Tensor:
        return z_BT.square() / 2


@part("algorithm/kl", "k3")
class K3(Estimator):
    """exp(z) - z - 1 with z = log pi_ref - log pi_theta: unbiased and never negative up to 10, where it is cut off.

    GRPO (arXiv 2402.03300), equation 4. The bound is that of NeMo RL and verl: exp(89) is infinite in float32. Beyond
    it, where z is above 2.6 or below -11, the KL term of a token has no gradient. k1 and k2 cannot overflow.
    """

    def estimate(self, z_BT: Tensor) -> Tensor:
        z_BT = z_BT.clamp(-FARTHEST, FARTHEST)
        return (z_BT.exp() - z_BT - 1).clamp(max=MAX_K3)
