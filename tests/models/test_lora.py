"""model.lora: the updates, their sum with the base weights, and their files."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from composed import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from grpocli.composition.compose import compose
from grpocli.config.build import build
from grpocli.models.loading import HuggingFace, load_policy
from grpocli.models.lora import (
    CONFIG,
    WEIGHTS,
    Lora,
    attach,
    check_same,
    load_adapter,
    merged,
    save_adapter,
    switched_off,
)
from grpocli.models.tiny import make_model

IDS = torch.tensor([[2, 5, 9, 7, 11, 3]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def adapted(base, lora: Lora | None = None, seed: int = 0):
    """A copy with zero updates."""
    return attach(copy.deepcopy(base), lora or Lora(rank=4), seed)


def moved(base, lora: Lora | None = None):
    """A copy with updates large enough to change results."""
    model = adapted(base, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def folder(little_model, tmp_path: Path) -> Path:
    little_model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_untrained_updates_change_no_bit(little_model) -> None:
    model = adapted(little_model)
    assert logits(model).equal(logits(little_model))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    layers, linear = 2, 7
    assert len(trained) == layers * linear * 2, "every linear layer but the output head has an A and a B"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_initial_updates_depend_only_on_the_seed(little_model) -> None:
    def first(seed: int) -> torch.Tensor:
        return next(p for p in adapted(little_model, seed=seed).parameters() if p.requires_grad).detach()

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = first(1)
    assert torch.rand(3).equal(expected), "the global generator is not used"
    assert first(1).equal(one)
    assert not first(2).equal(one)


def test_merged_weights_follow_the_formula(little_model) -> None:
    model = moved(little_model, Lora(rank=4, alpha=6.0, target_modules=["q_proj", "down_proj"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = dict(merged(model, model.named_parameters()))
    base = dict(little_model.named_parameters())
    assert list(weights) == list(base)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        expected = base[name]
        if layer.endswith(("q_proj", "down_proj")):
            a, b = before[f"{layer}.lora_A.default.weight"], before[f"{layer}.lora_B.default.weight"]
            expected = base[name] + 6.0 / 4 * b @ a
            assert (expected - base[name]).abs().max() > 0.1
        torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-6)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def gpt2():
    """A model with transposed weights and a tied head."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=2)).eval()


@pytest.mark.parametrize(
    ("make", "target_modules"),
    [
        (lambda llama: llama, "all-linear"),
        (lambda llama: llama, ["embed_tokens", "lm_head", "v_proj"]),
        (lambda llama: llama, r".*\.1\..*_proj"),
        (lambda llama: make_model(seed=0), "all-linear"),
        (lambda llama: gpt2(), "all-linear"),
    ],
    ids=["llama", "embedding-and-head", "a-regular-expression", "tied", "gpt2"],
)
def test_a_plain_model_with_merged_weights_is_the_same_policy(little_model, make, target_modules) -> None:
    base = make(little_model)
    model = moved(base, Lora(rank=3, target_modules=target_modules))
    plain = copy.deepcopy(base)
    weights = dict(merged(model, model.named_parameters()))
    assert list(weights) == [name for name, _ in base.named_parameters()], "tied weights once"
    assert not plain.load_state_dict(weights, strict=False).unexpected_keys
    assert (logits(model) - logits(base)).abs().max() > 0.01
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def test_a_disabled_adapter_gives_the_base_model_to_the_bit(little_model) -> None:
    model = moved(little_model)
    trained = [p.requires_grad for p in model.parameters()]
    on = logits(model)
    with switched_off(model):
        assert logits(model).equal(logits(little_model))
    assert logits(model).equal(on)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_saved_updates_load_to_the_bit(little_model, tmp_path: Path) -> None:
    model, fresh = moved(little_model), adapted(little_model)
    save_adapter(model, tmp_path)
    load_adapter(fresh, Lora(rank=4), tmp_path)
    state = model.state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in fresh.state_dict().items())
    assert logits(fresh).equal(logits(model))
    assert all(".lora_" in name for name in load_file(tmp_path / WEIGHTS)), "the base model is not copied"


