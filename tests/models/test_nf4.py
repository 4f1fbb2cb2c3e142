"""A base model with weights of 4 bits is the model of the numbers that they stand for, in every forward."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composed import refused
from little import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpocli.composition.compose import build_run, compose
from grpocli.distributed.parallel import Parallel
from grpocli.models.loading import HuggingFace, load_policy
from grpocli.models.lora import Lora, lora_layers, merged, switched_off
from grpocli.models.tiny import make_tokenizer
from grpocli.training import dequantized
from grpocli.training.dequantized import dequantized_base

LORA = Lora(rank=4, alpha=8.0)
IDS = torch.tensor([[2, 5, 6, 7, 9, 11], [2, 8, 9, 4, 4, 30]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a bias, and an output head that is its embedding."""
    torch.manual_seed(0)
    sizes = SHAPE | {"vocab_size": len(make_tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    config = LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def part(base: Path) -> HuggingFace:
    return HuggingFace(path=str(base), quantization="nf4", lora=LORA)


def policy(part: HuggingFace, dtype: str, trained: bool = True) -> LlamaForCausalLM:
    """The model to train, with an update that is not 0."""
    model = load_policy(part, part.path, part.path, seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for _, layer in lora_layers(model) if trained else ():
        b = layer.lora_B["default"].weight
        b.data = torch.randn(b.shape, generator=generator) * 0.05
    return model


def autocast(dtype: str) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_quantized_model_is_the_model_that_vllm_serves(part, dtype: str, tmp_path, monkeypatch) -> None:
    """To the bit, with gradients and without, in training and in evaluation mode."""
    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path))
    served = dequantized_base(part, part.path, dtype)
    assert dequantized_base(part, part.path, dtype) == served, "it is made once"
    plain = AutoModelForCausalLM.from_pretrained(served, dtype=getattr(torch, dtype))
    assert not hasattr(plain.config, "quantization_config")
    model = policy(part, dtype)
    with autocast(dtype), switched_off(model):
        expected = plain(IDS).logits
        assert model(IDS).logits.equal(expected)
        assert model.eval()(IDS).logits.equal(expected)
        with torch.no_grad():
            assert model(IDS).logits.equal(expected)
            assert model.train()(IDS).logits.equal(expected)
    with autocast(dtype):
        assert not model(IDS).logits.equal(expected), "the update counts"


def test_a_shared_cache_has_a_copy_of_each_kind_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer quantizes on its own device, whose rounding is not another's."""
    names: list[str] = []
    monkeypatch.setattr(dequantized, "cached", lambda name, *_: names.append(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    part = SimpleNamespace(quantization="nf4")
    for device in ("auto", "cuda", "cpu"):
        dequantized_base(part, str(tmp_path), "float32", device)
    assert names[0] == names[1] != names[2]


def test_it_differs_from_the_base_by_the_rounding_to_four_bits(part, base: Path) -> None:
    whole = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).named_parameters())
    model = policy(part, "float32", trained=False)
    found = dict(merged(model, model.named_parameters()))
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        error = (found[name] - weight).norm() / weight.norm()
        assert (0.05 < error < 0.15) if "proj.weight" in name else error == 0, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_model_with_whole_weights(part, dtype: str) -> None:
    model = policy(part, dtype)
    twin = load_policy(HuggingFace(path=part.path, lora=LORA), part.path, part.path, seed=0)
    state = {name: p.detach().float() for name, p in model.named_parameters() if "base_layer.weight" not in name}
    with switched_off(model):
        for name, layer in lora_layers(model):
            state[f"{name}.base_layer.weight"] = layer.base_layer.dequantized().float()
    twin.load_state_dict(state, strict=False)
    for parameter in twin.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    for one in (model, twin):
        with autocast(dtype):
            loss = one(IDS, labels=IDS).loss
        loss.backward()
    theirs = dict(twin.named_parameters())
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    for name, p in trained:
        assert p.grad is not None
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-5, atol=1e-7, msg=name)


def test_the_merged_model_is_the_policy(part) -> None:
    model = policy(part, "float32")
    plain = AutoModelForCausalLM.from_pretrained(part.path, dtype=torch.float32)
    plain.load_state_dict(dict(merged(model, model.named_parameters())), strict=False)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert all("quant" not in name for name in plain.state_dict())


def test_it_keeps_half_a_byte_a_weight_and_samples_with_it(part) -> None:
    model = policy(part, "bfloat16")
    for _, layer in lora_layers(model):
        one = layer.base_layer
        held = one.weight.nbytes + one.quant_state.absmax.nbytes
        assert held == one.in_features * one.out_features * (0.5 + 4 / 64)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    alone = Parallel(torch.device("cpu"))
    with torch.no_grad(), alone.sampling(model, torch.bfloat16):
        first = model(IDS).logits
    with torch.no_grad(), alone.autocast(model, torch.bfloat16):
        assert model(IDS).logits.equal(first)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ([], "model.quantization"),
        (["model.lora.rank=4", "hardware.parallel=fsdp2"], "model.quantization"),
        (["model.lora.rank=4", "algorithm.kl.sync_every=2"], "model.quantization"),
        (["model.lora.rank=4", "model.quantization=nf5"], "model.quantization"),
        (["model.lora.rank=4", "model.compile=true"], "model.compile"),
    ],
)
def test_what_needs_whole_weights_is_refused(given: list[str], key: str) -> None:
    with refused(key):
        build_run(compose(["engine=transformers", "model.quantization=nf4", *given]))
