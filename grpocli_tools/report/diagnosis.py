"""The verdict about a run, and warnings where its numbers look wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from grpocli.config import yaml_text
from grpocli.tracking.recorder import MISMATCH_LIMITS
from grpocli_tools.evaluation.significance import CLEAR
from grpocli_tools.report.page_data import HIGH, LOW, Curves, RunWarning, Verdict

FEW_STEPS = 20
"""Steps below which rewards alone allow no verdict: a tenth would be less than two steps."""
ENDS = 5
"""The least number of steps whose rewards are compared at the start and at the end."""
BLOCKS = 5
"""The parts of the first and of the last steps whose means are compared: neighbouring steps are not independent."""
NOISE = 4.604
"""Standard errors by which two means must differ to count as different: the 99.5 % quantile of Student's t with
BLOCKS - 1 degrees of freedom, the fewest that Welch's test can have."""
WINDOW = 10
"""Steps that a warning's numbers are averaged over, because single steps are noisy."""

FULL = 0.95
"""The share of its maximum from which a mean reward counts as solved."""

SPIKE = 20.0
"""A gradient norm is a spike above this multiple of the median; clipping limits smaller ones."""
SAME = 0.5
"""The share of groups with equal rewards up to which a low entropy is harmless."""


Limit = float | Literal["moving"]
MOVING: dict[str, Callable[[float, Mapping[str, Any]], float]] = {
    "entropy collapse": lambda start, _: min(0.1 * start, 0.02),
    "entropy explosion": lambda start, _: max(3 * start, start + 0.5),
    "mismatch": lambda _, flat: MISMATCH_LIMITS.get(str(flat.get("model.dtype")), MISMATCH_LIMITS["bfloat16"]),
    "length growth": lambda start, _: max(3 * start, start + 64),
    "length collapse": lambda start, _: start / 3 if start >= 16 else 0.0,
}
"""{kind: (mean at the start, config) -> limit}."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A warning of warnings.yaml: the mean of a metric over WINDOW steps passes a limit."""

    kind: str
    meaning: str
    advice: str
    metric: str
    chart: str
    seen: str
    """What was seen, with `value` and `start`."""
    above: Limit | None = None
    below: Limit | None = None

    def passes(self, value: float, limit: float) -> bool:
        return value > limit if self.above else value < limit

    def limit(self, start: float, flat: Mapping[str, Any]) -> float:
        moving = MOVING.get(self.kind)
        return moving(start, flat) if moving else float(self.above or self.below or 0.0)


