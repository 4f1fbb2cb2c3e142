"""model=hf: bad folders are refused before loading, and a failed load gives a one-sentence error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from composed import refused
from transformers import AutoConfig, OPTConfig, OPTForCausalLM

from grpocli.composition.compose import compose
from grpocli.config.build import build
from grpocli.errors import ConfigError
from grpocli.models import loading
from grpocli.models.loading import (
    HuggingFace,
    check_vocabulary,
    language_model_class,
    load_model,
    load_tokenizer,
    without_dropout,
)
from grpocli.models.lora import Lora
from grpocli.models.tiny import make_model, make_tokenizer
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.server import hf_overrides


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model, saved by transformers."""
    path = tmp_path / "model"
    make_model(seed=0).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_a_complete_folder_loads(folder: Path) -> None:
    part = HuggingFace(path=str(folder), attention="eager")
    path = part.prepare()
    assert path == str(folder)
    model = load_model(part, path)
    assert model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert HuggingFace(path="Qwen/Qwen2.5-0.5B-Instruct").prepare() == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "alone"), [("qwen3_5", "Qwen3_5ForCausalLM"), ("gemma3", None), ("llama", None)])
def test_vllm_serves_the_class_that_is_trained(kind: str, alone: str | None, tmp_path: Path) -> None:
    """Of a checkpoint of Qwen3.5, transformers loads the language model without that of images."""
    config = AutoConfig.for_model(kind)
    whole = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration"}
    config.architectures = [whole.get(kind, "LlamaForCausalLM")]
    config.save_pretrained(tmp_path)
    part = HuggingFace(path=str(tmp_path))
    assert language_model_class(part, str(tmp_path)) == alone
    job = EngineJob(str(tmp_path), "float32", 8, tmp_path, 0, architecture=alone)
    assert hf_overrides(Vllm(), job) == ({"architectures": [alone]} if alone else None)
    assert hf_overrides(Vllm(vllm_args={"hf-overrides": {"architectures": ["Own"]}}), job) == {"architectures": ["Own"]}


@pytest.mark.parametrize(
    "path", ["", "/no/such/folder", "./here", "~/nowhere/at/all", "a/b/c", "nobody/nothing@x y", "{}/config.json"]
)
def test_a_path_without_a_model_is_refused(path: str, folder: Path) -> None:
    with refused("model.path"):
        load_model(HuggingFace(path=path.format(folder)), HuggingFace(path=path.format(folder)).prepare())
    with pytest.raises(ConfigError, match=r"model\.path"):
        build(compose(["model=hf"]).model)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("model.safetensors", None),
        ("tokenizer.json", None),
        ("config.json", "{"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("model.safetensors", "short"),
    ],
)
def test_a_missing_or_broken_file_gives_a_one_sentence_error(folder: Path, file: str, content: str | None) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    part = HuggingFace(path=str(folder))
    with refused("model.path"):
        load_model(part, part.prepare())


@pytest.mark.parametrize("config", ["{", '{"model_type": "t5"}'])
def test_choosing_the_dtype_needs_a_readable_config(folder: Path, config: str, monkeypatch) -> None:
    monkeypatch.setattr(loading, "cpu_has_bfloat16", lambda _: True)
    part = HuggingFace(path=str(folder))
    assert loading.choose_dtype("auto", part, part.prepare(), "cpu") == "float32"
    (folder / "config.json").write_text(config)
    with refused("model.path", match="cannot load the config"):
        loading.choose_dtype("auto", part, part.prepare(), "cpu")


def test_the_end_token_replaces_a_missing_padding_token(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    loaded = load_tokenizer(HuggingFace(path=str(folder)), str(folder))
    assert loaded.pad_token_id == loaded.eos_token_id
    assert len(loaded) == len(tokenizer)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("num_hidden_layers", 9, "has no weights for"), ("vocab_size", 999, "has weights of another shape for")],
)
def test_missing_weights_are_refused(folder: Path, key: str, value: int, said: str) -> None:
    """Otherwise transformers would silently initialise them at random."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with refused("model.path", match=said):
        load_model(HuggingFace(path=str(folder)), str(folder))


def test_a_token_without_a_row_is_refused_with_both_numbers(folder: Path) -> None:
    part, tokenizer = HuggingFace(path=str(folder)), make_tokenizer()
    check_vocabulary(part, str(folder))
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(folder)
    check_vocabulary(part, str(folder))  # nothing draws it
    tokenizer.add_special_tokens({"eos_token": "<padding>"})
    tokenizer.save_pretrained(folder)
    with refused("model.path", match=rf"{rows + 1} tokens.* {rows} rows"):
        check_vocabulary(part, str(folder))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_an_adapter_is_no_model_and_needs_a_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is an adapter.*model\.lora\.path"):
        HuggingFace(path=str(tmp_path)).check_ready()
    with refused("model.lora.path"):
        Lora(path=str(tmp_path))


def test_a_policy_has_no_dropout() -> None:
    """Also where a layer has its rate as a number, not as a module."""
    config = OPTConfig(
        vocab_size=40, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=32, dropout=0.5, attention_dropout=0.5,
    )  # fmt: skip
    model, ids = OPTForCausalLM(config).train(), torch.tensor([[3, 4, 5]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    without_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
