"""Every choice of every part against its source's formula, written out with loops in float64.

Nothing here is shared with the package: tokens are visited one by one, `min`, `max` and quantiles are Python's, and
log-probs outside of the mask are NaN, which a literal sum over the tokens of an output never meets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from algorithm.literal import NAN, Batch, G, P, T, assert_same, clip, larger, make_batch, mean, outputs, smaller
from algorithm.windows import choices
from composed import built
from tables import table

from grpocli.composition.compose import compose
from grpocli.errors import ConfigError
from grpocli.types import Completion, Prompt, Rollout, Row

Test = TypeVar("Test", bound=Callable[..., None])
TRANSCRIBED: set[str] = set()


def transcribes(*choices: str) -> Callable[[Test], Test]:
    """Record the choices (`kl=k3`) that a test writes out, for the last test of this file."""

    def mark(test: Test) -> Test:
        TRANSCRIBED.update(choices)
        return test

    return mark


@pytest.fixture(params=range(4))
def batch(request: pytest.FixtureRequest) -> Batch:
    return make_batch(request.param)


def group_advantage(rewards: torch.Tensor, k: int) -> float:
    """(r_k - mean) / std, to which a constant group adds nothing: 0 / 0 = 0."""
    r = rewards.tolist()
    return 0.0 if len(set(r)) == 1 else (r[k] - mean(r)) / statistics.stdev(r)


# The policy-gradient term.

CLIP = ("algorithm=grpo", "algorithm/kl=none", "algorithm.advantage.eps=0")
SEQUENCE = ("algorithm.objective.level=sequence", "algorithm.objective.low=0.1", "algorithm.objective.high=0.15")


@transcribes("objective=clip", "advantage=std", "aggregate=sequence_mean", "tokens=all", "correction=none", "kl=none")
def test_gspo(batch: Batch) -> None:
    """GSPO, equations 5 to 7: the mean over outputs of min(s A, clip(s) A), s = (pi / pi_old)^(1 / |y|)."""
    objective = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        tokens = batch.tokens(i, k)
        s = math.prod(batch.ratio(at) for at in tokens) ** (1 / len(tokens))
        a = group_advantage(batch.rewards[i], k)
        objective = objective + smaller(s * a, clip(s, 1 - 0.1, 1 + 0.15) * a) / G
    assert_same(batch, objective / P, *CLIP, *SEQUENCE)


@transcribes("objective=cispo", "aggregate=token_mean")
@pytest.mark.parametrize("low", [None, 0.1])
def test_cispo(batch: Batch, low: float | None) -> None:
    """MiniMax-M1, equations 4 and 5, with and without (as they ran it) a lower bound: sg(clip(r)) A log pi."""
    objective = torch.zeros((), dtype=torch.float64)
    for i in range(P):
        length = sum(len(batch.tokens(i, k)) for k in range(G))
        for k in range(G):
            a = group_advantage(batch.rewards[i], k)
            for at in batch.tokens(i, k):
                weight = clip(batch.ratio(at), -math.inf if low is None else 1 - low, 1 + 0.2).item()
                objective = objective + weight * a * batch.logp[at] / length
    options = ("algorithm/objective=cispo", "algorithm.objective.high=0.2", "algorithm/aggregate=token_mean")
    bound = f"algorithm.objective.low={'null' if low is None else low}"
    assert_same(batch, objective / P, *CLIP, *options, bound, "algorithm.aggregate.scope=group")


@transcribes("objective=sapo")
@pytest.mark.parametrize("tau", [(1.0, 1.05), (3.0, 0.5)])
def test_sapo(batch: Batch, tau: tuple[float, float]) -> None:
    """SAPO, equations 5 and 6: f(r) A, f(x) = sigmoid(tau (x - 1)) 4 / tau, tau by the sign of A."""
    objective = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        a = group_advantage(batch.rewards[i], k)
        t = tau[0] if a > 0 else tau[1]
        for at in batch.tokens(i, k):
            gate = 1 / (1 + torch.exp(-t * (batch.ratio(at) - 1))) * 4 / t
            objective = objective + gate * a / len(batch.tokens(i, k)) / G
    options = (f"algorithm.objective.tau_positive={tau[0]}", f"algorithm.objective.tau_negative={tau[1]}")
    assert_same(batch, objective / P, *CLIP, "algorithm/objective=sapo", *options)


def token_mean(batch: Batch, term: Callable[[tuple[int, int], float], torch.Tensor]) -> torch.Tensor:
    """The mean of `term` over all tokens, given where they are and their output's advantage."""
    total = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        for at in batch.tokens(i, k):
            total = total + term(at, group_advantage(batch.rewards[i], k))
    return total / sum(len(batch.tokens(i, k)) for i, k in outputs())


