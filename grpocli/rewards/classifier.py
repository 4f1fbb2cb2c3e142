"""The model behind `reward=[model]`, loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Sample

KEY = "reward.model.path"


class Settings(Protocol):
    """The keys of `reward=[model]`."""

    @property
    def path(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


_loaded: dict[Settings, Classifier] = {}


class Classifier:
    """A tokenizer and a model with one output."""

    def __init__(self, part: Settings) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.part = part
        self.device = _device(part.device)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(part.path, revision=part.revision)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                part.path, revision=part.revision, dtype=getattr(torch, part.dtype), output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"is no sequence classification model: {reason}", key=KEY, value=part.path) from error
        if model.config.num_labels != 1:
            raise ConfigError(
                f"has {model.config.num_labels} outputs; a reward model has one", key=KEY, value=part.path
            )
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"has no weights for {missing[0]}: it is no reward model", key=KEY, value=part.path)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """In the samples\' order; rows of like length are computed together."""
        rows = [self._ids(sample) for sample in samples]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found = [0.0] * len(rows)
        for start in range(0, len(order), self.part.batch):
            chosen = order[start : start + self.part.batch]
            padded = self.tokenizer.pad(
                {"input_ids": [rows[i] for i in chosen]}, padding_side="right", return_tensors="pt"
            ).to(self.device)
            logits = self.model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
            for i, score in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                found[i] = score
        return found

    def _ids(self, sample: Sample) -> list[int]:
        if isinstance(sample.prompt, str):
            ids: list[int] = self.tokenizer(f"{sample.prompt}{sample.completion}", verbose=False).input_ids
        else:
            if not self.tokenizer.chat_template:
                raise ConfigError(
                    "has no chat template, but the prompts are conversations", key=KEY, value=self.part.path
                )
            messages = [*sample.prompt, *sample.completion]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids[-self.part.max_tokens :]


def classifier(part: Settings) -> Classifier:
    """The one of this part, loaded once."""
    if part not in _loaded:
        _loaded[part] = Classifier(part)
    return _loaded[part]


def forget(part: Settings) -> None:
    """Free its memory."""
    _loaded.pop(part, None)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU here; take cpu or auto", key="reward.model.device", value=name)
    return torch.device(name)
