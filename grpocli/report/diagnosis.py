"""The verdict about a run, and warnings where its numbers look wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpocli.report.curves import HIGH, LOW, Curves
from grpocli.report.page_data import RunWarning, Verdict
from grpocli.tracking.recorder import MISMATCH_LIMITS

FEW_STEPS = 20
"""Steps below which rewards alone allow no verdict: a tenth would be less than two steps."""
ENDS = 5
"""The least number of steps whose rewards are compared at the start and at the end."""
NOISE = 3.0
"""Standard errors by which two means must differ to count as different; a run has many numbers to look at."""
WINDOW = 10
"""Steps that a warning's numbers are averaged over, because single steps are noisy."""

SPIKE = 20.0
"""A gradient norm is a spike above this multiple of the median; clipping limits smaller ones."""
STALE = 0.1
"""The share of steps that may drop groups as too old: a few do after a resume."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A warning: the mean of `metric` over WINDOW steps passes the limit. limit: (start mean, config) -> limit."""

    kind: str
    metric: str
    limit: Callable[[float, Mapping[str, Any]], float]
    below: bool
    chart: str
    seen: str
    meaning: str
    advice: str


def _mismatch(start: float, flat: Mapping[str, Any]) -> float:
    return MISMATCH_LIMITS["float32" if flat.get("model.dtype") == "float32" else "bfloat16"]


RULES = (
    Rule(
        "entropy collapse",
        "entropy",
        lambda start, _: min(0.1 * start, 0.02),
        True,
        "entropy",
        "the entropy is {value:.3g} nats, from {start:.3g}",
        "The policy samples nearly the same text each time, so groups hardly differ and exploration ends.",
        "Raise algorithm.objective.high or rollout.temperature, or lower optim.lr.",
    ),
    Rule(
        "entropy explosion",
        "entropy",
        lambda start, _: max(3 * start, start + 0.5),
        False,
        "entropy",
        "the entropy is {value:.3g} nats, from {start:.3g}",
        "The policy becomes random; rewards usually fall soon after.",
        "Lower optim.lr.",
    ),
    Rule(
        "no spread",
        "frac_reward_zero_std",
        lambda *_: 0.9,
        False,
        "zero_std",
        "{value:.0%} of the groups have equal rewards",
        "Groups with equal rewards have no training signal: the problems are too hard or too easy.",
        "Choose problems of another difficulty, raise rollout.group_size, or use algorithm/keep=dynamic.",
    ),
    Rule(
        "truncation",
        "completions/clipped_ratio",
        lambda *_: 0.5,
        False,
        "truncated",
        "{value:.0%} of the completions are cut off",
        "A completion that is cut off usually has no answer, and its reward says little.",
        "Raise rollout.max_completion_tokens.",
    ),
    Rule(
        "mismatch",
        "token_mult_prob_error",
        _mismatch,
        False,
        "mismatch",
        "token_mult_prob_error is {value:.3f}",
        "The sampler and the trainer give the same tokens different probabilities.",
        "Try model.dtype=float32, or algorithm/correction=token_truncate.",
    ),
    Rule(
        "KL",
        "kl",
        lambda *_: 1.0,
        False,
        "kl",
        "the KL to the reference is {value:.3g} nats per token",
        "The policy has moved far from the reference model.",
        "Raise algorithm.kl.beta or lower optim.lr.",
    ),
    Rule(
        "clipping",
        "clip_ratio/region_mean",
        lambda *_: 0.3,
        False,
        "clip",
        "{value:.0%} of the tokens are clipped",
        "The policy moves too far within a step, so many tokens have no gradient.",
        "Lower optim.lr, train.epochs or train.minibatches.",
    ),
    Rule(
        "length growth",
        "completions/mean_length",
        lambda start, _: max(3 * start, start + 64),
        False,
        "length",
        "the mean length is {value:.0f} tokens, from {start:.0f}",
        "Longer completions cost time; without a higher reward they gain nothing.",
        "Lower rollout.max_completion_tokens, or use the reward overlong.",
    ),
    Rule(
        "length collapse",
        "completions/mean_length",
        lambda start, _: start / 3 if start >= 16 else 0.0,
        True,
        "length",
        "the mean length is {value:.0f} tokens, from {start:.0f}",
        "The model stops reasoning, perhaps because a reward favours short texts.",
        "Read the completions and check the rewards.",
    ),
    Rule(
        "low acceptance",
        "sampling/acceptance",
        lambda *_: 0.2,
        True,
        "acceptance",
        "{value:.0%} of the groups are kept",
        "Most of the sampled completions are thrown away.",
        "Choose problems of another difficulty.",
    ),
)