TOKEN_MEAN = (*CLIP, "algorithm/aggregate=token_mean")


def clipped(batch: Batch, at: tuple[int, int], a: float) -> torch.Tensor:
    """min(r A, clip(r, 0.8, 1.2) A)."""
    return smaller(batch.ratio(at) * a, clip(batch.ratio(at), 0.8, 1.2) * a)


def test_dual_clip(batch: Batch) -> None:
    """Mastering Complex Control in MOBA Games, equation 5: max(min(r A, clip(r) A), c A) where A < 0."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        floor = torch.tensor(1.3 * a, dtype=torch.float64)
        return larger(clipped(batch, at, a), floor) if a < 0 else clipped(batch, at, a)

    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, "algorithm.objective.dual=1.3")


def test_delta(batch: Batch) -> None:
    """INTELLECT-2, section 3.4: min(min(r, delta) A, clip(r) A)."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        r = batch.ratio(at)
        return smaller(clip(r, -math.inf, 1.3) * a, clip(r, 0.8, 1.2) * a)

    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, "algorithm.objective.delta=1.3")


def mean_log_ratio(batch: Batch, row: int) -> float:
    """The mean over the row's tokens of log(pi_old / pi)."""
    return mean([(batch.old[at] - batch.logp[at]).item() for at in batch.tokens(*divmod(row, G))])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_drop_above(batch: Batch, level: str) -> None:
    """DeepSeek-V3.2, equation 9: M = 0 where A < 0 and 1/|o| sum_t log(pi_old / pi) > delta."""
    dropped = {
        row
        for row in range(P * G)
        if group_advantage(batch.rewards[row // G], row % G) < 0 and mean_log_ratio(batch, row) > 0.02
    }

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        if level == "token":
            surrogate = clipped(batch, at, a)
        else:
            tokens = batch.tokens(*divmod(at[0], G))
            ratio = math.prod(batch.ratio(x) for x in tokens) ** (1 / len(tokens))
            surrogate = smaller(ratio * a, clip(ratio, 0.8, 1.2) * a)
        return surrogate * 0 if at[0] in dropped else surrogate

    options = (f"algorithm.objective.level={level}", "algorithm.objective.drop_above=0.02")
    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, *options)


def test_gspo_token(batch: Batch) -> None:
    """GSPO, equations 13 and 14: s_t = sg(s) pi / sg(pi), and an advantage for each token."""
    generator = torch.Generator().manual_seed(7)
    advantages = torch.randn(P * G, T, generator=generator, dtype=torch.float64)
    objective = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        tokens = batch.tokens(i, k)
        s = (math.prod(batch.ratio(at) for at in tokens) ** (1 / len(tokens))).item()
        for at in tokens:
            s_t = s * torch.exp(batch.logp[at]) / math.exp(batch.logp[at].item())
            a = advantages[at].item()
            objective = objective + smaller(s_t * a, clip(s_t, 1 - 0.1, 1 + 0.15) * a) / len(tokens) / (P * G)
    part = built(*CLIP, *SEQUENCE)
    inside = batch.mask.bool()
    loss_BT, sides = part.objective(batch.logp.where(inside, 0.0), batch.old.where(inside, 0.0), advantages, batch.mask)
    loss = ((loss_BT * batch.mask).sum(1) / batch.mask.sum(1)).mean()
    ours, theirs = (torch.autograd.grad(x, batch.logp)[0] for x in (loss, -objective))
    assert (loss + objective).abs() <= 1e-10 * objective.abs()
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    assert all(flags.shape == (P * G, T) for flags in sides.values())


BOUNDS = [[0.05, 0.03], [0.0, 0.0], [math.inf, 0.01], [math.inf, math.inf]]


@transcribes("objective=dppo")
@pytest.mark.parametrize("drift", [0.0, 0.05])
@pytest.mark.parametrize("bounds", table(BOUNDS, 2, pytest.mark.survival), ids=str)
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo(batch: Batch, divergence: str, bounds: list[float], drift: float) -> None:
    """DPPO, equations 12 to 14: M r A, M = 0 where pi has left pi_old's neighbourhood in the direction of A.

    The Bernoulli divergences: TV = |pi - mu|; KL = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). The quadratic
    term is that of prime-rl's default loss.
    """

    batch = replace(batch, old=batch.old.clamp(max=-1e-3))  # a probability is below 1

    def distance(at: tuple[int, int]) -> float:
        mu, pi = math.exp(batch.old[at].item()), math.exp(batch.logp[at].item())
        if divergence == "tv":
            return abs(pi - mu)
        return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        rises = batch.logp[at].item() > batch.old[at].item()
        low, high = bounds
        leaves = (a > 0 and rises and distance(at) > high) or (a < 0 and not rises and distance(at) > low)
        gain = 0.0 * batch.logp[at] if leaves else batch.ratio(at) * a
        return gain - drift * (batch.logp[at] - batch.old[at]) ** 2

    options = [f"algorithm.objective.{k}={v}" for k, v in zip(("low", "high"), bounds, strict=True)]
    options += [f"algorithm.objective.divergence={divergence}", f"algorithm.objective.drift={drift}"]
    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, "algorithm/objective=dppo", *options)


