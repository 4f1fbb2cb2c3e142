"""Settings that the sources call equal are equal, on random windows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm.windows import WEIGHTS, Window, choices, deal, run, splits, suited, windows
from composed import built
from hypothesis import given, settings
from hypothesis import strategies as st

from grpocli.algorithm import Algorithm
from grpocli.algorithm.advantage import ReinforcePlusPlus, Std
from grpocli.algorithm.objective import Clip, Geometric

few = settings(max_examples=10)


def rows(window: Window) -> torch.Tensor:
    return torch.arange(len(window.mask))


def assert_equal(
    window: Window,
    one: Algorithm,
    other: Algorithm,
    one_pieces: list[torch.Tensor] | None = None,
    other_pieces: list[torch.Tensor] | None = None,
) -> None:
    """The same loss and gradient in float64, each split in its own way (the whole window unless given)."""
    results = []
    for algorithm, pieces in ((one, one_pieces), (other, other_pieces)):
        advantages = algorithm.advantages(window.rewards, WEIGHTS).reshape(-1)
        results.append(run(algorithm, window, advantages, pieces or [rows(window)], torch.float64))
    torch.testing.assert_close(results[0].loss, results[1].loss, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(results[0].gradient, results[1].gradient, rtol=1e-10, atol=1e-13)


# TRL's pull request on Dr. GRPO: special cases of the mean over the tokens of a local batch, with the KL term


def token_mean(scope: str) -> Algorithm:
    return built("algorithm=grpo", "algorithm/aggregate=token_mean", f"algorithm.aggregate.scope={scope}")


@pytest.mark.slow
@given(window=windows())
@few
def test_a_token_mean_by_micro_batch_with_a_group_in_each_is_one_by_group(window: Window) -> None:
    groups = [rows(window)[window.group_ids == i] for i in window.group_ids.unique()]
    assert_equal(window, token_mean("micro_batch"), token_mean("group"), groups)


@given(window=windows())
@few
def test_a_token_mean_by_micro_batch_with_a_row_in_each_is_the_sequence_mean(window: Window) -> None:
    assert_equal(window, token_mean("micro_batch"), built("algorithm=grpo"), list(rows(window).split(1)))


@given(window=windows(), split=splits())
@few
def test_a_token_mean_by_micro_batch_with_one_of_them_is_one_by_batch(
    window: Window, split: tuple[int, int, int]
) -> None:
    assert_equal(window, token_mean("micro_batch"), token_mean("batch"), None, deal(len(window.mask), split))


def test_a_token_mean_by_micro_batch_depends_on_the_split() -> None:
    """The stated exception: rows of 1 and 3 tokens have other token weights alone than together."""
    algorithm = built("algorithm=drgrpo", "algorithm/aggregate=token_mean", "algorithm.aggregate.scope=micro_batch")
    mask, ones, ids = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.ones(2, 3), torch.tensor([0, 1])
    advantages = torch.tensor([-1.0, 0.5])
    together = algorithm.loss(ones, ones, advantages, mask)[0]
    totals = algorithm.totals(advantages, mask, ids, micro_batches=2)
    apart = [
        algorithm.loss(ones[i], ones[i], advantages[i], mask[i], group_ids=ids[i], totals=totals)[0] for i in ([0], [1])
    ]
    assert together.item() == pytest.approx((1 - 3 * 0.5) / 4)
    assert sum(apart).item() == pytest.approx((1 - 0.5) / 2)


@given(window=windows(), split=splits())
@few
def test_mathforges_two_factors_are_a_mean_over_informative_tokens(window: Window, split: tuple[int, int, int]) -> None:
    """Its pull request to TRL, literally, on processes with uneven token counts, a micro-batch each.

    zero_mask_ratio = tokens / tokens of valid samples (1 where there are none) multiplies the advantages;
    global_balancing_ratio = processes x local tokens / tokens multiplies each process's token mean; gradients of
    processes are averaged. A sample is valid where its group's standard deviation is not 0.
    """
    algorithm = built("algorithm=dgpo")
    advantages = algorithm.advantages(window.rewards, WEIGHTS).reshape(-1)
    scores = algorithm.scores(window.rewards, WEIGHTS)
    valid = torch.tensor([len({x for x in group.tolist() if x == x}) > 1 for group in scores])
    valid = valid.repeat_interleave(scores.shape[1])
    lengths = window.mask.sum(1)
    tokens, valid_tokens = int(lengths.sum()), int(lengths[valid].sum())
    zero_mask_ratio = tokens / valid_tokens if valid_tokens else 1.0
    leaf = window.logp.clone().requires_grad_()
    shares = deal(len(lengths), (split[0], split[1], len(lengths)))
    processes = len(shares)
    loss = leaf.nan_to_num().sum() * 0
    for share in shares:
        local = int(lengths[share].sum())
        balancing_ratio = processes * local / max(tokens, 1)
        total = leaf.new_zeros(())
        for row in share.tolist():
            a = advantages[row] * zero_mask_ratio
            for t in range(leaf.shape[1]):
                if window.mask[row, t]:
                    r = torch.exp(leaf[row, t] - window.old[row, t])
                    total = total - torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        loss = loss + total / max(local, 1) * balancing_ratio / processes
    gradient = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]
    ours = run(algorithm, window, advantages, deal(len(lengths), split), torch.float64)
    torch.testing.assert_close(ours.loss, loss.detach(), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ours.gradient[: len(lengths)], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@given(window=windows(), split=splits())
@few
def test_dapo_with_equal_clips_and_no_filter_is_grpo_with_a_token_mean(
    window: Window, split: tuple[int, int, int]
) -> None:
    dapo = built("algorithm=dapo", "algorithm.objective.high=0.2", "algorithm/keep=all")
    grpo = built("algorithm=grpo", "algorithm/kl=none", "algorithm/aggregate=token_mean")
    assert dapo == grpo
    assert_equal(window, dapo, grpo, None, deal(len(window.mask), split))
    with_kl = built("algorithm=dapo", "algorithm.objective.high=0.2", "algorithm/keep=all", "algorithm/kl=k3")
    assert_equal(window, with_kl, token_mean("batch"))


# Parts that are others' special cases.


@pytest.mark.parametrize("name", [*choices("objective"), "sequence level"])
@given(window=windows())
@few
def test_on_policy_every_objective_has_the_plain_policy_gradient(name: str, window: Window) -> None:
    """If pi = pi_old, the gradient of a token is -A / (rows |o|) for every objective."""
    overrides = choices("objective").get(name, ("algorithm.objective.level=sequence",))
    algorithm = built("algorithm=grpo", "algorithm/kl=none", *overrides)
    advantages = algorithm.advantages(window.rewards, WEIGHTS).reshape(-1)
    leaf = window.logp.clone().requires_grad_()
    loss, _ = algorithm.loss(leaf, window.logp, advantages, window.mask, group_ids=window.group_ids)
    expected = -advantages[:, None] * window.mask / (len(advantages) * window.mask.sum(1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected, rtol=1e-10, atol=1e-13)


@given(window=windows())
@few
def test_on_policy_distillation_has_the_gradient_of_k2(window: Window) -> None:
    """If pi = pi_old, both have beta (log pi - log T) for each token; off-policy only `reverse` has the ratio."""
    reverse, k2 = (built("algorithm=opd", f"algorithm/kl={kl}", "algorithm.kl.beta=0.3") for kl in ("reverse", "k2"))
    gradients = []
    for algorithm in (reverse, k2):
        leaf = window.logp.clone().requires_grad_()
        options = {"group_ids": window.group_ids, "ref_logp": window.ref}
        loss, _ = algorithm.loss(leaf, window.logp, torch.zeros(len(leaf)).double(), window.mask, **options)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-13)
    at_the_teacher, _ = reverse.loss(leaf, window.old, torch.zeros(len(leaf)), window.mask, ref_logp=leaf.detach())
    assert torch.autograd.grad(at_the_teacher, leaf)[0].eq(0).all()


FILTER = ("algorithm/correction=importance", "algorithm.correction.weigh=none", "algorithm.correction.drop=sequence")


@given(window=windows())
@few
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("algorithm/tokens=top_entropy", "algorithm.tokens.quantile=1"), ()),
        (("algorithm/entropy=bonus", "algorithm.entropy.coefficient=0"), ()),
        (("algorithm.kl.beta=0",), ("algorithm/kl=none",)),
        (("algorithm/correction=token_truncate", "algorithm.correction.min=1", "algorithm.correction.max=1"), ()),
        (("algorithm.objective.delta=1e6", "algorithm.objective.dual=1e6"), ()),
        (("algorithm/correction=importance", "algorithm.correction.weigh=none"), ()),
        ((*FILTER, "algorithm.correction.low=0", "algorithm.correction.high=inf"), ()),
        (("algorithm.advantage_min=-1e9", "algorithm.advantage_max=1e9"), ()),
        (("algorithm.objective.drop_above=1e6",), ()),
        (("algorithm.objective.drop_above=null",), ()),
        (("algorithm/objective=cispo", "algorithm.objective.low=null"), ("algorithm/objective=cispo",)),
        (("algorithm/objective=cispo", "algorithm.objective.low=1"), ("algorithm/objective=cispo",)),
        (
            ("algorithm/objective=dppo", "algorithm.objective.low=1", "algorithm.objective.high=1"),  # of probabilities
            ("algorithm/objective=dppo", "algorithm.objective.low=.inf", "algorithm.objective.high=.inf"),
        ),
        (  # -r A
            ("algorithm/objective=dppo", "algorithm.objective.low=inf", "algorithm.objective.high=inf"),
            ("algorithm.objective.low=1", "algorithm.objective.high=inf"),
        ),
        (("algorithm/objective=mirror", "algorithm.objective.tau=0"), ("algorithm/objective=policy_gradient",)),
        (
            ("algorithm/objective=policy_gradient",),
            ("algorithm/objective=cispo", "algorithm.objective.low=0", "algorithm.objective.high=0"),
        ),
        (  # the geometric mean of a completion's ratios
            ("algorithm/objective=clip_gspo", "algorithm.objective.low=1", "algorithm.objective.high=inf"),
            ("algorithm/objective=geometric", "algorithm.objective.low=inf", "algorithm.objective.high=inf"),
        ),
        (
            ("algorithm/advantage=leave_one_out", "algorithm.advantage.scale=none"),
            ("algorithm/advantage=leave_one_out",),
        ),
    ],
)
def test_a_part_with_a_neutral_value_does_nothing(one: tuple[str, ...], other: tuple[str, ...], window: Window) -> None:
    assert_equal(window, built("algorithm=grpo", *one), built("algorithm=grpo", *other))


@given(window=windows(), low=st.floats(0, 0.9), high=st.floats(0, 3))
@few
def test_the_geometric_mean_of_one_token_is_the_clipped_ratio(window: Window, low: float, high: float) -> None:
    """GMPO's bounds in nats are those of the ratio, 1 - low and 1 + high."""
    one_token = replace(window, mask=window.mask * (window.mask.cumsum(1) == 1))
    grpo = built("algorithm=grpo")
    geometric = replace(grpo, objective=Geometric(low=-math.log1p(-low), high=math.log1p(high)))
    assert_equal(one_token, geometric, replace(grpo, objective=Clip(low, high)))


