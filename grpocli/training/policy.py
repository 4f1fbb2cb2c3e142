"""The model that is trained: how it scores tokens, and what an engine may know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.distributed.parallel import Alone, Parallel
from grpocli.models.lora import is_adapted, merged
from grpocli.rollout.repetition import first_seen
from grpocli.training.batch import MicroBatch
from grpocli.training.head import Targets, TokenHistory, of_logits, repeating, scoring
from grpocli.training.layout import Layout, Packed, Padded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpocli.types import Sampling


class Policy:
    """A causal language model with float32 weights that computes in `dtype`.

    `wrapped` is what training calls; `model` is underneath, the same object or not. `parallel`: how processes share it;
    one that has it to itself needs none. packs: whether it takes rows end to end; at_head: whether its logits
    are what its output head returns (`grpocli.training.packing` finds out).
    """

    def __init__(
        self, model: PreTrainedModel, wrapped: torch.nn.Module, dtype: torch.dtype, parallel: Parallel | None = None
    ) -> None:
        self.model, self.wrapped, self.dtype = model, wrapped, dtype
        self.parallel: Parallel = parallel or Alone(model.device)
        self.packs, self.at_head = False, True

    def layout(self, sampling: Sampling) -> type[Layout]:
        """How micro-batches lie in a forward."""
        return Packed if self.packs and sampling.repetition_penalty == 1 else Padded

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
        return completion_logp(self.wrapped, batch, sampling, self.computing(), entropy_gradient, self.at_head)

    @torch.no_grad()
    def logp_without_gradient(self, batch: MicroBatch, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """As `logp`, of this process alone."""
        return completion_logp(self.model, batch, sampling, self.computing(), at_head=self.at_head)


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module of a model, or of one that DDP or DeepSpeed has wrapped, that turns hidden states into logits."""
    plain: Any = getattr(model, "module", model)
    head: torch.nn.Module | None = plain.get_output_embeddings()
    return head


def completion_logp(
    model: torch.nn.Module,
    batch: MicroBatch,
    sampling: Sampling,
    context: AbstractContextManager[Any],
    entropy_gradient: bool = False,
    at_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] of a micro-batch's completions under any causal model of transformers.

    Values where there is no token mean nothing. at_head: the model's logits are what its output head returns.
    """
    head, layout, ids_BT = output_head(model), batch.layout, batch.completion_ids
    seen = None
    if sampling.repetition_penalty != 1:
        if not isinstance(layout, Padded):
            raise ValueError("a repetition penalty is for rows side by side")
        n = ids_BT.shape[1]
        seen = TokenHistory(first_seen(layout.input_ids, layout.attention_mask, n, _vocabulary(head)), n)
    targets = Targets(layout.targets(ids_BT), layout.before_N, sampling, seen, entropy_gradient)
    with context, scoring(head, targets) if at_head and head is not None else repeating(head, layout.before_N):
        found = layout.forward(model)
    logp_N, entropy_N = found.unbind(-1) if at_head else of_logits(found, targets)
    return layout.spread(logp_N), layout.spread(entropy_N)


def _vocabulary(head: Any) -> int:
    """Tokens that it has logits for; ZeRO-3 leaves no shape of its weights."""
    return int(getattr(head, "out_features", 0) or len(head.weight))