@transcribes("objective=mirror")
@pytest.mark.parametrize("tau", [0.0, 0.1, 2.0])
def test_mirror(batch: Batch, tau: float) -> None:
    """Kimi k1.5, equation 3, token by token: A log pi - tau / 2 log^2(pi / pi_old)."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        return a * batch.logp[at] - tau / 2 * torch.log(batch.ratio(at)) ** 2

    options = ("algorithm/objective=mirror", f"algorithm.objective.tau={tau}")
    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, *options)


@transcribes("objective=geometric")
@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.2)], ids=str)
def test_geometric(batch: Batch, bounds: tuple[float, float]) -> None:
    """GMPO, equation 4: (prod_t min(r^s, clip(r^s, e1, e2))^s)^(1 / |o|) A with s = sgn(A), mean over outputs."""
    low, high = bounds
    objective = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        a = group_advantage(batch.rewards[i], k)
        if a == 0:
            continue
        s, product = (1 if a > 0 else -1), torch.ones((), dtype=torch.float64)
        for at in batch.tokens(i, k):
            r = batch.ratio(at)
            inside = clip(r, math.exp(-low), math.exp(high))
            product = product * smaller(r**s, inside**s) ** s
        objective = objective + product ** (1 / len(batch.tokens(i, k))) * a / (P * G)
    options = ("algorithm/objective=geometric", f"algorithm.objective.low={low}", f"algorithm.objective.high={high}")
    assert_same(batch, objective, *CLIP, *options)


# The gap between sampler and trainer.


def sampling_ratio(batch: Batch, at: tuple[int, int], level: str) -> float:
    """pi_trainer / pi_sampler of a token, or the geometric mean of its sequence's."""
    row = batch.tokens(*divmod(at[0], G)) if level == "sequence" else [at]
    gap = math.prod(math.exp(batch.old[x].item()) / math.exp(batch.sampler[x].item()) for x in row)
    return gap ** (1 / len(row))


