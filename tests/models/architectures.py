"""Architectures of transformers as tiny random models, and what runs with each: the table of docs/models.md.

`test_architectures.py` holds every cell to what happens. `python -m models.architectures docs/models.md`, in tests/,
writes the table into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__

from grpocli.files import write_atomic
from grpocli.models.tiny import make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARKS = ("<!-- written by make docs: architectures -->\n", "<!-- end -->\n")
"""What the table stands between."""

VOCABULARY = 103
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM has on a CPU
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "initializer_range": 0.15,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 32}
GATED_DELTA: dict[str, Any] = {
    "layer_types": [LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # the one size that vLLM has on a CPU
    "linear_value_head_dim": 128,
}
WINDOW: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": 16}


ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
ALL = (*ATTENTION, "down_proj", "gate_proj", "up_proj")
HAND = "yes (by hand, 2026-11-25)"
"""vLLM runs that no test repeats, because each starts a server."""
TESTED = "yes"
TORCHVISION = "no: vLLM's code for it needs torchvision"
OTHER = "no: the first sync is refused, since vLLM's log-probs differ"
STOPPED = "no: stopped at the first step (`rollout.max_prob_error`), since vLLM's log-probs differ"
BFLOAT16 = "yes, with `model.dtype=bfloat16` (by hand, 2026-11-25; `token_mult_prob_error` 1.02)"
ELSEWHERE = "yes (the model of all other tests of vLLM)"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type of transformers, its tiny config, and the cells of its row in docs/models.md.

    rows: `packed`, `padded`, or `window`: packed where no row is longer than the sliding window. lora: the layers of
    model.lora.target_modules=all-linear. vllm: what engine=vllm does on a CPU. since: the first
    transformers with it.
    """

    model_type: str
    families: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: str = "packed"
    lora: tuple[str, ...] = ALL
    vllm: str = "not tried"
    note: str = ""
    since: str = ""

    @property
    def installed(self) -> bool:
        """The transformers that is installed has it."""
        return not self.since or Version(__version__) >= Version(self.since)

    @property
    def has_window(self) -> bool:
        return SLIDING in self.config.get("layer_types", [])

    @property
    def vllm_tested(self) -> bool:
        return self.vllm == TESTED

    def build_config(self) -> Any:
        return AutoConfig.for_model(self.model_type, **(SHAPE | self.config))

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model with random weights, large enough for its choices to be far from uniform."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.build_config()).eval()

    def save(self, folder: Path) -> Path:
        """The model in a folder, with the tokenizer of model=tiny."""
        self.build().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder


TIED = {"tie_word_embeddings": True}
GEMMA = {"query_pre_attn_scalar": 32}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
GEMMA_3N = PER_LAYER | {"num_kv_shared_layers": 0, "laurel_rank": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 32, "shared_intermediate_size": 64}
GLM_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
DELTA_LORA = ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj")
PER_LAYER_LORA = ("per_layer_input_gate", "per_layer_model_projection", "per_layer_projection")
ALTUP_LORA = ("correction_coefs", "linear_left", "linear_right", "modality_router", "prediction_coefs", "0", "1", "2")