@cache
def texts() -> dict[str, dict[str, Any]]:
    text = files("grpocli_tools.report").joinpath("page", "warnings.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml_text.load(text)
    return found


RULES = [Rule(kind, **one) for kind, one in texts().items() if "metric" in one]
STAGES = ("reward", "sync", "eval", "checkpoint")
"""The stages that should be small beside sampling and training."""


def warnings(curves: Curves, flat: Mapping[str, Any]) -> list[RunWarning]:
    found = [warning for rule in RULES if (warning := _warning(rule, curves, flat))]
    return sorted(
        [*found, *_not_finite(curves), *_slow_stages(curves), *_learning(curves), *_events(curves)],
        key=lambda warning: warning.step,
    )


def _warning(rule: Rule, curves: Curves, flat: Mapping[str, Any]) -> RunWarning | None:
    if rule.kind == "length growth" and (change := _reward_change(curves)) and change[0] == "good":
        return None  # as reasoning grows, which is healthy
    if rule.kind == "mismatch" and _mismatch_expected(curves, flat):
        return None
    if rule.kind in ("KL", "no spread") and has_teacher(flat):
        return None  # a teacher is far at the start, and teaches groups with equal rewards too
    points = curves.series(rule.metric)
    start = statistics.fmean(value for _, value in points[:ENDS]) if points else 0.0
    limit = rule.limit(start, flat)
    for end in range(WINDOW, len(points) + 1):
        step, value = points[end - 1][0], statistics.fmean(value for _, value in points[end - WINDOW : end])
        if not rule.passes(value, limit):
            continue
        if rule.kind == "entropy collapse" and _is_harmless(curves, flat, step):
            continue
        text = f"{rule.seen.format(value=value, start=start)} (the mean of {WINDOW} steps)"
        solved = rule.kind == "no spread" and _solved(curves, flat, step)
        return _made(step, "solved" if solved else rule.kind, text, rule.chart)
    return None


def _mismatch_expected(curves: Curves, flat: Mapping[str, Any]) -> bool:
    """Stale completions come from other weights; constrained decoding changes the sampler's probabilities."""
    constrained = any(flat.get(key) is not None for key in ("rollout.regex", "rollout.json_schema"))
    return constrained or any(value > 0 for _, value in curves.series("staleness/max"))


def _is_harmless(curves: Curves, flat: Mapping[str, Any], step: int) -> bool:
    """Whether a low entropy at a step is harmless: the groups still differ, or there is nothing left to learn."""
    spread = [value for at, value in curves.series("frac_reward_zero_std") if at <= step][-WINDOW:]
    return bool(spread) and (statistics.fmean(spread) <= SAME or _solved(curves, flat, step))


def _solved(curves: Curves, flat: Mapping[str, Any], step: int) -> bool:
    """Whether the mean reward up to a step is near its maximum."""
    rewards = [value for at, value in curves.series("reward") if at <= step][-WINDOW:]
    names = sorted({key.split(".")[1] for key in flat if key.startswith("reward.") and key.count(".") > 1})
    most = sum(_weight(flat, name) * _maximum(flat, name) for name in names)
    return bool(rewards) and most > 0 and statistics.fmean(rewards) >= FULL * most


def _weight(flat: Mapping[str, Any], name: str) -> float:
    weight = flat.get(f"reward.{name}.weight", 1.0)
    return float(weight) if isinstance(weight, int | float) else 1.0


def _maximum(flat: Mapping[str, Any], name: str) -> float:
    """The highest score of a reward: `right` if it has that key, 0 for a punishment, otherwise 1."""
    right = flat.get(f"reward.{name}.right")
    punishes = f"reward.{name}.buffer_tokens" in flat
    return float(right) if isinstance(right, int | float) else 0.0 if punishes else 1.0


def _not_finite(curves: Curves) -> list[RunWarning]:
    return [
        _made(steps[0], "not finite", f"{name} is not a finite number in {len(steps)} steps", name)
        for name in ("loss", "grad_norm")
        if (steps := curves.not_finite.get(name))
    ]


def _made(step: int, kind: str, text: str, chart: str) -> RunWarning:
    shown = "slow stage" if kind.startswith("slow ") else kind
    return RunWarning(step, shown, text, texts()[kind]["meaning"], texts()[kind]["advice"], chart)


def _slow_stages(curves: Curves) -> list[RunWarning]:
    whole = sum(value for _, value in curves.series("time/step"))
    parts = {stage: sum(value for _, value in curves.series(f"time/{stage}")) for stage in STAGES}
    return [
        _made(curves.steps[0], f"slow {stage}", f"{seconds / whole:.0%} of the time is {stage}", "time")
        for stage, seconds in parts.items()
        if len(curves.steps) >= WINDOW and whole and seconds > whole / 2
    ]


def verdict(curves: Curves, state: str, found: Sequence[RunWarning]) -> Verdict:
    """Whether the run learned: by held-out accuracy, otherwise by the reward of the first and last steps."""
    alarms = [warning for warning in found if warning.kind != "solved"]
    look = f"{alarms[0].kind}, from step {alarms[0].step}." if alarms else "the completions of the last step."
    if not curves.steps:
        return Verdict("unclear", "unclear", "The run has no step yet.")
    level, word, text = _by_accuracy(curves) or _by_answers(curves) or _by_steps(curves)
    points, why = curves.comparable("eval/accuracy")
    told = "" if _reward_change(curves) else curves.comparable("reward")[1]
    if why and why != told and len(points) < 2 <= len(curves.series("eval/accuracy")):
        text += f" A resume changed {why}, so accuracies before and after it cannot be compared."
    if state == "failed" and level == "good":
        level, word = "unclear", "unclear"
    return Verdict(level, word, text, look)


def _by_accuracy(curves: Curves) -> tuple[str, str, str] | None:
    """The level, word and text of a verdict; None without two accuracies."""
    name = "eval/accuracy"
    points, lows, highs = curves.comparable(name)[0], dict(curves.series(name + LOW)), dict(curves.series(name + HIGH))
    known = [(step, value) for step, value in points if step in lows and step in highs]
    if len(known) < 2:
        return None
    first, last = known[0][0], known[-1][0]
    spans = [f"{value:.3f} [{lows[step]:.3f}, {highs[step]:.3f}]" for step, value in (known[0], known[-1])]
    numbers = f"from {spans[0]} at step {first} to {spans[1]} at step {last} (95 % Wilson intervals over problems)"
    reason = "the intervals overlap" if lows[last] <= highs[first] and highs[last] >= lows[first] else ""
    if paired := curves.paired(name, first, last):
        numbers, reason = f"{numbers}, {paired}", "" if paired.clear else f"p is not below {CLEAR}"
    if reason:
        return "unclear", "unclear", f"No clear change: held-out accuracy went {numbers}, and {reason}."
    if (paired.change if paired else lows[last] - highs[first]) > 0:
        return "good", "learned", f"It learned: held-out accuracy rose {numbers}."
    return "bad", "got worse", f"It got worse: held-out accuracy fell {numbers}."


def has_teacher(flat: Mapping[str, Any]) -> bool:
    """Whether the reference of a run is a model other than its start policy."""
    return any(value is not None and f"{key}.".startswith("algorithm.kl.model.") for key, value in flat.items())


def _change_verdict(what: str, level: str, numbers: str, lower_is_better: bool = False) -> tuple[str, str, str]:
    """The level, word and text of a verdict for `_change` of what its first word names."""
    if level == "unclear":
        return level, "unclear", f"No clear change: the {what} went {numbers}."
    verb = "rose" if level == "good" else "fell"
    good = (level == "good") != lower_is_better
    return "good" if good else "bad", f"{what.split()[0]} {verb}", f"The {what} {verb} {numbers}."


def _by_answers(curves: Curves) -> tuple[str, str, str] | None:
    """The verdict of supervised training by the loss on held-out answers; None without two of them."""
    held_out = curves.comparable("eval/loss")[0]
    if not curves.series("token_accuracy") or len(held_out) < 2:
        return None
    (first, before), (last, after) = held_out[0], held_out[-1]
    if not (paired := curves.paired("eval/loss", first, last)):
        return None
    level = "unclear" if not paired.clear else "good" if paired.change > 0 else "bad"
    numbers = f"from {before:.3f} at step {first} to {after:.3f} at step {last}, {paired}"
    return _change_verdict("loss on held-out answers", level, numbers, lower_is_better=True)


def _by_steps(curves: Curves) -> tuple[str, str, str]:
    """The verdict by the first and the last steps: of the reward, of the loss on answers, or of the KL to a teacher."""
    metric, what = "reward", "reward"
    if curves.series("token_accuracy"):
        metric, what = "loss", "loss on the answers it learns"
    elif curves.series("kl") and not curves.series("reward"):
        metric, what = "kl", "KL to the teacher"
    points, why = curves.comparable(metric)
    if not points:
        return "unclear", "unclear", f"The rewards of the steps cannot be compared: {why}."
    if len(points) < FEW_STEPS:
        since = f" since a resume changed {why}" if why else ""
        return "unclear", "unclear", f"{len(points)} steps{since} are too few to judge the {what}."
    level, numbers = _change([value for _, value in points])
    numbers += "; there are no held-out accuracies to compare" * (metric == "reward" and level == "good")
    return _change_verdict(what, level, numbers, lower_is_better=metric != "reward")


def _reward_change(curves: Curves) -> tuple[str, str] | None:
    """`_change` of the reward; None for few steps."""
    rewards = [value for _, value in curves.comparable("reward")[0]]
    return _change(rewards) if len(rewards) >= FEW_STEPS else None


def _change(rewards: Sequence[float]) -> tuple[str, str]:
    """The level of the change from the first to the last tenth of the values, and its numbers. A rise is good."""
    n = max(ENDS, len(rewards) // 10 // BLOCKS * BLOCKS)
    (before, first), (after, last) = (_mean_and_error(part) for part in (rewards[:n], rewards[-n:]))
    numbers = (
        f"from {before:.3f} ± {first:.3f} in the first {n} steps to {after:.3f} ± {last:.3f} in the last {n} "
        f"(± standard error of {BLOCKS} block means)"
    )
    clear = abs(after - before) > NOISE * math.hypot(first, last)
    return ("unclear" if not clear else "good" if after > before else "bad"), numbers


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, from the means of BLOCKS equal parts in order."""
    size = len(values) // BLOCKS
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]
    return statistics.fmean(means), statistics.stdev(means) / math.sqrt(BLOCKS)


def _learning(curves: Curves) -> list[RunWarning]:
    """A reward that falls, and an accuracy that falls while the reward rises."""
    change, accuracy = _reward_change(curves), _by_accuracy(curves)
    last = curves.steps[-1] if curves.steps else 0
    if change and change[0] == "bad":
        return [_made(last, "reward falls", f"the reward went {change[1]}", "reward")]
    if change and change[0] == "good" and accuracy and accuracy[0] == "bad":
        return [_made(last, "reward hacking", f"{accuracy[2]} The reward rose {change[1]}", "accuracy")]
    return []


def _events(curves: Curves) -> list[RunWarning]:
    """Spikes of the gradient norm, and rewards that fail."""
    found = []
    norms = curves.series("grad_norm")
    usual = statistics.median(value for _, value in norms) if norms else 0.0
    spikes = [(step, value) for step, value in norms if len(norms) >= FEW_STEPS and value > SPIKE * usual > 0]
    if spikes:
        text = f"the gradient norm is {spikes[0][1]:.3g}, the median {usual:.3g}, in {len(spikes)} steps"
        found.append(_made(spikes[0][0], "gradient spike", text, "grad_norm"))
    for name in curves.metrics:
        failed = [(step, value) for step, value in curves.series(name) if value > 0]
        if failed and name.startswith("rewards/") and name.endswith(("/errors", "/timeouts")):
            text = f"{name} is {failed[0][1]:g}, above 0 in {len(failed)} steps"
            found.append(_made(failed[0][0], "reward errors", text, "reward_errors"))
    return found