@transcribes(
    "correction=token_truncate", "correction=token_mask", "correction=sequence_truncate", "correction=sequence_mask"
)
@pytest.mark.parametrize("bound", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections(batch: Batch, level: str, bound: str) -> None:
    """rho = pi_trainer / pi_sampler times the term; of a sequence the geometric mean (NeMo RL's GRPO guide)."""

    def rho(at: tuple[int, int]) -> float:
        ratio = sampling_ratio(batch, at, level)
        if bound == "mask":
            return ratio if 0.8 <= ratio <= 1.25 else 0.0
        return min(max(ratio, 0.8), 1.25)

    objective = token_mean(batch, lambda at, a: rho(at) * clipped(batch, at, a))
    options = (f"algorithm/correction={level}_{bound}", "algorithm.correction.min=0.8", "algorithm.correction.max=1.25")
    assert_same(batch, objective, *TOKEN_MEAN, *options)


@transcribes("correction=importance")
@pytest.mark.parametrize("weigh", ["none", "token", "sequence"])
@pytest.mark.parametrize("drop", ["none", "token", "sequence"])
def test_weigh_and_drop(batch: Batch, weigh: str, drop: str) -> None:
    """A clamped ratio, of a token or of a sequence's geometric mean, where a ratio is between two others."""

    def rho(at: tuple[int, int]) -> float:
        kept = drop == "none" or 0.75 <= sampling_ratio(batch, at, drop) <= 1.3
        return (1.0 if weigh == "none" else min(max(sampling_ratio(batch, at, weigh), 0.8), 1.25)) * kept

    objective = token_mean(batch, lambda at, a: rho(at) * clipped(batch, at, a))
    values = {"weigh": weigh, "min": 0.8, "max": 1.25, "drop": drop, "low": 0.75, "high": 1.3}
    keys = [f"algorithm.correction.{key}={value}" for key, value in values.items()]
    assert_same(batch, objective, *TOKEN_MEAN, "algorithm/correction=importance", *keys)


@transcribes("correction=sampler")
def test_the_sampler_as_old_policy(batch: Batch) -> None:
    """The ratio's denominator is the sampler, and no weight comes on top."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        r = torch.exp(batch.logp[at]) / torch.exp(batch.sampler[at])
        return smaller(r * a, clip(r, 0.8, 1.2) * a)

    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, "algorithm/correction=sampler")


@transcribes("correction=auto")
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_default_correction(batch: Batch, staleness: int) -> None:
    """None on policy; if completions may be older, rho of at most 2, as in NeMo RL's GRPO guide."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        rho = min(math.exp(batch.old[at].item() - batch.sampler[at].item()), 2.0) if staleness else 1.0
        return rho * clipped(batch, at, a)

    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, f"rollout.max_staleness={staleness}")


# The reference.


@transcribes("kl=k1", "kl=k2", "kl=k3")
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl(batch: Batch, name: str, on_policy: bool) -> None:
    """Schulman's estimators, r = pi_ref / pi; on policy, times pi / pi_old with its gradient (NeMo RL's GRPO guide)."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        r = torch.exp(batch.ref[at]) / torch.exp(batch.logp[at])
        estimate = {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": (r - 1) - torch.log(r)}[name]
        weight = torch.exp(batch.logp[at]) / torch.exp(batch.old[at]) if on_policy else 1.0
        return clipped(batch, at, a) - 0.3 * weight * estimate

    options = (f"algorithm/kl={name}", "algorithm.kl.beta=0.3", f"algorithm.kl.on_policy={on_policy}")
    assert_same(batch, token_mean(batch, term), *CLIP, "algorithm/aggregate=token_mean", *options)


@transcribes("kl=reverse")
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_distillation(batch: Batch, beta: float) -> None:
    """Each token's advantage gains -beta (log pi - log T), a number; its weight is pi / pi_old (verl docs/algo/opd.md,
    Thinking Machines' train_on_policy.py)."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        gain = -beta * (batch.logp[at].item() - batch.ref[at].item())
        return clipped(batch, at, a) + batch.ratio(at) * gain

    options = ("algorithm/kl=reverse", f"algorithm.kl.beta={beta}")
    assert_same(batch, token_mean(batch, term), *CLIP, "algorithm/aggregate=token_mean", *options)


def test_distillation_without_rewards(batch: Batch) -> None:
    """The whole loss is the sampled reverse KL divergence; the sampler is the old policy."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        ratio = torch.exp(batch.logp[at]) / torch.exp(batch.sampler[at])
        return -ratio * (batch.logp[at].item() - batch.ref[at].item())

    algorithm = built("algorithm=opd")
    assert not algorithm.advantages({"r": batch.rewards}).any()
    assert_same(batch, token_mean(batch, term), "algorithm=opd")


def test_a_correction_does_not_change_the_kl_term(batch: Batch) -> None:
    """NeMo RL's guide multiplies "the first term of the loss function" only."""

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        rho = math.exp(batch.old[at].item() - batch.sampler[at].item())
        r = torch.exp(batch.ref[at] - batch.logp[at])
        return (rho if 0.8 <= rho <= 2 else 0.0) * clipped(batch, at, a) - 0.3 * (r - 1 - torch.log(r))

    options = ("algorithm/correction=token_mask", "algorithm.correction.min=0.8", "algorithm/kl=k3")
    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, *options, "algorithm.kl.beta=0.3")


# Entropy.


