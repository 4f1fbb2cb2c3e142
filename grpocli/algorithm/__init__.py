"""The algorithms: seven small parts, composed. See `Algorithm`."""

from grpocli.algorithm import advantage, aggregate, correction, keep, kl, objective, question_weight
from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.algorithm import Algorithm

__all__ = [
    "Algorithm",
    "Totals",
    "advantage",
    "aggregate",
    "correction",
    "keep",
    "kl",
    "objective",
    "question_weight",
]