STAGES = ("reward", "sync", "eval", "checkpoint")
"""The stages that should be small beside sampling and training."""


def warnings(curves: Curves, flat: Mapping[str, Any]) -> list[RunWarning]:
    """Warnings in the order of their first steps."""
    found = [warning for rule in RULES if (warning := _warning(rule, curves, flat))]
    return sorted(
        [*found, *_not_finite(curves), *_slow_stages(curves), *_learning(curves), *_events(curves)],
        key=lambda warning: warning.step,
    )


def _warning(rule: Rule, curves: Curves, flat: Mapping[str, Any]) -> RunWarning | None:
    if rule.kind == "length growth" and (change := _reward_change(curves)) and change[0] == "good":
        return None  # as reasoning grows, which is healthy
    if rule.kind == "mismatch" and any(value > 0 for _, value in curves.series("staleness/max")):
        return None  # the weights differ, too
    points = curves.series(rule.metric)
    if len(points) < WINDOW:
        return None
    start = statistics.fmean(value for _, value in points[:ENDS])
    limit = rule.limit(start, flat)
    for end in range(WINDOW, len(points) + 1):
        value = statistics.fmean(value for _, value in points[end - WINDOW : end])
        if value < limit if rule.below else value > limit:
            text = f"{rule.seen.format(value=value, start=start)} (the mean of {WINDOW} steps)"
            return RunWarning(points[end - 1][0], rule.kind, text, rule.meaning, rule.advice, rule.chart)
    return None


def _not_finite(curves: Curves) -> list[RunWarning]:
    meaning = "The update cannot be trusted: an overflow, or a batch without a token in the loss."
    return [
        RunWarning(
            steps[0],
            "not finite",
            f"{name} is not a finite number in {len(steps)} steps",
            meaning,
            "Lower optim.lr, or try model.dtype=float32.",
            name,
        )
        for name in ("loss", "grad_norm")
        if (steps := curves.not_finite.get(name))
    ]


def _slow_stages(curves: Curves) -> list[RunWarning]:
    whole = sum(value for _, value in curves.series("time/step"))
    parts = {stage: sum(value for _, value in curves.series(f"time/{stage}")) for stage in STAGES}
    advice = {
        "reward": "Choose a faster reward, or one with worker processes.",
        "sync": "Raise sync.verify_every.",
        "eval": "Raise eval.every, or lower eval.problems.",
        "checkpoint": "Raise checkpoint.every.",
    }
    return [
        RunWarning(
            curves.steps[0],
            "slow stage",
            f"{seconds / whole:.0%} of the time is {stage}",
            "Sampling and training should take most of the time.",
            advice[stage],
            "time",
        )
        for stage, seconds in parts.items()
        if len(curves.steps) >= WINDOW and whole and seconds > whole / 2
    ]


def verdict(curves: Curves, state: str, found: Sequence[RunWarning]) -> Verdict:
    """Whether the run learned: by held-out accuracy, otherwise by the reward of the first and last steps."""
    look = (
        f"Look first at {found[0].kind}, step {found[0].step}."
        if found
        else "Look first at the completions of the last step."
    )
    if not curves.steps:
        return Verdict("unclear", "The run has no step yet.", "")
    judged = _by_accuracy(curves) or _by_reward(curves)
    return Verdict("unclear" if state == "failed" and judged[0] == "good" else judged[0], judged[1], look)


def _by_accuracy(curves: Curves) -> tuple[str, str] | None:
    name = "eval/accuracy"
    points, lows, highs = curves.series(name), dict(curves.series(name + LOW)), dict(curves.series(name + HIGH))
    known = [(step, value) for step, value in points if step in lows and step in highs]
    if len(known) < 2:
        return None
    first, last = known[0][0], known[-1][0]
    spans = [f"{value:.3f} [{lows[step]:.3f}, {highs[step]:.3f}]" for step, value in (known[0], known[-1])]
    numbers = f"from {spans[0]} at step {first} to {spans[1]} at step {last} (95 % Wilson intervals over problems)"
    if lows[last] > highs[first]:
        return "good", f"It learned: held-out accuracy rose {numbers}."
    if highs[last] < lows[first]:
        return "bad", f"It got worse: held-out accuracy fell {numbers}."
    return "unclear", f"No clear change: held-out accuracy went {numbers}, and the intervals overlap."


