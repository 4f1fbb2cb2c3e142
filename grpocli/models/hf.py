"""model=hf: a causal language model of transformers, from a folder or the hub."""

from __future__ import annotations

from dataclasses import field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.chat_clock import DAY
from grpocli.config.parts import part, require
from grpocli.errors import ConfigError
from grpocli.hub import PREFIX, check_folder, model_folder, why_unreachable
from grpocli.models import lora
from grpocli.models.loading import ModelPart, Progress, configured_end_ids, end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@part("model", "hf")
class HuggingFace(ModelPart):
    """A language model of transformers, from a folder or the hub."""

    path: str = MISSING
    """A folder with config.json, weights and tokenizer, or a name on the hub; `hub:OWNER/NAME@REVISION` takes only
    safetensors, and the folder of a checkpoint, `hub:OWNER/NAME/checkpoints/step_000020`."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat_template: str | None = None
    """File with a Jinja template that replaces the tokenizer's own; null: the tokenizer's."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables that the template reads beside the messages: `model.chat_template_arguments.reasoning_effort=low`."""
    thinking: bool | None = None
    """Whether the model thinks before it answers, by the switch in its chat template; null: the template's default."""
    date: str = DAY
    """The day that a chat template takes for today, so that prompts are the same on every day."""
    response_template: str | None = None
    """JSON file with a response template of transformers, which finds calls of tools in the model's turns; null: the
    tokenizer's own, or one for the format in which the chat template writes calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "path", self.path not in ("", MISSING), "give model.path=FOLDER or a name on the hub")
        for name in ("chat_template", "response_template"):
            file = getattr(self, name)
            require(self, name, file is None or Path(file).expanduser().is_file(), "there is no such file")
        require(self, "date", _is_date(self.date), "give a day as YEAR-MONTH-DAY")

    def prepare(self, progress: Progress | None = None) -> str:
        """The absolute path of the folder, or the hub id."""
        self.check_ready()
        if self.path.startswith(PREFIX):
            return model_folder(self.path, "model.path", self.revision)
        folder = Path(self.path).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.path

    def end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The tokens that end a completion, those of the generation config among them."""
        return end_token_ids(configured_end_ids(self, self.prepare()), tokenizer)

    def check_ready(self) -> None:
        """Raise ConfigError if there is no such model. Loads no slow library."""
        super().check_ready()
        folder = Path(self.path).expanduser()
        if (adapter := folder / lora.CONFIG).is_file() and not (folder / "config.json").is_file():
            base = lora.read_config(adapter, "model.path").get("base_model_name_or_path")
            problem, hint = f"is an adapter of {base}", f"give model={base} model.lora.path={self.path}"
            raise ConfigError(f"{problem}, not a model", key="model.path", value=self.path, hint=hint)
        check_folder("model.path", self.path, self.revision)
        if not self.path.startswith(PREFIX) and not Path(self.path).expanduser().is_dir():
            self._check_reachable()

    def _check_reachable(self) -> None:
        """Raise ConfigError if the hub does not answer and the model is not in its local cache."""
        if not (problem := why_unreachable()):
            return
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(self.path, "config.json", revision=self.revision), str):
            problem = f"there is no such folder, and the hub does not answer ({problem}); give a model's folder"
            raise ConfigError(problem, key="model.path", value=self.path)


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
