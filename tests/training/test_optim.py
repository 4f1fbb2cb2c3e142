"""Optimizers take the library's steps, resume to the bit, and have the state that plans count; schedules too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_packing import fresh
from transformers import LlamaForCausalLM, get_scheduler

from grpocli.distributed.parallel import loss_scaler, step
from grpocli.distributed.world import World
from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.training.checkpoint import Contents, State, load_optimizer, save
from grpocli.training.optim import SCHEDULES, AdamW, AdamW8bit, Muon, Optimizer, Sgd, make_optimizer, matrices_in_layers
from grpocli.training.policy import Policy

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(lr=0.01, weight_decay=0.1),
    "adamw_8bit": AdamW8bit(lr=0.01, weight_decay=0.1),
    "muon": Muon(lr=0.01, weight_decay=0.1),
    "sgd": Sgd(lr=0.1, momentum=0.9),
    "sgd without momentum": Sgd(lr=0.1),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model with matrices of more and of fewer than 4,096 numbers."""
    torch.manual_seed(0)
    return fresh(vocab_size=97, hidden_size=64, intermediate_size=96)


@pytest.fixture(params=OPTIMIZERS)
def optim(request: pytest.FixtureRequest) -> Optimizer:
    return OPTIMIZERS[request.param]


def give_gradients(model: LlamaForCausalLM, number: int) -> None:
    """They depend on the number of the update alone."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def updates(model: LlamaForCausalLM, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        give_gradients(model, number)
        step(model, optimizer, 0.01 / (number + 1), 1.0, loss_scaler(torch.device("cpu"), torch.float32))


def weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_resumed_optimizer_continues_to_the_bit(model, world: World, optim: Optimizer, tmp_path: Path) -> None:
    straight = copy.deepcopy(model)
    optimizer = make_optimizer(optim, straight)
    updates(straight, optimizer, range(3))
    policy = Policy(straight, straight, torch.float32, world.parallel)
    save(tmp_path / "step_3", State(step=3), Contents(policy, optimizer, make_tokenizer()), world)
    resumed = LlamaForCausalLM.from_pretrained(tmp_path / "step_3", dtype=torch.float32)
    again = make_optimizer(optim, resumed)
    load_optimizer(tmp_path / "step_3", Policy(resumed, resumed, torch.float32, world.parallel), again, optim)
    updates(straight, optimizer, range(3, 6))
    updates(resumed, again, range(3, 6))
    expected = weights(straight)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())
    assert not any(tensor.equal(expected[name]) for name, tensor in weights(model).items())


def test_the_state_is_what_plans_count_and_a_resume_expects(model, optim: Optimizer) -> None:
    trained = copy.deepcopy(model)
    optimizer = make_optimizer(optim, trained)
    updates(trained, optimizer, range(1))
    matrices = matrices_in_layers(trained)
    for name, parameter in trained.named_parameters():
        kept = {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items() if value is not None}
        found = {key: (tuple(tensor.shape), tensor.element_size()) for key, tensor in kept.items()}
        assert found == dict(optim.state_of(tuple(parameter.shape), name in matrices)), name


def test_a_checkpoint_of_another_optimizer_is_refused(model, world: World, tmp_path: Path) -> None:
    policy = Policy(model, model, torch.float32, world.parallel)
    optimizer = make_optimizer(OPTIMIZERS["adamw"], model)
    for parameter in model.parameters():
        moments = {"exp_avg": parameter.clone(), "exp_avg_sq": parameter + 1}
        optimizer.state[parameter] = {"step": torch.tensor(1.0)} | moments
    save(tmp_path / "step_1", State(step=1), Contents(policy, optimizer, make_tokenizer()), world)
    said = r"^optim=muon: the checkpoint has another optimizer's state \(exp_avg, exp_avg_sq, step\)"
    with pytest.raises(ConfigError, match=said):
        load_optimizer(tmp_path / "step_1", policy, make_optimizer(Muon(), model), Muon())


def test_muon_takes_torchs_steps_for_matrices_in_layers_and_adamws_for_the_rest(model) -> None:
    optim = OPTIMIZERS["muon"]
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    updates(mine, make_optimizer(optim, mine), range(3))

    layers = [p for name, p in theirs.named_parameters() if "proj" in name]
    ends = [theirs.model.embed_tokens.weight, theirs.lm_head.weight]
    norms = [p for p in theirs.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(layers, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": ends, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, fused=True)
    for number in range(3):
        give_gradients(theirs, number)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            optimizer.step()
    expected = weights(theirs)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(mine).items())
    assert len(layers) + len(ends) + len(norms) == len(list(theirs.parameters()))


def test_eight_bits_follow_adamw(model) -> None:
    """Steps of 8-bit moments differ from AdamW's by a small part of a step."""
    runs = {}
    for name in ("adamw", "adamw_8bit"):
        trained = copy.deepcopy(model)
        updates(trained, make_optimizer(OPTIMIZERS[name], trained), range(5))
        pairs = zip(weights(trained).values(), weights(model).values(), strict=True)
        runs[name] = torch.cat([(new - old).flatten() for new, old in pairs])
    difference = (runs["adamw_8bit"] - runs["adamw"]).norm() / runs["adamw"].norm()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_after_the_warm_up_are_those_of_transformers(name: str) -> None:
    warmup, total, lr = 3, 20, 0.2
    optim = AdamW(lr=lr, warmup_steps=warmup, schedule=name)
    rates = [optim.rate(update, total) for update in range(total)]
    assert rates[:warmup] == [lr * (update + 1) / (warmup + 1) for update in range(warmup)]
    theirs = get_scheduler(name, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr), 0, total - warmup)
    assert rates[warmup:] == pytest.approx([lr * theirs.lr_lambdas[0](k) for k in range(total - warmup)], rel=1e-12)