def _by_reward(curves: Curves) -> tuple[str, str]:
    change = _reward_change(curves)
    if change is None:
        return "unclear", f"{len(curves.series('reward'))} steps are too few to judge the reward."
    level, numbers = change
    if level == "unclear":
        return level, f"No clear change: the reward went {numbers}."
    if level == "good":
        return level, f"The reward rose {numbers}; there is no held-out accuracy."
    return level, f"The reward fell {numbers}."


def _reward_change(curves: Curves) -> tuple[str, str] | None:
    """The level of the change from the first to the last tenth of the steps, and its numbers; None for few steps."""
    rewards = [value for _, value in curves.series("reward")]
    if len(rewards) < FEW_STEPS:
        return None
    n = max(ENDS, len(rewards) // 10)
    (before, first), (after, last) = (_mean_and_error(part) for part in (rewards[:n], rewards[-n:]))
    numbers = (
        f"from {before:.3f} ± {first:.3f} in the first {n} steps to {after:.3f} ± {last:.3f} in the last {n} "
        "(± standard error)"
    )
    clear = abs(after - before) > NOISE * math.hypot(first, last)
    return ("unclear" if not clear else "good" if after > before else "bad"), numbers


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _learning(curves: Curves) -> list[RunWarning]:
    """A reward that falls, and an accuracy that falls while the reward rises."""
    change, accuracy = _reward_change(curves), _by_accuracy(curves)
    last = curves.steps[-1] if curves.steps else 0
    found = []
    if change and change[0] == "bad":
        advice = "Lower optim.lr, or raise algorithm.kl.beta."
        found.append(
            RunWarning(
                last, "reward falls", f"the reward went {change[1]}", "The update harms the policy.", advice, "reward"
            )
        )
    if change and change[0] == "good" and accuracy and accuracy[0] == "bad":
        meaning = "The model may exploit the reward instead of solving the problems."
        found.append(
            RunWarning(
                last,
                "reward hacking",
                f"{accuracy[1]} The reward rose {change[1]}",
                meaning,
                "Read completions of high reward, and choose stricter rewards.",
                "accuracy",
            )
        )
    return found


def _events(curves: Curves) -> list[RunWarning]:
    """Spikes of the gradient norm, rewards that fail, and groups that are dropped as too old."""
    found = []
    norms = curves.series("grad_norm")
    usual = statistics.median(value for _, value in norms) if norms else 0.0
    spikes = [(step, value) for step, value in norms if len(norms) >= FEW_STEPS and value > SPIKE * usual > 0]
    if spikes:
        text = f"the gradient norm is {spikes[0][1]:.3g}, the median {usual:.3g}, in {len(spikes)} steps"
        found.append(
            RunWarning(
                spikes[0][0],
                "gradient spike",
                text,
                "Single batches dominate the update.",
                "Lower optim.max_grad_norm or optim.lr.",
                "grad_norm",
            )
        )
    for name in curves.metrics:
        failed = [(step, value) for step, value in curves.series(name) if value > 0]
        if failed and name.startswith("rewards/") and name.endswith(("/errors", "/timeouts")):
            text = f"{name} is {failed[0][1]:g}, above 0 in {len(failed)} steps"
            found.append(
                RunWarning(
                    failed[0][0],
                    "reward errors",
                    text,
                    "Completions have no score, or a wrong one.",
                    "Check the reward with grpocli reward-check.",
                    "reward_errors",
                )
            )
    stale = [(step, value) for step, value in curves.series("sampling/stale") if value > 0]
    if len(stale) > len(curves.steps) * STALE:
        text = f"groups were dropped as too old in {len(stale)} steps"
        found.append(
            RunWarning(
                stale[0][0],
                "staleness",
                text,
                "Sampled completions are thrown away.",
                "Raise rollout.max_staleness.",
                "staleness",
            )
        )
    return found