def quantile(values: list[float], q: float) -> float:
    """The quantile, linear between two values."""
    at = q * (len(values) - 1)
    low, high = sorted(values)[math.floor(at)], sorted(values)[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


@transcribes("tokens=top_entropy")
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_top_entropy(batch: Batch, share: float) -> None:
    """Beyond the 80/20 Rule, equation 6: I[H >= tau] times the term, over the number of all tokens."""
    entropies = [batch.entropy[at].item() for i, k in outputs() for at in batch.tokens(i, k)]
    tau = quantile(entropies, 1 - share)
    assert sum(h >= tau for h in entropies) == pytest.approx(share * len(entropies), abs=1)

    def term(at: tuple[int, int], a: float) -> torch.Tensor:
        r = torch.exp(batch.ref[at] - batch.logp[at])
        indicator = 1.0 if batch.entropy[at].item() >= tau else 0.0
        return indicator * clipped(batch, at, a) - 0.04 * (r - 1 - torch.log(r))

    options = ("algorithm/tokens=top_entropy", f"algorithm.tokens.quantile={share}", "algorithm/kl=k3")
    assert_same(batch, token_mean(batch, term), *TOKEN_MEAN, *options)


@transcribes("entropy=bonus", "entropy=none")
def test_entropy_bonus(batch: Batch) -> None:
    """A3C, section 4: the objective plus coefficient x H of every token."""
    objective = token_mean(batch, lambda at, a: clipped(batch, at, a) + 0.05 * batch.entropy[at])
    assert_same(batch, objective, *TOKEN_MEAN, "algorithm/entropy=bonus", "algorithm.entropy.coefficient=0.05")
    assert_same(batch, token_mean(batch, lambda at, a: clipped(batch, at, a)), *TOKEN_MEAN, "algorithm/entropy=none")


# aggregations of token losses, with given advantages, which are 0 for the first question


def aggregated(batch: Batch, advantages: torch.Tensor, divisor: Callable[[int, int], float]) -> torch.Tensor:
    """The sum of every token's term over the divisor of its question and output."""
    total = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        for at in batch.tokens(i, k):
            kl = torch.exp(batch.ref[at] - batch.logp[at]) - (batch.ref[at] - batch.logp[at]) - 1
            counted = divisor(i, k)
            if math.isfinite(counted):
                total = total + (clipped(batch, at, advantages[i, k].item()) - 0.04 * kl) / counted
    return total


BY_GROUP, INFORMATIVE = "algorithm.aggregate.scope=group", "algorithm.aggregate.informative_only=true"


@transcribes("aggregate=sequence_mean", "aggregate=token_mean", "aggregate=constant")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sequence_mean", "algorithm/aggregate=sequence_mean"),
        ("constant", "algorithm/aggregate=constant algorithm.aggregate.length=7"),
        ("batch", "algorithm/aggregate=token_mean"),
        ("group", f"algorithm/aggregate=token_mean {BY_GROUP}"),
        ("informative batch", f"algorithm/aggregate=token_mean {INFORMATIVE}"),
        ("informative group", f"algorithm/aggregate=token_mean {BY_GROUP} {INFORMATIVE}"),
    ],
)
def test_aggregates(batch: Batch, name: str, options: str) -> None:
    """The divisors; with informative_only, tokens and questions without advantages do not count."""
    lengths = [[len(batch.tokens(i, k)) for k in range(G)] for i in range(P)]
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(P, G, generator=generator, dtype=torch.float64)
    advantages[0] = 0
    counted = range(1, P) if "informative" in name else range(P)
    divisors: dict[str, Callable[[int, int], float]] = {
        "sequence_mean": lambda i, k: P * G * lengths[i][k],
        "constant": lambda i, k: P * G * 7,
        "batch": lambda i, k: sum(sum(lengths[j]) for j in counted) if i in counted else math.inf,
        "group": lambda i, k: len(counted) * sum(lengths[i]) if i in counted else math.inf,
    }
    objective = aggregated(batch, advantages, divisors[name.split()[-1]])
    assert_same(batch, objective, "algorithm=grpo", *options.split(), weights=advantages.reshape(-1))


