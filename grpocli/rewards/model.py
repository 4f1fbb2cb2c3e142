"""reward=[model]: a learned reward, a sequence classification model with one output."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import MISSING

from grpocli.config.parts import one_of, part, require
from grpocli.hub import check_folder
from grpocli.rewards.reward import BaseReward, Sample, Score


@part("reward", "model", package="reward.model")
class RewardModel(BaseReward):
    """What the model at `path` (a folder, or a name on the hub) says of prompt and completion.

    Conversations go through the model's own chat template, plain text as it stands. device: `auto` (a GPU where there
    is one), `cpu`, `cuda` or `cuda:1`. dtype: `float32`, or `bfloat16`. batch: rows in a forward. max_tokens: of prompt
    and completion; longer ones lose their beginning. Every trainer process has a copy of its own.
    """

    path: str = MISSING
    revision: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    batch: int = 16
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.device in ("auto", "cpu", "cuda") or self.device.startswith("cuda:")
        require(self, "device", known, "must be auto, cpu, cuda or cuda:N")
        one_of(self, "dtype", ("float32", "bfloat16"))
        require(self, "batch", self.batch >= 1, "must be at least 1")
        require(self, "max_tokens", self.max_tokens >= 1, "must be at least 1")

    @property
    def label(self) -> str:
        return self.path

    def check_ready(self) -> None:
        check_folder("reward.model.path", self.path)

    def check(self, columns: Sequence[str]) -> None:
        from grpocli.rewards.classifier import classifier

        classifier(self)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        from grpocli.rewards.classifier import classifier

        return list(classifier(self).scores(samples))

    def close(self) -> None:
        from grpocli.rewards.classifier import forget

        forget(self)
