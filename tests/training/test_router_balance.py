"""The load-balancing loss of a mixture's routers equals its definition, however an update is split."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.architectures import architecture
from training.test_packing import rows_of
from training.updating import train_step, updater_for
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grpocli.distributed.world import World
from grpocli.errors import ConfigError
from grpocli.models.loading import HuggingFace, checkpoint_activations
from grpocli.training.optim import AdamW
from grpocli.training.policy import Policy
from grpocli.training.router_balance import check_has_routers, record_routings, routers
from grpocli.training.trials import pack
from grpocli.types import Row, Sampling

EXPERTS, CHOSEN = 4, 2
ALONE = ("algorithm=dapo", "algorithm.router_aux_loss_coef=0.5")
NO_TOKENS = 4  # the row whose tokens are not in the loss


@pytest.fixture(scope="module")
def mixture() -> Any:
    return architecture("qwen3_moe").build()


def rows() -> list[Row]:
    """Three groups, one without a signal; a completion without a token in the loss."""
    made = rows_of([(9, [(4, 1.0), (15, 1.0), (7, 1.0)]), (3, [(12, -0.7), (5, -0.7)]), (14, [(6, 0.0), (6, 0.0)])])
    made[NO_TOKENS] = replace(made[NO_TOKENS], mask=[0] * len(made[NO_TOKENS].mask))
    return made


def updated(
    model: Any, world: World, *overrides: str, packed: bool, tokens: int, checkpointed: bool = False
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient and the metrics of an update."""
    mine = copy.deepcopy(model)
    if checkpointed:
        checkpoint_activations(mine)
    policy = Policy(mine, mine, torch.float32, world.parallel)
    policy.shared_with = world.context_parallel
    assert not packed or pack(policy, None, world)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
    kept: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: kept.append(gradient(mine)))
    given = {"policy": policy, "optim": AdamW(max_grad_norm=0.0), "sampling": Sampling(20)}
    updater = updater_for(None, world, *overrides, **given, micro_batch_tokens=tokens)
    updater.optimizer = optimizer
    found = train_step(updater, rows(), n_groups=3)
    return kept[0], found


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def defined(model: Any) -> tuple[torch.Tensor, float, float]:
    """Gradient of half the loss by transformers' function, by completion and layer; its value, and the largest load."""
    mine = copy.deepcopy(model)
    losses, chosen = [], torch.zeros(2, EXPERTS)
    for number, row in enumerate(rows()):
        if number == NO_TOKENS:
            continue
        layers = mine(torch.tensor([row.prompt_ids + row.completion_ids]), output_router_logits=True).router_logits
        losses.append(torch.stack([load_balancing_loss_func((one,), EXPERTS, CHOSEN) for one in layers]).mean())
        for layer, one in enumerate(layers):
            chosen[layer] += torch.bincount(one.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
    loss = torch.stack(losses).mean()
    (0.5 * loss).backward()
    largest = chosen / chosen.sum(1, keepdim=True) * EXPERTS
    return gradient(mine), loss.item(), largest.max().item()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_loss_is_its_definition_however_the_update_is_split(mixture: Any, world: World, checkpointed: bool) -> None:
    expected, loss, load = defined(mixture)
    base, _ = updated(mixture, world, "algorithm=dapo", packed=False, tokens=10_000)
    assert 1.05 * CHOSEN < loss < EXPERTS, "the routers are not balanced to begin with"
    for packed, tokens in ((False, 10_000), (False, 30), (True, 10_000), (True, 30)):
        found, metrics = updated(mixture, world, *ALONE, packed=packed, tokens=tokens, checkpointed=checkpointed)
        assert (found - base - expected).norm() <= 2e-5 * expected.norm()
        assert metrics["router/aux_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["router/max_load"] == pytest.approx(load, rel=1e-6)


def test_the_loss_of_the_update_includes_it(mixture: Any, world: World) -> None:
    _, without = updated(mixture, world, "algorithm=dapo", packed=True, tokens=10_000)
    _, found = updated(mixture, world, *ALONE, packed=True, tokens=10_000)
    assert found["loss"] - without["loss"] == pytest.approx(0.5 * found["router/aux_loss"], rel=1e-4)
    assert without["tokens/skipped"] > 0, "a group without a signal"
    assert found["tokens/skipped"] < without["tokens/skipped"], "its completions have a gradient at the routers"
    assert without["router/max_load"] > 1, "the load is measured without the loss, too"


@pytest.mark.parametrize(("name", "path"), [("qwen3", "dense"), ("glm4_moe", "sigmoid")])
def test_a_model_without_such_routers_is_refused(name: str, path: str, tmp_path: Path) -> None:
    architecture(name).build_config().save_pretrained(tmp_path / path)
    said = rf"algorithm\.router_aux_loss_coef=0\.01: transformers has no load-balancing loss for this model \({name}\)"
    with pytest.raises(ConfigError, match=said):
        check_has_routers(HuggingFace(path=str(tmp_path / path)), str(tmp_path / path), 0.01)


def test_hooks_are_removed(mixture: Any) -> None:
    with record_routings(routers(mixture)) as outputs:
        mixture(torch.tensor([[7, 8, 9]]))
    assert [tuple(one.logits.shape) for one in outputs] == [(3, EXPERTS)] * 2
    mixture(torch.tensor([[7, 8, 9]]))
    assert len(outputs) == 2
