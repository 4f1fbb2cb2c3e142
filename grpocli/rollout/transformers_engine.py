"""engine=transformers: the trainer's own model samples, in each trainer process; nothing to start or to sync."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import part, require
from grpocli.data import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.rollout.engine import Engine, EngineContext, EngineJob


@part("engine", "transformers")
class Transformers:
    """max_rows: how many completions are sampled side by side, which bounds memory."""

    max_rows: int = 256

    def __post_init__(self) -> None:
        require(self, "max_rows", self.max_rows >= 1, "must be at least 1")

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        return nullcontext()

    def connect(self, context: EngineContext) -> Engine:
        return TransformersEngine(context.policy, stop_ids(context.policy.model, context.tokenizer), self.max_rows)


class TransformersEngine:
    """See `Transformers`."""

    def __init__(self, policy: Any, stop_ids: Sequence[int], max_rows: int) -> None:
        self.policy, self.stop_ids, self.max_rows = policy, stop_ids, max_rows
        self.version = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        from grpocli.rollout.sampler import sample

        results: list[list[Completion]] = [[] for _ in requests]
        with self.policy.sampling_mode():
            for chunk in self._chunks(requests):
                done = sample(self.policy.model, [requests[i] for i in chunk], sampling, self.stop_ids, self.version)
                for i, completions in zip(chunk, done, strict=True):
                    results[i] = completions
        return results

    def _chunks(self, requests: Sequence[Request]) -> list[list[int]]:
        """Prompts of like length together, at most `max_rows` completions a chunk (but one prompt at least)."""
        chunks: list[list[int]] = []
        rows = self.max_rows
        for i in sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids)):
            if rows + requests[i].n > self.max_rows:
                chunks.append([])
                rows = 0
            chunks[-1].append(i)
            rows += requests[i].n
        return chunks

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def close(self) -> None:
        """Nothing to stop."""


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the model's generation config, and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)
