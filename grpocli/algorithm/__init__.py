"""The algorithms: nine small parts, composed. See `Algorithm`."""

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.algorithm import Algorithm

__all__ = ["Algorithm", "Totals"]
