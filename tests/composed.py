"""Algorithms that tests share. They are frozen, and composing a config takes a quarter of a second."""

from __future__ import annotations

import functools

from grpocli import build_algorithm

built = functools.cache(build_algorithm)