def test_transformers_loads_saved_updates_onto_the_base(folder: Path, tmp_path: Path) -> None:
    model = moved(AutoModelForCausalLM.from_pretrained(folder))
    saved = tmp_path / "updates"
    saved.mkdir()
    save_adapter(model, saved)
    assert logits(AutoModelForCausalLM.from_pretrained(saved)).equal(logits(model))


def test_a_checkpoint_with_other_settings_is_refused(little_model, folder: Path, tmp_path: Path) -> None:
    save_adapter(moved(little_model), tmp_path)
    check_same(Lora(rank=4), tmp_path)
    check_same(Lora(), folder)
    only = Lora(rank=4, target_modules=["q_proj"])
    for key, refuse in (
        ("rank", lambda: check_same(Lora(rank=8), tmp_path)),
        ("rank", lambda: check_same(Lora(), tmp_path)),
        ("alpha", lambda: check_same(Lora(rank=4, alpha=8.0), tmp_path)),
        ("rank", lambda: check_same(Lora(rank=4), folder)),
        ("target_modules", lambda: load_adapter(adapted(little_model, only), only, tmp_path)),
    ):
        with refused(f"model.lora.{key}"):
            refuse()


def test_a_layer_that_cannot_have_an_update_is_refused(little_model) -> None:
    """It is tied to another, or the model lacks it."""
    tied = make_model(seed=0)
    for model, layer in ((tied, "lm_head"), (tied, "embed_tokens"), (little_model, "query")):
        with refused("model.lora.target_modules"):
            attach(model, Lora(rank=4, target_modules=[layer]), 0)


@pytest.mark.parametrize(
    "override",
    ["rank=-1", "alpha=0", "alpha=inf", "target_modules=[]", "target_modules=3", "target_modules='('"],
)
def test_bad_values_name_their_key(override: str) -> None:
    with refused(f"model.lora.{override.partition('=')[0]}"):
        build(compose([f"model.lora.{override}"]).model)


def saved_adapter(base, folder: Path, **changes: object) -> str:
    """The folder of an adapter of rank 4 and alpha 8, whose config has `changes`."""
    folder.mkdir()
    save_adapter(moved(base, Lora(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])), folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return str(folder)


def test_a_second_stage_goes_on_with_an_adapter(little_model, folder: Path, tmp_path: Path) -> None:
    lora = Lora(path=saved_adapter(little_model, tmp_path / "first"))
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 8.0, ["q_proj", "v_proj"])
    part = HuggingFace(path=str(folder), lora=lora)
    model = load_policy(part, str(folder), str(folder), seed=0)
    expected = moved(little_model, Lora(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"]))
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    ("key", "changes", "settings"),
    [
        ("path", {"use_rslora": True}, {}),
        ("path", {"bias": "all"}, {}),
        ("path", {"peft_type": "IA3"}, {}),
        ("path", {}, {}),
        ("rank", {}, {"rank": 8}),
        ("alpha", {}, {"alpha": 16.0}),
        ("target_modules", {}, {"target_modules": ["k_proj"]}),
    ],
)
def test_another_kind_of_adapter_and_other_keys_are_refused(
    little_model, tmp_path: Path, key: str, changes: dict[str, object], settings: dict[str, object]
) -> None:
    path = saved_adapter(little_model, tmp_path / "first", **changes) if changes or settings else str(tmp_path)
    with refused(f"model.lora.{key}"):
        Lora(path=path, **settings)


def test_a_saved_config_needs_the_folder_of_its_adapter_only_to_load_it(little_model, tmp_path: Path) -> None:
    path = saved_adapter(little_model, tmp_path / "first")
    saved = asdict(Lora(path=path))
    shutil.rmtree(path)
    assert asdict(Lora(**saved)) == saved
