"""train.activation_offload changes where activations wait, and no gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from grpocli.models.loading import checkpoint_activations
from grpocli.training import policy
from grpocli.training.policy import ActivationOffload

IDS = torch.arange(2 * 24).view(2, 24) % 40


@pytest.mark.parametrize(("bfloat16", "checkpointing"), [(False, False), (True, True)])
def test_gradients_are_the_same_to_the_bit(
    little_model, bfloat16: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LEAST_OFFLOADED", 1024)
    found = []
    for devices in ((), ("cpu",)):
        mine = copy.deepcopy(little_model).train()
        if checkpointing:
            checkpoint_activations(mine)
        offload = ActivationOffload(mine.parameters(), devices=devices)
        with offload, torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = mine(IDS, labels=IDS).loss
        loss.backward()
        assert (offload.moved > 0) == bool(devices)
        found.append([p.grad for p in mine.parameters()])
    assert all(one.equal(two) for one, two in zip(*found, strict=True))