EVERY_OBJECTIVE = {
    **choices("objective"),
    "sequence level": ("algorithm.objective.level=sequence", "algorithm.objective.drop_above=0.1"),
    "dual and delta": ("algorithm.objective.dual=1.3", "algorithm.objective.delta=1.5"),
    "drop_above": ("algorithm.objective.drop_above=0.1",),
    "kl and drift": ("algorithm/objective=dppo_drift", "algorithm.objective.divergence=kl"),
}


@pytest.mark.parametrize("name", [name for name in EVERY_OBJECTIVE if name != "objective=geometric"])
@given(window=windows())
@settings(max_examples=5)
def test_equal_advantages_of_tokens_are_the_advantage_of_the_row(name: str, window: Window) -> None:
    """[B, T] with equal columns, whatever is outside of the mask, has the loss and gradient of [B]."""
    overrides = ("algorithm=dgpo", "algorithm/correction=token_truncate", *EVERY_OBJECTIVE[name])
    algorithm = built(*overrides)
    advantages_B = algorithm.advantages(window.rewards, WEIGHTS).reshape(-1)
    # only the advantages of rows could tell that a row without tokens has one, which counts for a group
    advantages_B = advantages_B.where(window.mask.any(1), 0.0)
    results = []
    for advantages in (advantages_B, advantages_B[:, None].where(window.mask.bool(), float("nan"))):
        leaf = window.logp.clone().requires_grad_()
        loss, _ = algorithm.loss(leaf, window.old, advantages, window.mask, group_ids=window.group_ids)
        clipped_BT = algorithm.clipped(leaf, window.old, advantages, window.mask)
        results.append((loss, torch.autograd.grad(loss, leaf)[0], clipped_BT))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