def test_a_masked_completion_counts_as_a_row_and_not_as_tokens(batch: Batch) -> None:
    """DAPO, section 3.4, overlong filtering: the loss of truncated samples is masked; each is still one of G."""
    cut = {(1, 0), (2, 3)}
    rows = []
    for i, k in outputs():
        n = T if (i, k) in cut else int(batch.mask[i * G + k].nonzero().max()) + 1
        reason, mask = ("length" if (i, k) in cut else "stop"), batch.mask[i * G + k, :n].tolist()
        done = Completion([3] * n, [0.0] * n, reason, 1, mask)
        rows.append(Row.of(Rollout(Prompt("u", [2], "x"), done, "y"), 0.0, i, mask_truncated=True))
    mask = torch.zeros(P * G, T, dtype=torch.long)
    for row, made in enumerate(rows):
        mask[row, : len(made.mask)] = torch.tensor(made.mask)
    masked = replace(batch, mask=mask)
    a = [[group_advantage(batch.rewards[i], k) for k in range(G)] for i in range(P)]
    advantages = torch.tensor(a, dtype=torch.float64)
    total = sum(len(batch.tokens(i, k)) for i, k in outputs() if (i, k) not in cut)
    for divisor, aggregate in (
        (lambda i, k: math.inf if (i, k) in cut else P * G * len(batch.tokens(i, k)), "sequence_mean"),
        (lambda i, k: math.inf if (i, k) in cut else P * G * 256, "constant algorithm.aggregate.length=256"),
        (lambda i, k: math.inf if (i, k) in cut else total, "token_mean"),
    ):
        objective = aggregated(batch, advantages, divisor)
        options = f"algorithm/aggregate={aggregate}".split()
        assert_same(masked, objective, "algorithm=grpo", "algorithm.advantage.eps=0", *options)


# advantages and question weights, with rewards of four questions: with gaps, constant, only one, none


def rewards(seed: int) -> torch.Tensor:
    values = torch.randn(5, G, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values[1, 2] = NAN
    values[2] = 0.1
    values[3, 1:] = NAN
    values[4] = NAN
    return values


def scored(group: list[float]) -> list[float]:
    return [r for r in group if not math.isnan(r)]


def literal_advantage(name: str, eps: float, groups: list[list[float]], i: int, k: int) -> float:
    r, group = groups[i][k], scored(groups[i])
    if math.isnan(r) or len(set(group)) == 1:
        return 0.0
    centre = r - mean(group)
    everything = [x for g in groups for x in scored(g)]
    if name == "std":
        return centre / (statistics.stdev(group) + eps)
    if name == "batch_std":
        return centre / (statistics.stdev(everything) + eps)
    if name == "mad":
        return centre / (mean([abs(x - mean(group)) for x in group]) + eps)
    if name == "leave_one_out":
        return r - (sum(group) - r) / (len(group) - 1)
    if name == "reinforce_pp":
        centred = [x - mean(scored(g)) for g in groups for x in scored(g)]
        return centre / (statistics.stdev(centred) + eps)
    return 0.0 if name == "none" else centre


@transcribes("advantage=std", "advantage=center", "advantage=mad", "advantage=batch_std", "advantage=leave_one_out")
@transcribes("advantage=reinforce_pp", "advantage=none", "question_weight=uniform")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["std", "center", "mad", "batch_std", "leave_one_out", "reinforce_pp", "none"])
def test_advantages(name: str, seed: int) -> None:
    """DeepSeekMath 4.1.2; Dr. GRPO 3.2; MathForge's MAD; Tricks or Traps' batch std; RLOO, equation 9; REINFORCE++."""
    has_eps = name in ("std", "mad", "batch_std", "reinforce_pp")
    for eps in (1e-4, 0.1) if has_eps else (0.0,):
        values = rewards(seed)
        groups = values.tolist()
        expected = [[literal_advantage(name, eps, groups, i, k) for k in range(G)] for i in range(len(groups))]
        options = [f"algorithm.advantage.eps={eps}"] if has_eps else []
        ours = built("algorithm=drgrpo", f"algorithm/advantage={name}", *options).advantages({"r": values})
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-14)
        assert (ours[2:] == 0).all()


