"""Samples, as rewards get them."""

from rewards.conftest import sample

__all__ = ["sample"]
