"""What the samples of a question say about a model: pass@k, maj@k, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

AGREEING = 2
"""Questions: as many as keep the coverage of `interval` above 90 % for ten questions and sixteen samples."""


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that any of k samples is right, of `samples` of which `right` are: 1 - C(n - c, k) / C(n, k).

    Unbiased (arXiv 2107.03374, equation 1). Raises ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(votes: Sequence[str], right: Sequence[bool]) -> float:
    """1 where the answer that most samples give is right, 0 where it is not; ties are decided by chance.

    votes: each sample's answer. right: whether it is, which may differ between equal answers: their mean counts.
    """
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for vote, verdict in zip(votes, right, strict=True):
        verdicts[vote].append(verdict)
    most = max(map(len, verdicts.values()))
    return float(np.mean([np.mean(found) for found in verdicts.values() if len(found) == most]))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over questions, from a value between 0 and 1 for each.

    Wilson's score interval (1927). Values of 0 and 1 count as one draw each; shares of several samples count as more,
    by the design effect: the variance of 0/1 outcomes over that of the values (Kish, Survey Sampling, 1965). The latter
    is estimated as if there were `AGREEING` more questions whose samples all agree, since few questions say little of
    it. Raises ValueError without a value.
    """
    n = len(values)
    if not n:
        raise ValueError("a confidence interval needs a value")
    mean = min(max(float(np.mean(values)), 0.0), 1.0)
    of_outcomes = mean * (1 - mean)
    apart = float(np.square(np.asarray(values) - mean).sum()) + AGREEING * of_outcomes
    draws = n * max(1.0, of_outcomes * (n - 1 + AGREEING) / apart) if apart > 0 else n
    z = NormalDist().inv_cdf(0.975)
    center, reach = mean + z**2 / (2 * draws), z * math.sqrt(of_outcomes / draws + (z / (2 * draws)) ** 2)
    low, high = ((center + side * reach) / (1 + z**2 / draws) for side in (-1, 1))
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))
