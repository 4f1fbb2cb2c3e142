"""train.activation_offload changes where activations wait, and no gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaForCausalLM

from grpocli.models.loading import checkpoint_activations
from grpocli.training import policy
from grpocli.training.policy import ActivationOffload

IDS = torch.arange(2 * 24).view(2, 24) % 40


@pytest.fixture(autouse=True)
def moves_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LEAST_OFFLOADED", 1024)


def gradients(model: LlamaForCausalLM, context: object, bfloat16: bool) -> list[torch.Tensor]:
    mine = copy.deepcopy(model).train()
    offload = context(mine)  # type: ignore[operator]
    with offload, torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        loss = mine(IDS, labels=IDS).loss
    loss.backward()
    if isinstance(offload, ActivationOffload):
        assert (offload.moved > 0) == ("cpu" in offload.devices)
    return [p.grad for p in mine.parameters() if p.grad is not None]


@pytest.mark.parametrize(("bfloat16", "checkpointing"), [(False, False), (True, True)])
def test_gradients_are_the_same_to_the_bit(little_model, bfloat16: bool, checkpointing: bool) -> None:
    model = copy.deepcopy(little_model)
    if checkpointing:
        checkpoint_activations(model)
    plain = gradients(model, lambda one: nullcontext(), bfloat16)
    here = gradients(model, lambda one: ActivationOffload(one.parameters()), bfloat16)
    moved = gradients(model, lambda one: ActivationOffload(one.parameters(), devices=("cpu",)), bfloat16)
    assert len(plain) == len(list(model.parameters()))
    for one, two, three in zip(plain, here, moved, strict=True):
        assert one.equal(two)
        assert one.equal(three)
