"""Every kind of trial, in the order of the table."""

from __future__ import annotations

from chaos import attacks, damages, data, disks, faults, keyless, kills, rewards

KINDS = (kills.KIND, damages.KIND, disks.KIND, faults.KIND, data.KIND, rewards.KIND, attacks.KIND, keyless.KIND)