@transcribes("advantage=supervised")
def test_supervised_training_is_maximum_likelihood() -> None:
    """-sum_it log pi(o_it) / sum_i |o_i|, whatever the scores are."""
    algorithm = built("algorithm=sft")
    advantages = algorithm.advantages({"r": torch.tensor([[0.0, NAN], [3.0, 3.0]])}).reshape(-1)
    logp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0], [-0.25, -4.0], [-3.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]])
    loss, _ = algorithm.loss(logp, logp.detach(), advantages, mask)
    assert loss.item() == pytest.approx((1.0 + 2.0 + 0.5 + 0.25 + 4.0 + 3.0) / 6)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], -mask / 6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_reinforce_pp_over_tokens(seed: int, eps: float) -> None:
    """OpenRLHF's reinforce_baseline: centred rewards, whitened over the batch's tokens, ddof 0, mean subtracted."""
    values = rewards(seed)
    lengths = torch.randint(0, 6, values.shape, generator=torch.Generator().manual_seed(seed))
    groups = values.tolist()
    centred = [[0.0 if len(set(scored(g))) < 2 else r - mean(scored(g)) for r in g] for g in groups]
    of_tokens = [
        centred[i][k] for i in range(5) for k in range(G) for _ in range(lengths[i, k]) if not math.isnan(groups[i][k])
    ]
    centre, scale = mean(of_tokens), statistics.pstdev(of_tokens) + eps
    expected = [
        [0.0 if math.isnan(groups[i][k]) else (centred[i][k] - centre) / scale for k in range(G)] for i in range(5)
    ]
    options = ("algorithm.advantage.over=tokens", f"algorithm.advantage.eps={eps}")
    part = built("algorithm=reinforce_pp", *options).advantage
    assert part.needs_lengths
    ours = part(values, lengths)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-13)
    lone = part(torch.tensor([[0.1, 0.0, 0.0]], dtype=torch.float64), torch.tensor([[0, 1, 2]]))
    assert not lone.any()  # the std of equal scores, which rounding makes more than 0


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_scaled_by_the_others(seed: int) -> None:
    """NeMo RL's calculate_baseline_and_std_per_prompt and GRPOAdvantageEstimator, with their defaults."""
    binary = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [NAN, 1, 0, 1], [1, NAN, NAN, 0]], dtype=torch.float64)
    values = torch.cat([rewards(seed), binary])
    expected = []
    for group in values.tolist():
        row = []
        for k, r in enumerate(group):
            others = scored(group[:k] + group[k + 1 :])
            if math.isnan(r) or not others:
                row.append(0.0)
                continue
            std = statistics.stdev(others) if len(set(others)) > 1 else 0.0
            row.append((r - mean(others)) / (std + 1e-6 if std > 0 else 1.0) if len(set([*others, r])) > 1 else 0.0)
        expected.append(row)
    ours = built("algorithm=rloo", "algorithm.advantage.scale=others").advantages({"r": values})
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-13)
    assert ours[-4, 0] == 1, "the only right answer is not scaled"
    assert ours[-4, 1].item() == pytest.approx(-math.sqrt(1 / 3), rel=1e-5)


@transcribes("advantage=max_rl")
@pytest.mark.parametrize("seed", range(3))
def test_max_rl(seed: int) -> None:
    """MaxRL: (r - mean) / mean, and 0 where no answer is right."""
    values = rewards(seed).abs()
    values[2] = 0.0
    expected = [
        [0.0 if math.isnan(r) or not any(scored(g)) else (r - mean(scored(g))) / mean(scored(g)) for r in g]
        for g in values.tolist()
    ]
    ours = built("algorithm=maxrl").advantages({"r": values})
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-13)
    with pytest.raises(ConfigError, match=r"algorithm/advantage=max_rl: .* scored -0\.5; choose rewards of 0 or more"):
        built("algorithm=maxrl").advantages({"r": torch.tensor([[1.0, -0.5]])})


