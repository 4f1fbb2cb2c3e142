"""The model that is trained: how it scores tokens, and what an engine may know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.models.lora import is_adapted, merged
from grpocli.rollout.distribution import sampling_logits
from grpocli.rollout.repetition import first_seen
from grpocli.training.batch import MicroBatch
from grpocli.training.parallel import Alone, Parallel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpocli.data import Sampling

LOGITS_AT_ONCE = 2**26
"""How many logits are turned into log-probs at a time. Bounds temporary float32 copies; those that the backward pass
needs are kept for the whole micro-batch, which `train.micro_batch_tokens` bounds."""


class Policy:
    """A causal language model with float32 weights that computes in `dtype`.

    `wrapped` is what training calls; `model` is underneath, the same object or not. `parallel`: how processes share it;
    one that has it to itself needs none.
    """

    def __init__(
        self, model: PreTrainedModel, wrapped: torch.nn.Module, dtype: torch.dtype, parallel: Parallel | None = None
    ) -> None:
        self.model, self.wrapped, self.dtype = model, wrapped, dtype
        self.parallel: Parallel = parallel or Alone(model.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, tied ones once; with LoRA, the base model's, updates added.

        Where processes share them, their parts: `parallel.gather` makes them whole.
        """
        named = self.parallel.parameters(self.model)
        if is_adapted(self.model):
            return merged(self.model, named)
        return ((name, parameter.detach()) for name, parameter in named)

    def computing(self) -> AbstractContextManager[Any]:
        """Around a forward, so that it computes in `dtype`."""
        return self.parallel.computing(self.model, self.dtype)

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """Evaluation mode, no gradients; any number of forwards in this process. To enter is collective."""
        with self._evaluating(), self.parallel.sampling(self.model, self.dtype):
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1. Collective where weights are
        shared."""
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with self._evaluating(), self.computing():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float()
        logp: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return logp

    def logp(self, batch: MicroBatch, sampling: Sampling, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [B, T] of the completions under the sampling distribution (with gradient), and entropies [B, T].

        Nats; entropies carry a gradient only if asked. Calls `wrapped`: in training every process must call it
        equally often.
        """
        return completion_logp(self.wrapped, batch, sampling, self.computing(), entropy_gradient)

    @torch.no_grad()
    def logp_without_gradient(self, batch: MicroBatch, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """As `logp`, of this process alone."""
        return completion_logp(self.model, batch, sampling, self.computing())


def completion_logp(
    model: torch.nn.Module,
    batch: MicroBatch,
    sampling: Sampling,
    context: AbstractContextManager[Any],
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] of a micro-batch's completions under any causal model of transformers."""
    n = batch.completion_ids.shape[1]
    with context:
        logits_BTV = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=n + 1,
        ).logits[:, :-1]
    vocabulary = logits_BTV.shape[-1]
    rows = max(1, LOGITS_AT_ONCE // vocabulary)
    logits_NV = logits_BTV.reshape(-1, vocabulary)
    ids_N = batch.completion_ids.reshape(-1)
    pieces = [
        _token_logp(logits, ids, sampling, entropy_gradient, seen)
        for logits, ids, seen in zip(
            logits_NV.split(rows), ids_N.split(rows), _seen(batch, sampling, vocabulary, rows), strict=True
        )
    ]
    logp_BT = torch.cat([p[0] for p in pieces]).reshape(batch.completion_ids.shape)
    entropy_BT = torch.cat([p[1] for p in pieces]).reshape(batch.completion_ids.shape)
    return logp_BT, entropy_BT


def _seen(batch: MicroBatch, sampling: Sampling, vocabulary: int, rows: int) -> Iterator[Tensor | None]:
    """For each piece of `rows` tokens [N, V]: what stood before each token; None where there is no penalty."""
    total, n = batch.completion_ids.numel(), batch.completion_ids.shape[1]
    first_BV = None
    if sampling.repetition_penalty != 1:
        first_BV = first_seen(batch.input_ids, batch.attention_mask, n, vocabulary)
    for token_N in torch.arange(total, device=batch.input_ids.device).split(rows):
        yield None if first_BV is None else first_BV[token_N // n] < (token_N % n).unsqueeze(1)


def _token_logp(
    logits_NV: Tensor, ids_N: Tensor, sampling: Sampling, entropy_gradient: bool, seen_NV: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_NV = sampling_logits(logits_NV, sampling, keep_N=ids_N, seen_NV=seen_NV)
    normalizer_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1) - normalizer_N
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probs_NV = (logits_NV - normalizer_N.unsqueeze(1)).exp()
        entropy_N = normalizer_N - (probs_NV * logits_NV.masked_fill(logits_NV.isinf(), 0.0)).sum(-1)
    return logp_N, entropy_N
