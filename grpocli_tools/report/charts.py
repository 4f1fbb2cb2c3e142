"""The charts of a page: which metrics of metrics.jsonl share a chart, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from grpocli_tools.report.curves import HIGH, LOW
from grpocli_tools.report.page_data import Chart, ChartLine

OTHER = "Other metrics"


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart whose lines are patterns: `*` stands for a name, which the label `*` shows.

    idle: the chart is left out if its metrics have only this value.
    """

    chart: Chart
    lines: tuple[tuple[str, str], ...]
    idle: float | None = None


def _spec(
    section: str,
    id: str,
    title: str,
    help: str,
    *lines: tuple[str, str],
    unit: str = "",
    stacked: bool = False,
    idle: float | None = None,
) -> ChartSpec:
    return ChartSpec(Chart(id, title, section, [], help, unit, stacked), lines, idle)


SPECS = (
    _spec(
        "Rewards",
        "reward",
        "Reward",
        "The mean of the weighted sum of rewards over the completions of the step.",
        ("reward", "reward"),
    ),
    _spec(
        "Rewards",
        "accuracy",
        "Held-out accuracy",
        "The share of right answers on held-out problems, with 95 % intervals over problems.",
        ("eval/accuracy", "temperature 1"),
        ("eval/accuracy_greedy", "greedy"),
    ),
    _spec(
        "Rewards",
        "rewards",
        "Each reward",
        "The mean of each reward over the completions that it applies to.",
        ("rewards/*/mean", "*"),
    ),
    _spec(
        "Rewards",
        "accuracy_tasks",
        "Held-out accuracy of each task",
        "At temperature 1, with 95 % intervals over problems.",
        ("eval/*/accuracy", "*"),
    ),
    _spec(
        "Rewards",
        "held_out_loss",
        "Loss on held-out answers",
        "Supervised training: the mean cross-entropy of their tokens, in nats.",
        ("eval/loss", "held out"),
    ),
    _spec(
        "Rewards",
        "token_accuracy",
        "Tokens of answers that are the most probable ones",
        "Supervised training: their share, of the answers that a step learns and of held-out ones.",
        ("token_accuracy", "learned"),
        ("eval/token_accuracy", "held out"),
    ),
    _spec(
        "Rewards",
        "pass_at_k",
        "Held-out pass@k and maj@k",
        "The share of held-out problems that one of k samples, or their majority, answers right.",
        ("eval/pass@*", "pass@*"),
        ("eval/maj@*", "maj@*"),
    ),
    _spec(
        "Rewards",
        "spread",
        "Spread of the reward",
        "The standard deviation of the reward within a group, averaged over groups.",
        ("reward_std", "standard deviation in a group"),
    ),
    _spec(
        "Rewards",
        "zero_std",
        "Groups without a training signal",
        "The share of groups whose rewards are all equal.",
        ("frac_reward_zero_std", "share of groups"),
    ),
    _spec(
        "Rewards",
        "reward_errors",
        "Completions that could not be scored",
        "Completions that a reward could not score, and those that exceeded its timeout.",
        ("rewards/*/errors", "*"),
        ("rewards/*/timeouts", "* timeouts"),
        idle=0,
    ),
    _spec(
        "Tasks",
        "task_reward",
        "Reward of each task",
        "The mean reward of each task of the mixture.",
        ("task/*/reward", "*"),
    ),
    _spec(
        "Tasks",
        "task_accuracy",
        "Accuracy of each task in training",
        "The share of right answers, by the task's accuracy reward.",
        ("task/*/accuracy", "*"),
    ),
    _spec(
        "Completions",
        "length",
        "Completion length",
        "Tokens that the model wrote.",
        ("completions/mean_length", "mean"),
        ("completions/min_length", "shortest"),
        ("completions/max_length", "longest"),
        unit="tokens",
    ),
    _spec(
        "Completions",
        "truncated",
        "Truncated completions",
        "The share cut off at rollout.max_completion_tokens.",
        ("completions/clipped_ratio", "in training"),
        ("eval/truncated", "in evaluations"),
    ),
    _spec(
        "Completions",
        "turns",
        "Turns of an episode",
        "The model's turns in an episode with an environment.",
        ("completions/mean_turns", "mean"),
        idle=1,
    ),
    _spec(
        "Completions",
        "tools",
        "Calls of tools",
        "Calls of tools for each completion, and those that failed.",
        ("tools/calls", "calls"),
        ("tools/failures", "failed"),
    ),
    _spec(
        "Policy",
        "entropy",
        "Entropy",
        "Entropy of the policy, the mean over the computed tokens.",
        ("entropy", "entropy"),
        unit="nats",
    ),
    _spec(
        "Policy",
        "kl",
        "KL to the reference",
        "The chosen estimate of the KL divergence from the reference model.",
        ("kl", "KL"),
        unit="nats",
    ),
    _spec(
        "Policy",
        "clip",
        "Clip fractions",
        "The share of tokens that the objective clips: below, above, or on either side.",
        ("clip_ratio/region_mean", "either"),
        ("clip_ratio/low_mean", "below"),
        ("clip_ratio/high_mean", "above"),
    ),
    _spec(
        "Policy",
        "router_load",
        "Load of experts",
        "Tokens of the busiest expert of any layer, as a multiple of an equal share.",
        ("router/max_load", "busiest expert"),
    ),
    _spec(
        "Policy",
        "router_loss",
        "Load-balancing loss",
        "The mixture's load-balancing loss, without its weight; the number of experts of a token if it is balanced.",
        ("router/aux_loss", "loss"),
    ),
    _spec(
        "Optimization",
        "grad_norm",
        "Gradient norm",
        "The gradient norm before clipping.",
        ("grad_norm", "gradient norm"),
    ),
    _spec(
        "Optimization",
        "loss",
        "Loss",
        "The minimised loss; for policy gradients it is not a measure of progress.",
        ("loss", "loss"),
    ),
    _spec(
        "Optimization",
        "skipped",
        "Skipped updates",
        "The step's updates whose gradients overflowed float16.",
        ("optim/skipped_updates", "skipped"),
        idle=0,
    ),
    _spec(
        "Optimization", "lr", "Learning rate", "The learning rate of the step's last update.", ("lr", "learning rate")
    ),
    _spec(
        "Sampling",
        "rounds",
        "Rounds of dynamic sampling",
        "How often the step sampled to get enough groups.",
        ("sampling/rounds", "rounds"),
        idle=1,
    ),
    _spec(
        "Sampling",
        "kept",
        "Groups of a step",
        "The groups trained on, and those of them sampled in the step before.",
        ("sampling/kept", "trained on"),
        ("sampling/carried", "sampled in the step before"),
    ),
    _spec(
        "Sampling",
        "acceptance",
        "Acceptance",
        "The share of sampled groups that the step kept.",
        ("sampling/acceptance", "share kept"),
        idle=1,
    ),
    _spec(
        "Sampler and trainer",
        "mismatch",
        "Mismatch of sampler and trainer",
        "The mean of exp |trainer's − sampler's log-prob|, 1 if they agree, and the mean importance ratio.",
        ("token_mult_prob_error", "multiplicative error"),
        ("sampling_importance_ratio", "importance ratio"),
    ),
    _spec(
        "Sampler and trainer",
        "mismatch_kl",
        "Divergence of sampler and trainer",
        "Estimates from the sampled tokens.",
        ("gen_kl_error", "KL(sampler ‖ trainer)"),
        ("policy_kl_error", "KL(trainer ‖ sampler)"),
        ("js_divergence_error", "Jensen-Shannon"),
        unit="nats",
    ),
    _spec(
        "Sampler and trainer",
        "staleness",
        "Staleness",
        "The age of the trained completions in weight versions.",
        ("staleness/mean", "mean"),
        ("staleness/max", "oldest"),
        ("sampling/stale", "groups dropped as too old"),
    ),
    _spec(
        "Time and memory",
        "time",
        "Time by stage",
        "Seconds of one process in each stage of the step.",
        ("time/rollout", "rollout"),
        ("time/train", "train"),
        ("time/reward", "reward"),
        ("time/sync", "sync"),
        ("time/eval", "eval"),
        ("time/checkpoint", "checkpoint"),
        unit="s",
        stacked=True,
    ),
    _spec("Time and memory", "step_time", "Time of a step", "The whole step.", ("time/step", "step"), unit="s"),
    _spec(
        "Time and memory",
        "tokens",
        "Tokens of a step",
        "Tokens sampled, in the loss, and in rows without a gradient.",
        ("tokens/generated", "generated"),
        ("tokens/trained", "trained"),
        ("tokens/skipped", "skipped"),
        unit="tokens",
    ),
    _spec(
        "Time and memory",
        "memory",
        "Peak memory",
        "The peak memory of the main trainer process.",
        ("memory/peak_gib", "peak"),
        unit="GiB",
    ),
)