@pytest.mark.parametrize("seed", range(3))
def test_several_rewards_are_summed_then_normalised(seed: int) -> None:
    """r = the sum of weight x reward over those that apply; advantage 0 where none does."""
    a, b = rewards(seed), rewards(seed + 10).roll(1, 0)
    groups = [
        [sum(scored([2.0 * x, 0.5 * y])) if scored([x, y]) else NAN for x, y in zip(*rows, strict=True)]
        for rows in zip(a.tolist(), b.tolist(), strict=True)
    ]
    expected = [[literal_advantage("std", 1e-4, groups, i, k) for k in range(G)] for i in range(len(groups))]
    ours = built("algorithm=grpo").advantages({"a": a, "b": b}, {"a": 2.0, "b": 0.5})
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_normalize_then_sum(seed: int) -> None:
    """GDPO: each reward normalised in its group, their weighted sum over the batch."""
    a, b = rewards(seed), rewards(seed + 10).roll(1, 0)
    first, second = a.tolist(), b.tolist()
    sums = [
        [
            2.0 * literal_advantage("std", 1e-4, first, i, k) + 0.5 * literal_advantage("std", 1e-4, second, i, k)
            if scored([first[i][k], second[i][k]])
            else NAN
            for k in range(G)
        ]
        for i in range(len(first))
    ]
    everything = [x for row in sums for x in scored(row)]
    centre, scale = mean(everything), statistics.stdev(everything) + 1e-4
    expected = [[0.0 if math.isnan(x) else (x - centre) / scale for x in row] for row in sums]
    algorithm = built("algorithm=grpo", "algorithm.combine=normalize_then_sum")
    ours = algorithm.advantages({"a": a, "b": b}, {"a": 2.0, "b": 0.5})
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-13)


@transcribes("question_weight=difficulty")
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_difficulty(temperature: float) -> None:
    """MathForge's pull request: (questions - constant ones) x softmax(-mean accuracy / T), constant ones 1.

    A mean accuracy of 0 or NaN is set to 1 in the softmax. The accuracy need not be the score.
    """
    accuracy = [[0.0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [NAN, NAN, NAN, NAN], [NAN, 0, 0, 1], [0, 0, 1, 0]]
    style = [[0.0, 0, 0, 0], [0.3, 0, 0, 0], [0.2, 0.2, 0.2, 0.2], [0.1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0]]
    scores = [[sum(scored([x, y])) for x, y in zip(*rows, strict=True)] for rows in zip(accuracy, style, strict=True)]
    informative = [i for i, group in enumerate(scores) if len(set(group)) > 1]
    assert informative == [0, 1, 3, 4, 5]
    means = {i: mean(scored(accuracy[i]) or [0.0]) or 1.0 for i in informative}
    total = sum(math.exp(-m / temperature) for m in means.values())
    weight = {i: len(informative) * math.exp(-means[i] / temperature) / total for i in informative}
    assert sum(weight.values()) == pytest.approx(len(informative))
    expected = [
        [weight.get(i, 1.0) * (group[k] - mean(group)) if len(set(group)) > 1 else 0.0 for k in range(G)]
        for i, group in enumerate(scores)
    ]
    options = (f"question_weight.temperature={temperature}", "question_weight.reward=accuracy")
    algorithm = built("algorithm=dgpo", "algorithm/advantage=center", *(f"algorithm.{one}" for one in options))
    given = {"style": style, "accuracy": accuracy}
    ours = algorithm.advantages({name: torch.tensor(one, dtype=torch.float64) for name, one in given.items()})
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-14)


@transcribes("keep=all", "keep=dynamic")
def test_dynamic_sampling_keeps_groups_with_right_and_wrong_answers() -> None:
    """DAPO, equation 11: 0 < the number of right outputs < G, for every group of four right or wrong outputs."""
    rights = [[float(n >> bit & 1) for bit in range(G)] for n in range(2**G)]
    wanted = [0 < sum(row) < G for row in rights]
    lengths = torch.linspace(-1, 0, G).expand(len(rights), G)  # an overlong punishment
    rewards = {"accuracy": torch.tensor(rights), "overlong": lengths}
    assert built("algorithm=dapo").kept(rewards).tolist() == wanted
    assert built("algorithm=grpo").kept(rewards).all()


def test_the_overlong_weight_of_the_preset_gives_the_papers_advantages() -> None:
    """DAPO, equations 7 and 13: R = 1 or -1, plus the punishment, has the advantages of 1 or 0 with half of it."""
    right = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    length = torch.tensor([[0.0, -0.3, -1.0, 0.0], [-0.9, 0.0, -0.1, 0.0]], dtype=torch.float64)
    weight = compose(["algorithm=dapo"]).reward.overlong.weight
    algorithm = built("algorithm=dapo", "algorithm.advantage.eps=0")
    ours = algorithm.advantages({"accuracy": right, "overlong": length}, {"overlong": weight})
    r = 2 * right - 1 + length
    torch.testing.assert_close(ours, (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True))


def test_every_choice_of_every_part_has_its_formula_here() -> None:
    """A new part needs its formula in this file."""
    assert set(choices()) == TRANSCRIBED
