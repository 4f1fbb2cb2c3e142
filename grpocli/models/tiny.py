"""model=tiny: a small model that the package makes itself, so that a first run needs no download."""

from __future__ import annotations

from dataclasses import field

from grpocli.config.parts import one_of, part, require
from grpocli.models.common import ModelPart, Progress
from grpocli.tasks.arithmetic import OPERATIONS


@part("model", "tiny")
class Tiny(ModelPart):
    """A Llama of a third of a million parameters, one character a token, warm-started on arithmetic.

    Made at first use, in about half a minute, and kept in the cache folder. The warm start is a short supervised
    phase on the training problems of `task=arithmetic`, in which a digit of an answer is replaced by a random one
    with a probability that rises to `noise`: the model learns to add but also to err, and reinforcement learning
    then has something to sharpen.

    digits, operation: of those problems; the task's own where it has them.
    """

    digits: int = field(default=2, metadata={"follows": "oc.select:task.digits,2"})
    operation: str = field(default="+", metadata={"follows": "oc.select:task.operation,+"})
    warm_start_steps: int = 180
    noise: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "digits", 1 <= self.digits <= 9, "must be between 1 and 9")
        one_of(self, "operation", OPERATIONS)
        require(self, "warm_start_steps", self.warm_start_steps >= 1, "must be at least 1")
        require(self, "noise", 0 <= self.noise <= 1, "must be between 0 and 1")

    def prepare(self, progress: Progress | None = None) -> str:
        """The folder of the warm-started model, made now if the cache does not have it."""
        from grpocli.models.tiny_build import cached_tiny

        return str(cached_tiny(self, progress))