ARCHITECTURES = [
    Architecture("qwen2", "Qwen2.5, DeepSeek-R1-Distill-Qwen", TIED),
    Architecture("qwen3", "Qwen3 0.6B to 32B", TIED),
    Architecture("qwen3_moe", "Qwen3-30B-A3B", EXPERTS, lora=ATTENTION, vllm=HAND),
    Architecture("qwen3_5_text", "Qwen3.5", GATED_DELTA | TIED, "padded", (*ALL, *DELTA_LORA), vllm=TORCHVISION),
    Architecture(
        "qwen3_5_moe_text",
        "Qwen3.5-35B-A3B",
        GATED_DELTA | EXPERTS | SHARED,
        "padded",
        (*ALL, *DELTA_LORA, "shared_expert_gate"),
        vllm=TORCHVISION,
    ),
    Architecture(
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        GATED_DELTA | EXPERTS | SHARED,
        "padded",
        (*ATTENTION, "in_proj_ba", "in_proj_qkvz", "out_proj", "shared_expert_gate"),
        vllm=BFLOAT16,
    ),
    Architecture("llama", "Llama 3.x, SmolLM2", TIED, vllm=ELSEWHERE),
    Architecture(
        "gemma2", "Gemma 2", WINDOW | GEMMA, "padded", note="eager attention, which caps its scores", vllm=HAND
    ),
    Architecture("gemma3_text", "Gemma 3 270M, 1B", WINDOW | GEMMA, "window", vllm=TESTED),
    Architecture(
        "gemma3n_text", "Gemma 3n", WINDOW | GEMMA_3N, "window", (*ALL, *PER_LAYER_LORA, *ALTUP_LORA), vllm=STOPPED
    ),
    Architecture(
        "gemma4_text",
        "Gemma 4",
        WINDOW | PER_LAYER | {"global_head_dim": 32},
        "window",
        (*ALL, *PER_LAYER_LORA),
        vllm=HAND,
    ),
    Architecture("smollm3", "SmolLM3", TIED | {"no_rope_layers": [1, 0]}, vllm=HAND),
    Architecture("olmo2", "OLMo 2", vllm=HAND),
    Architecture("olmo3", "OLMo 3", WINDOW, "window", vllm=HAND),
    Architecture("olmoe", "OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}, lora=ATTENTION, vllm=HAND),
    Architecture("mistral", "Mistral 7B, Nemo, Small", vllm=HAND),
    Architecture("ministral3", "Ministral 3"),
    Architecture("mixtral", "Mixtral", LOCAL_EXPERTS, lora=ATTENTION, vllm=TESTED),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        LOCAL_EXPERTS | WINDOW,
        "padded",
        ATTENTION,
        note="eager attention with sinks",
        vllm=OTHER,
    ),
    Architecture("phi3", "Phi-3, Phi-4", lora=("down_proj", "gate_up_proj", "o_proj", "qkv_proj"), vllm=HAND),
    Architecture("granite", "Granite 3.x", {"logits_scaling": 8.0, "residual_multiplier": 0.5}, vllm=HAND),
    Architecture(
        "granitemoehybrid",
        "Granite 4",
        LOCAL_EXPERTS | MAMBA | {"layer_types": [LINEAR, FULL]},
        "padded",
        (*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"),
        vllm=HAND,
    ),
    Architecture(
        "glm4", "GLM-4-0414", {"partial_rotary_factor": 0.5}, lora=(*ATTENTION, "down_proj", "gate_up_proj"), vllm=HAND
    ),
    Architecture("glm4_moe", "GLM-4.5", GLM_EXPERTS | {"moe_intermediate_size": 32}, lora=ATTENTION, vllm=HAND),
    Architecture(
        "lfm2",
        "LFM2",
        {"layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False}
        | dict.fromkeys(("conv_dim", "block_dim"), 64),
        "padded",
        (*(set(ATTENTION) - {"o_proj"}), "in_proj", "out_proj", "w1", "w2", "w3"),
        vllm=OTHER,
    ),
    Architecture("kolibri1", "Kolibri 1", WINDOW | EXPERTS | SHARED, "window", since="5.20"),
    Architecture(
        "flint",
        "Flint",
        WINDOW | EXPERTS | SHARED | {"mlp_only_layers": [0]},
        "padded",
        note="eager attention with sinks",
        since="5.21",
    ),
    Architecture("internlm3", "InternLM3", since="5.23"),
    Architecture("iquestcoder", "IQuest-Coder", since="5.23"),
    Architecture(
        "lfm3",
        "LFM3",
        {"layer_types": ["conv", FULL]},
        "padded",
        (*ATTENTION, "g_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
        since="5.23",
    ),
    Architecture("exaone", "EXAONE 3.x", since="5.24"),
    Architecture("sarvam_moe", "Sarvam-30B", GLM_EXPERTS | {"moe_intermediate_size": 32}, since="5.24"),
    Architecture(
        "lara_mini",
        "Lara Mini",
        GATED_DELTA | EXPERTS | SHARED,
        "padded",
        (*ALL, *DELTA_LORA),
        since="5.24",
    ),
    Architecture("apertus1p5_text", "Apertus 1.5", lora=(*ATTENTION, "down_proj", "up_proj"), since="5.24"),
]


def architecture(model_type: str) -> Architecture:
    return next(one for one in ARCHITECTURES if one.model_type == model_type)


def section() -> str:
    """The table of docs/models.md."""
    return "".join(f"| {' | '.join(row)} |\n" for row in _lines())


def _lines() -> Iterator[list[str]]:
    yield ["architecture", "models", "rows", "LoRA: `all-linear`", "engine=transformers", "engine=vllm on a CPU"]
    yield ["---"] * 6
    for one in ARCHITECTURES:
        rows = {"window": "packed up to the sliding window, else padded"}.get(one.rows, one.rows)
        more = f" ({one.note})" if one.note else ""
        needs = f" (transformers {one.since})" if one.since else ""
        yield [f"`{one.model_type}`", one.families + needs, rows + more, _layers(one), "yes", one.vllm]


def _layers(one: Architecture) -> str:
    if set(one.lora) == set(ALL):
        return "attention, MLP"
    if set(one.lora) == set(ATTENTION):
        return "attention"
    known = set(ALL) if set(one.lora) >= set(ALL) else set(ATTENTION) if set(one.lora) >= set(ATTENTION) else set()
    named = {frozenset(ALL): ["attention, MLP"], frozenset(ATTENTION): ["attention"]}.get(frozenset(known), [])
    rest = [f"`{name}`" for name in sorted(set(one.lora) - known) if not name.isdigit()]
    return ", ".join([*named, *rest])


def main() -> None:
    """Write the table into the page."""
    first, last = MARKS
    before, _, rest = Path(sys.argv[1]).read_text().partition(first)
    after = rest.partition(last)[2]
    write_atomic(Path(sys.argv[1]), before + first + section() + last + after)


if __name__ == "__main__":
    main()
