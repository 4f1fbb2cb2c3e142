"""Every kind of trial, in the order of the table."""

from __future__ import annotations

from chaos import damages, kills

KINDS = (kills.KIND, damages.KIND)
