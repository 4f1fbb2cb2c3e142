"""model=hf: any causal language model of transformers, from a folder or the hub."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpocli.config.parts import part, require
from grpocli.errors import ConfigError
from grpocli.models.common import ModelPart, Progress

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


@part("model", "hf")
class HuggingFace(ModelPart):
    """path: a folder with config.json, weights and tokenizer, or a name on the hub.

    revision: a branch, tag or commit of the hub's. trust_remote_code: run Python code that comes with the model.
    chat_template: a file with a Jinja template that replaces the tokenizer's own. chat_template_arguments: what it is
        given beside the messages: `model.chat_template_arguments.enable_thinking=false`.
    """

    path: str = MISSING
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "path", self.path not in ("", MISSING), "give model.path=FOLDER or a name on the hub")
        template = self.chat_template
        require(
            self,
            "chat_template",
            template is None or Path(template).expanduser().is_file(),
            "there is no such file",
        )

    def prepare(self, progress: Progress | None = None) -> str:
        """The folder, checked, or the hub id as it is."""
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            _check_folder(self.path, folder)
            return str(folder.resolve())
        if folder.exists():
            raise ConfigError.of("model.path", self.path, "is a file; give the folder that holds config.json")
        if not HUB_ID.fullmatch(self.path) or self.path.startswith("."):
            raise ConfigError.of("model.path", self.path, "there is no such folder")
        return self.path


def _check_folder(path: str, folder: Path) -> None:
    needs = {"config.json": ("config.json",), "weights (*.safetensors)": WEIGHTS, "tokenizer files": TOKENIZER}
    for what, patterns in needs.items():
        if not any(True for pattern in patterns for _ in folder.glob(pattern)):
            raise ConfigError.of("model.path", path, f"the folder has no {what}; give one that transformers saved")
