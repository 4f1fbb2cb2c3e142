"""LoRA in training: optimised parameters, references, checkpoints and the final model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composed import built
from training.updating import SAMPLING, copies, train_step, updater_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpocli.distributed.world import World
from grpocli.models.loading import HuggingFace, load_policy
from grpocli.models.lora import Lora, attach
from grpocli.models.tiny import make_tokenizer
from grpocli.rollout.sampler import sample
from grpocli.training.build_trainer import load_reference
from grpocli.training.checkpoint import Contents, save_model
from grpocli.training.optim import AdamW
from grpocli.training.packing import MicroBatch
from grpocli.training.policy import BaseReference, Policy, Reference
from grpocli.training.update import Updater
from grpocli.types import Request, Row

LORA = Lora(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def rows(little_model) -> list[Row]:
    """A group of four, sampled by the base model."""
    prompt = [2, 5, 6, 7]
    (group,) = sample(little_model, [Request(prompt, 4, 3)], SAMPLING, [1], 1)
    return [
        Row(prompt, c.token_ids, [1] * len(c.token_ids), advantage, 0, c.logprobs)
        for c, advantage in zip(group, (1.0, -1.0, 0.5, -0.5), strict=True)
    ]


def lora_policy(little_model, world: World, dtype: torch.dtype = torch.float32) -> Policy:
    model = attach(copy.deepcopy(little_model), LORA, seed=0)
    return Policy(model, model, dtype, world.parallel)


def updater(policy: Policy, world: World, reference: Reference | None = None, **train: int) -> Updater:
    algorithm, optim = "algorithm=grpo" if reference else "algorithm=dapo", AdamW(lr=0.02, max_grad_norm=0.0)
    return updater_for(None, world, algorithm, policy=policy, reference=reference, optim=optim, **train)


def step(up: Updater, rows: list[Row]) -> dict[str, float]:
    return train_step(up, copies(rows), n_groups=1)


def logp(model, rows: list[Row]) -> torch.Tensor:
    return Policy(model, model, torch.float32).scores(MicroBatch.build(rows, torch.device("cpu")), SAMPLING)[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_policy_is_the_base_to_the_bit(little_model, world, rows, dtype) -> None:
    full = Policy(little_model, little_model, dtype)
    policy = lora_policy(little_model, world, dtype)
    batch = MicroBatch.build(rows, torch.device("cpu"))
    assert policy.scores(batch, SAMPLING)[0].equal(full.scores(batch, SAMPLING)[0])
    for (name, weight), (expected, original) in zip(policy.weights(), full.weights(), strict=True):
        assert name == expected
        assert weight.equal(original)


def test_sampling_follows_the_updates_and_keeps_the_base_frozen(little_model, world, rows) -> None:
    policy = lora_policy(little_model, world, torch.bfloat16)
    up = updater(policy, world)
    for _ in range(3):
        step(up, rows)
    flags = [p.requires_grad for p in policy.model.parameters()]
    with policy.sampling_mode():
        ((completion,),) = sample(policy.model, [Request([2, 5, 6], 1, 0)], SAMPLING, [1], 1)
    assert [p.requires_grad for p in policy.model.parameters()] == flags
    row = Row([2, 5, 6], completion.token_ids, [1] * len(completion.token_ids), 0.0, 0, completion.logprobs)
    again = policy.scores(MicroBatch.build([row], torch.device("cpu")), SAMPLING)[0][0].tolist()
    assert again == pytest.approx(completion.logprobs, abs=0.3), "bfloat16, with and without a cache"
    step(up, rows)
    assert all(p.grad is None for p in policy.model.parameters())


def run_of(algorithm: str) -> SimpleNamespace:
    return SimpleNamespace(algorithm=built(*algorithm.split()), model=HuggingFace(path="base", lora=LORA))


def test_a_fixed_reference_is_the_base_and_a_moving_one_another_model(little_model, world, rows, tmp_path) -> None:
    policy = lora_policy(little_model, world)
    job = SimpleNamespace(model_path="/there/is/no/model/to/load")
    reference = load_reference(run_of("algorithm=grpo"), job, policy, None)
    assert isinstance(reference, BaseReference)
    assert {id(p) for p in reference.model.parameters()} == {id(p) for p in policy.model.parameters()}
    up = updater(policy, world, reference)
    assert step(up, rows)["kl"] == 0
    assert step(up, rows)["kl"] > 0
    batch = MicroBatch.build(rows, torch.device("cpu"))
    assert reference.logp(batch, SAMPLING).equal(logp(little_model, rows))
    assert not policy.scores(batch, SAMPLING)[0].equal(logp(little_model, rows))
    little_model.save_pretrained(tmp_path)
    moves, job = run_of("algorithm=grpo algorithm.kl.sync_every=2"), SimpleNamespace(model_path=str(tmp_path))
    second = load_reference(moves, job, policy, None)
    assert type(second) is Reference
    assert not {id(p) for p in second.model.parameters()} & {id(p) for p in policy.model.parameters()}


def test_mixing_is_tr_dpos_formula_on_merged_weights(little_model, world, rows) -> None:
    """reference <- alpha (W + (lora alpha / rank) B A) + (1 - alpha) reference, twice, from reference = W."""
    policy = lora_policy(little_model, world)
    reference = Reference(copy.deepcopy(little_model), policy)
    up = updater(policy, world, reference)
    expected = {name: p.detach().double() for name, p in little_model.named_parameters()}
    for alpha in (0.25, 0.6):
        for _ in range(3):
            step(up, rows)
        reference.mix(alpha)
        state = policy.model.state_dict()
        for name in expected:
            layer = name.removesuffix(".weight")
            merged = state[name if name in state else f"{layer}.base_layer.weight"].double()
            if f"{layer}.lora_A.default.weight" in state:
                a, b = (state[f"{layer}.lora_{x}.default.weight"].double() for x in "AB")
                merged = merged + 8.0 / 4 * b @ a
            expected[name] = alpha * merged + (1 - alpha) * expected[name]
    moved = 0.0
    for name, parameter in reference.model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-6, atol=1e-6)
        moved = max(moved, (parameter - little_model.get_parameter(name)).abs().max().item())
    assert moved > 1e-3


@pytest.fixture
def base(little_model, tmp_path: Path) -> Path:
    """The folder of the base model, as `prepare` returns it."""
    little_model.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def contents(up: Updater, base: Path) -> Contents:
    return Contents(up.policy, up.optimizer, AutoTokenizer.from_pretrained(base))


def test_a_generation_config_that_transformers_refuses_is_saved_as_it_is(world, base: Path, tmp_path: Path) -> None:
    """Vicuna's and Llama 2's say at which temperature they sample, and that they do not sample."""
    written = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}
    (base / "generation_config.json").write_text(json.dumps(written))
    model = load_policy(HuggingFace(path=str(base)), str(base), str(base), seed=7)
    policy = Policy(model, model, torch.float32, world.parallel)
    save_model(tmp_path / "model", policy, AutoTokenizer.from_pretrained(base), torch.float32, "card", world)
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.9, 0.6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.temperature == 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "model"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_final_model_is_plain_and_the_same_policy(world, rows, base: Path, tmp_path: Path, dtype) -> None:
    model = load_policy(HuggingFace(path=str(base), lora=LORA), str(base), str(base), seed=7)
    policy = Policy(model, model, torch.float32, world.parallel)
    up = updater(policy, world)
    for _ in range(3):
        step(up, rows)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(tmp_path / "model", policy, AutoTokenizer.from_pretrained(base), dtype, "card", world)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "model" / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert not hasattr(loaded, "peft_config")
    for name, weight in policy.weights():
        assert loaded.get_parameter(name).equal(weight.to(dtype)), name
    if dtype == torch.float32:
        torch.testing.assert_close(logp(loaded, rows), logp(model, rows), rtol=0, atol=1e-4)
