"""reward=[model]: a learned reward, a sequence classification model with one output."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import MISSING

from grpocli.config.parts import one_of, part, require
from grpocli.hub import check_folder
from grpocli.rewards.reward import BaseReward, Sample, Score


@part("reward", "model", package="reward.model")
class RewardModel(BaseReward):
    """The score that a reward model gives prompt and completion.

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
    """What the model computes in, `float32` or `bfloat16`."""
    batch: int = 16
    """Rows in a forward pass."""
    max_tokens: int = 2048
    """Most tokens of prompt and completion; longer ones lose their beginning."""

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