def charts(
    metrics: Iterable[str], constants: Mapping[str, float] | None = None, copies: frozenset[str] = frozenset()
) -> list[Chart]:
    """The charts that have data, then one for each metric in none of them, so that every metric can be seen.

    constants: the metrics with one value in all steps. Charts that say nothing with it are left out. copies: metrics
    that another one repeats; a chart of nothing else is left out.
    """
    constants = constants or {}
    names = {name for name in metrics if not name.endswith((LOW, HIGH))}
    limits = set(metrics) - names
    used: set[str] = set()
    found = []
    for spec in SPECS:
        lines = [line for pattern, label in spec.lines for line in _lines(pattern, label, names, limits)]
        used |= {line.metric for line in lines}
        if all(line.metric in copies for line in lines):
            continue  # also without a line
        if not (spec.idle is not None and all(constants.get(line.metric) == spec.idle for line in lines)):
            found.append(replace(spec.chart, lines=lines))
    rest = [Chart(f"other_{i}", name, OTHER, [ChartLine(name, name)]) for i, name in enumerate(sorted(names - used))]
    return [*found, *rest]


def _lines(pattern: str, label: str, names: set[str], limits: set[str]) -> list[ChartLine]:
    regex = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
    matches = [(name, match) for name in sorted(names) if (match := regex.fullmatch(name))]
    return [
        ChartLine(
            name,
            label.replace("*", match[1]) if match.groups() else label,
            name + LOW if name + LOW in limits else "",
            name + HIGH if name + HIGH in limits else "",
        )
        for name, match in matches
    ]
