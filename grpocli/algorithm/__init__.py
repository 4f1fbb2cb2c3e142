"""GRPO and its relatives, each composed of nine small parts. See `Algorithm`."""

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.algorithm import Algorithm

__all__ = ["Algorithm", "Totals"]
