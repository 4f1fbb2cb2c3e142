"""Supervised training: the loss and gradient of transformers' cross-entropy, however an update is split."""

from __future__ import annotations

import copy

import pytest
import torch
from training.updating import updater_for

from grpocli.distributed.world import World
from grpocli.training.trials import pack
from grpocli.training.update import Updater
from grpocli.types import Row, Sampling

ANSWERS = [([2, 5, 6], [7, 8, 9, 1]), ([2, 7], [3, 1]), ([2, 9, 10, 11, 12], [4, 4, 4, 5, 6, 1]), ([2, 3], [1])]


def updater(little_model, world: World, **train: int) -> Updater:
    return updater_for(little_model, world, "algorithm=sft", sampling=Sampling(16), **train)


def rows() -> list[Row]:
    return [
        Row(prompt, answer, [1] * len(answer), 1.0, number, [float("nan")] * len(answer))
        for number, (prompt, answer) in enumerate(ANSWERS)
    ]


def cross_entropy(model) -> torch.Tensor:
    """transformers' loss on the padded batch, whose labels are the answers' tokens."""
    longest = max(len(prompt + answer) for prompt, answer in ANSWERS)
    ids, labels, mask = [], [], []
    for prompt, answer in ANSWERS:
        rest = longest - len(prompt + answer)
        ids.append([*prompt, *answer, *[0] * rest])
        labels.append([*[-100] * len(prompt), *answer, *[-100] * rest])
        mask.append([*[1] * len(prompt + answer), *[0] * rest])
    return model(input_ids=torch.tensor(ids), labels=torch.tensor(labels), attention_mask=torch.tensor(mask)).loss


@pytest.mark.parametrize(("packed", "tokens"), [(False, 10_000), (True, 9)])
def test_loss_and_gradient_are_those_of_the_cross_entropy(little_model, world, packed: bool, tokens: int) -> None:
    expected = copy.deepcopy(little_model)
    loss = cross_entropy(expected)
    loss.backward()
    up = updater(little_model, world, micro_batch_tokens=tokens)
    assert not packed or pack(up.policy, None, world, 16)
    (window,) = up.begin_step(rows(), len(ANSWERS), 1)
    assert tokens > 9 or len(window.micro_batches) > 1
    up.accumulate(window)
    assert up.sums()["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for own, theirs in zip(up.policy.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_the_held_out_loss_is_the_cross_entropy_and_changes_nothing(little_model, world) -> None:
    up = updater(little_model, world, micro_batch_tokens=9)
    before = [p.clone() for p in up.policy.model.parameters()]
    found = up.target_loss(rows())
    with torch.no_grad():
        assert found["loss"] == pytest.approx(cross_entropy(little_model).item(), abs=1e-6)
    assert all(one.equal(two) for one, two in zip(before, up.policy.model.parameters(), strict=True))
    assert all(p.grad is None for p in up.policy.model.parameters())


def test_token_accuracy_is_the_share_of_tokens_that_are_the_most_probable(little_model, world) -> None:
    right = total = 0
    for prompt, answer in ANSWERS:
        with torch.no_grad():
            logits = little_model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        right += int((logits.argmax(-1) == torch.tensor(answer)).sum())
        total += len(answer)
    up = updater(little_model, world, micro_batch_tokens=9)
    assert up.target_loss(rows())["token_accuracy"] == pytest.approx(right / total)
    assert up.train_step(rows(), len(ANSWERS), 1)["token_accuracy"] == pytest.approx(right / total)
