"""What the samples of a question say about a model: pass@k, maj@k, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000


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


def interval(
    values: Sequence[float], seed: int = 0, mean: Callable[[np.ndarray], np.ndarray] = lambda x: x.mean(1)
) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over questions, by bootstrap: questions are drawn with replacement."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = np.asarray(values)[generator.integers(len(values), size=(RESAMPLES, len(values)))]
    low, high = np.quantile(mean(drawn), (0.025, 0.975))
    return float(low), float(high)