@given(window=windows(), length=st.integers(1, 9))
@few
def test_the_batch_of_one_question_or_of_equal_lengths(window: Window, length: int) -> None:
    """REINFORCE++-baseline of one question is GRPO's std; over tokens of equally long completions the ddof is 0."""
    scores = built("algorithm=grpo").scores(window.rewards, WEIGHTS)
    for group in scores.split(1):
        torch.testing.assert_close(ReinforcePlusPlus(eps=1e-3)(group), Std(eps=1e-3)(group), rtol=1e-10, atol=1e-13)
    n = int((~scores.isnan()).sum())
    by_tokens = ReinforcePlusPlus("tokens", eps=0.0)(scores, torch.full(scores.shape, length))
    by_samples = ReinforcePlusPlus(eps=0.0)(scores)
    torch.testing.assert_close(by_tokens, by_samples * math.sqrt(n / max(n - 1, 1)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(choices("correction").keys() - {"correction=sampler"}))
@given(window=windows(), factor=st.floats(0.6, 1.9))
@few
def test_a_correction_with_one_ratio_is_a_factor(name: str, window: Window, factor: float) -> None:
    """If every token has the same pi_trainer / pi_sampler, within bounds, every correction multiplies by it."""
    plain = built("algorithm=drgrpo")
    corrected = built("algorithm=drgrpo", *choices("correction")[name])
    advantages = plain.advantages(window.rewards, WEIGHTS).reshape(-1)
    rows, sampler = (window.logp, window.old, advantages, window.mask), window.old - torch.tensor(factor).log()
    results = [one.loss(*rows, group_ids=window.group_ids, rollout_logp=sampler)[0] for one in (plain, corrected)]
    expected = results[0] * (1 if name in ("correction=none", "correction=auto") else factor)
    torch.testing.assert_close(results[1], expected, rtol=1e-6, atol=1e-12)


@given(window=windows())
@few
def test_the_sampler_as_old_policy_is_an_uncorrected_old_policy(window: Window) -> None:
    """The loss is the one whose old policy's log-probs are the sampler's."""
    plain, bypass = (built("algorithm=grpo", f"algorithm/correction={name}") for name in ("none", "sampler"))
    advantages = plain.advantages(window.rewards, WEIGHTS).reshape(-1)
    given = {"group_ids": window.group_ids, "ref_logp": window.ref, "rollout_logp": window.sampler}
    given_old, given_rollout = (
        algorithm.loss(window.logp, old, advantages, window.mask, **given)[0]
        for algorithm, old in ((plain, window.sampler), (bypass, window.old))
    )
    torch.testing.assert_close(given_old, given_rollout, rtol=0, atol=0)


@pytest.mark.parametrize("name", choices("correction"))
def test_a_correction_carries_no_gradient(name: str) -> None:
    """The loss has a gradient only with respect to the policy's log-probs."""
    algorithm = built("algorithm=drgrpo", *choices("correction")[name])
    logp, sampler = torch.full((2, 3), -1.0, requires_grad=True), torch.full((2, 3), -1.1, requires_grad=True)
    loss, _ = algorithm.loss(logp, logp.detach(), torch.tensor([1.0, -0.5]), torch.ones(2, 3), rollout_logp=sampler)
    by_policy, by_sampler = torch.autograd.grad(loss, [logp, sampler], allow_unused=True)
    assert by_policy.ne(0).all()
    assert by_sampler is None


@pytest.mark.slow
@given(window=windows())
@few
def test_leave_one_out_is_the_centred_score_times_n_over_n_minus_1(window: Window) -> None:
    """The advantages of RLOO and Dr. GRPO differ by a factor of the number of scores."""
    scores = built("algorithm=grpo").scores(window.rewards, WEIGHTS)
    n = (~scores.isnan()).sum(1, keepdim=True)
    rloo, center = (
        built("algorithm=drgrpo", f"algorithm/advantage={name}").advantages(window.rewards, WEIGHTS)
        for name in ("leave_one_out", "center")
    )
    torch.testing.assert_close(rloo * (n - 1), center * n, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@given(window=windows())
@few
def test_a_completion_without_a_score_is_left_out_of_its_group(window: Window) -> None:
    """Its advantage is 0, and the other advantages are those of the group without it."""
    for name, overrides in choices("advantage").items():
        if name == "advantage=supervised":  # needs no scores
            continue
        algorithm = built("algorithm=grpo", *overrides)
        for i in range(len(window.rewards["a"])):
            group = {r: values[i : i + 1] for r, values in suited(algorithm, window.rewards).items()}
            there = ~torch.stack(list(group.values())).isnan().all(0)[0]
            whole = algorithm.advantages(group, WEIGHTS)[0]
            assert whole[~there].eq(0).all(), name
            if there.any():
                part = algorithm.advantages({reward: v[:, there] for reward, v in group.items()}, WEIGHTS)[0]
                torch.testing.assert_close(whole[there], part, rtol=1e-10, atol=1e-13)


def test_rewards_that_apply_to_no_completion_give_no_gradient() -> None:
    for name in choices("advantage", "question_weight"):
        algorithm = built("algorithm=grpo", f"algorithm/{name}")
        expected = 1 if name == "advantage=supervised" else 0  # supervised training needs no scores
        assert algorithm.advantages({"r": torch.full((2, 3), float("nan"))}).eq(expected).all()
