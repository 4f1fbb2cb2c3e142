"""How sure a number is: intervals of accuracies and of means over seeds, and a paired test of two evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

CLEAR = 0.01
"""The p-value below which a change counts as one."""
GRID = 256
"""Shares of up to this many samples are exact in the paired test; other values, such as losses, are rounded to this
many parts of the largest difference."""
MANY = 200
"""Problems above which the sum of such values is taken for normal, which is exact enough and much faster."""
MEANS = "± the half width of the 95 % t interval over seeds"
"""What `mean_text` writes, for the caption of a table."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; `t_95` has more."""
AGREEING = 2
"""Pseudo-questions of `interval`: two keep its coverage above 90 % for ten questions and sixteen samples."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over questions, given one value between 0 and 1 for each question.

    Wilson's score interval (1927). A value of 0 or 1 counts as one draw; a mean over several samples counts as more, by
    the design effect: the variance of 0/1 outcomes divided by that of the values (Kish, Survey Sampling, 1965). The
    latter is estimated with `AGREEING` additional questions whose samples all agree, because few questions give a poor
    estimate. Raises ValueError without values.
    """
    n = len(values)
    if not n:
        raise ValueError("a confidence interval needs a value")
    mean = min(max(statistics.fmean(values), 0.0), 1.0)
    of_outcomes = mean * (1 - mean)
    apart = math.fsum((value - mean) ** 2 for value in values) + AGREEING * of_outcomes
    draws = n * max(1.0, of_outcomes * (n - 1 + AGREEING) / apart) if apart > 0 else n
    return wilson(mean, draws)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions with its 95 % confidence interval (`interval`)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from one value for each question; NaN without questions."""
        low, high = interval(values) if values else (math.nan, math.nan)
        return cls(statistics.fmean(values) if values else math.nan, low, high)


@dataclass(frozen=True, slots=True)
class Paired:
    """The change between two evaluations of the same problems."""

    change: float
    """The mean over `problems`."""
    problems: int
    p: float
    """The two-sided p-value."""

    @classmethod
    def of(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Paired | None:
        """Compare values by problem. Problems that only one of them has do not count; None without a common one."""
        common = [name for name in before if name in after]
        differences = [after[name] - before[name] for name in common]
        return cls(statistics.fmean(differences), len(common), sign_flip_p(differences)) if common else None

    @property
    def clear(self) -> bool:
        return self.p < CLEAR

    def __str__(self) -> str:
        p = "p < 0.001" if self.p < 1e-3 else f"p = {self.p:.3f}"
        return f"{p}, paired test over {self.problems:,} problem{'s' if self.problems != 1 else ''}"


def sign_flip_p(differences: Sequence[float]) -> float:
    """The two-sided p-value of the hypothesis that each difference may as well have the opposite sign.

    Fisher's randomisation test (The Design of Experiments, 1935, section 21), exact for shares: the sum over all signs
    has the characteristic function prod_i cos(t d_i). Outcomes as extreme as the sum count half (mid-p), as shares of
    few samples have many ties.
    """
    import numpy as np

    d_N = np.asarray(differences, float)
    if not d_N.any():
        return 1.0
    scales = (n for n in range(1, GRID + 1) if np.allclose(d_N * n, np.rint(d_N * n), atol=1e-6))
    if not (scale := next(scales, 0)) and len(d_N) > MANY:
        return math.erfc(abs(float(d_N.sum())) / math.sqrt(2 * float((d_N**2).sum())))
    steps_N = np.rint(d_N * (scale or GRID / np.abs(d_N).max())).astype(np.int64)
    size = 2 * int(np.abs(steps_N).sum()) + 1
    place_S = np.arange(size)
    spectrum_S = np.ones(size)
    for step, count in zip(*np.unique(np.abs(steps_N), return_counts=True), strict=True):
        spectrum_S *= np.cos(2 * np.pi * (step * place_S % size) / size) ** count
    share_S, sum_S = np.fft.fft(spectrum_S).real / size, np.minimum(place_S, size - place_S)
    seen = abs(int(steps_N.sum()))
    return min(1.0, max(0.0, float(share_S[sum_S > seen].sum() + share_S[sum_S == seen].sum() / 2)))


def wilson(share: float, draws: float) -> tuple[float, float]:
    """Wilson's 95 % score interval (1927) of a share over so many independent draws; it contains the share."""
    z = NormalDist().inv_cdf(0.975)
    center, reach = share + z**2 / (2 * draws), z * math.sqrt(share * (1 - share) / draws + (z / (2 * draws)) ** 2)
    low, high = ((center + side * reach) / (1 + z**2 / draws) for side in (-1, 1))
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """The mean over at least two seeds ± the half width of its 95 % t interval."""
    half = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def t_95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table the expansion of Abramowitz and Stegun, 26.7.5."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    second, third = (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * freedom) + second / freedom**2 + third / freedom**3
