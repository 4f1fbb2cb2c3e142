"""reward=[model]: a learned reward, a sequence classification model with one output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.chat_clock import DAY, stop_clock
from grpocli.config.parts import one_of, part, require
from grpocli.errors import ConfigError, config_errors
from grpocli.hub import check_folder, model_folder
from grpocli.rewards.reward import BaseReward, Sample, Score
from grpocli.types import DTYPES

if TYPE_CHECKING:
    import torch

KEY = "reward.model.path"


@part("reward", "model", package="reward.model")
class RewardModel(BaseReward):
    """The score of a reward model for prompt and completion.

    Conversations go through the model's own chat template; plain text stays as it is. Every trainer process has a copy
    of the model.
    """

    path: str = MISSING
    """A folder, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the default branch."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    dtype: str = "float32"
    """Dtype of the model's computations, `float32`, `bfloat16` or `float16`."""
    batch: int = 16
    """Rows in a forward pass."""
    max_tokens: int = 2048
    """Most tokens of prompt and completion; longer ones lose their beginning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.device in ("auto", "cpu", "cuda") or self.device.startswith("cuda:")
        require(self, "device", known, "must be auto, cpu, cuda or cuda:N")
        one_of(self, "dtype", DTYPES)
        require(self, "batch", self.batch >= 1, "must be at least 1")
        require(self, "max_tokens", self.max_tokens >= 1, "must be at least 1")

    @property
    def label(self) -> str:
        return self.path

    def check_ready(self) -> None:
        check_folder(KEY, self.path)

    def check(self, columns: Sequence[str]) -> None:
        _ = self._classifier  # loads it

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return list(self._classifier.scores(samples))

    def close(self) -> None:
        vars(self).pop("_classifier", None)  # frees the model's memory

    @cached_property
    def _classifier(self) -> Classifier:
        return Classifier(self)


class Classifier:
    """The tokenizer and the model of a `RewardModel`."""

    def __init__(self, reward: RewardModel) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.reward, path = reward, model_folder(reward.path, KEY, reward.revision)
        revision = reward.revision if path == reward.path else None  # a downloaded folder has one
        self.device = _device(reward.device)
        says = "is not a sequence classification model: {}"
        with config_errors(OSError, ValueError, KeyError, says=says, key=KEY, value=path):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, revision=revision, dtype=getattr(torch, reward.dtype), output_loading_info=True
            )
        if model.config.num_labels != 1:
            raise ConfigError(f"has {model.config.num_labels} outputs; a reward model has one", key=KEY, value=path)
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"has no weights for {missing[0]}: it is not a reward model", key=KEY, value=path)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        stop_clock(self.tokenizer, DAY)
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.model = model.to(self.device).eval()

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The scores in the order of the samples. Rows of similar length share a batch."""
        import torch

        rows = [self._ids(sample) for sample in samples]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found = [0.0] * len(rows)
        for start in range(0, len(order), self.reward.batch):
            chosen = order[start : start + self.reward.batch]
            padded = self.tokenizer.pad(
                {"input_ids": [rows[i] for i in chosen]}, padding_side="right", return_tensors="pt"
            ).to(self.device)
            with torch.no_grad():
                logits = self.model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
            for i, score in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                found[i] = score
        return found

    def _ids(self, sample: Sample) -> list[int]:
        if isinstance(sample.prompt, str):
            ids: list[int] = self.tokenizer(f"{sample.prompt}{sample.completion}", verbose=False).input_ids
        else:
            if not self.tokenizer.chat_template:
                problem = "has no chat template, but the prompts are conversations"
                raise ConfigError(problem, key=KEY, value=self.reward.path)
            messages = [*sample.prompt, *sample.completion]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids[-self.reward.max_tokens :]


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU here; take cpu or auto", key="reward.model.device", value=name)
    if name == "cuda":  # with its number, since the thread that scores a stream has another current GPU
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)
