"""Architectures of transformers as tiny random models, and what runs with each (architectures.yaml).

`test_architectures.py` holds every cell to what happens. `python -m models.architectures docs/models.md`, in tests/,
writes the table into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__

from grpocli.files import write_atomic
from grpocli.models.tiny import make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARKS = ("<!-- written by make docs: architectures -->\n", "<!-- end -->\n")
"""What the table stands between."""

SHAPE: dict[str, Any] = {
    "vocab_size": 103,
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
GIVEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LAYERS = {name: tuple(layers) for name, layers in GIVEN["layers"].items()}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type of transformers, its tiny config, and the cells of its row in docs/models.md."""

    model_type: str
    families: str
    config: dict[str, Any]
    rows: str
    lora: tuple[str, ...]
    vllm: str
    note: str = ""
    since: str = ""

    @classmethod
    def read(cls, model_type: str, given: dict[str, Any]) -> Architecture:
        """The entry of architectures.yaml."""
        config = {key: value for piece in given.pop("of", []) for key, value in GIVEN["configs"][piece].items()}
        lora = tuple(layer for name in given.pop("lora", ["all"]) for layer in LAYERS.get(name, (name,)))
        vllm = GIVEN["vllm"].get(given.pop("vllm", ""), "not tried")
        rows = given.pop("rows", "packed")
        return cls(model_type, config=config | given.pop("config", {}), rows=rows, lora=lora, vllm=vllm, **given)

    @property
    def installed(self) -> bool:
        """The transformers that is installed has it."""
        return not self.since or Version(__version__) >= Version(self.since)

    @property
    def has_window(self) -> bool:
        return "sliding_attention" in self.config.get("layer_types", [])

    @property
    def vllm_tested(self) -> bool:
        return self.vllm == GIVEN["vllm"]["tested"]

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


ARCHITECTURES = [Architecture.read(*item) for item in GIVEN["architectures"].items()]


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
    found = set(one.lora)
    group = next((name for name in ("all", "attention") if found >= set(LAYERS[name])), "")
    rest = [f"`{name}`" for name in sorted(found - set(LAYERS.get(group, ()))) if not name.isdigit()]
    return ", ".join([*filter(None, [{"all": "attention, MLP"}.get(group, group)]), *rest])


def main() -> None:
    """Write the table into the page."""
    first, last = MARKS
    before, _, rest = Path(sys.argv[1]).read_text().partition(first)
    after = rest.partition(last)[2]
    write_atomic(Path(sys.argv[1]), before + first + section() + last + after)


if __name__ == "__main__":
    main()
