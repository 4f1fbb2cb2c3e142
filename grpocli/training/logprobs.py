"""Log-probs and entropies of completions, computed at the model's output head without all logits in memory.

In a `scoring` block the model's output head returns `TokenScores` instead of logits, so its forward returns small
tensors, also under DDP, FSDP and ZeRO. LOGITS_AT_ONCE logits are computed at a time, and again in the backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from grpocli.models.frozen_linear import compute_dtype
from grpocli.models.head import Float32Head, parts_, product
from grpocli.rollout.sampling import first_occurrence, sampling_logits
from grpocli.training.packing import Padded

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.training.packing import MicroBatch
    from grpocli.types import Sampling

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 2**24
"""Logits in memory at once: 64 MiB in float32, times a few copies; without copies, on a GPU, as many bytes."""
IN_CACHE = 2**20
"""The same in the forward pass on a CPU: few enough to stay in the cache while log-probs are computed from them."""
COLUMNS = 1024
"""Tokens of the vocabulary per matrix product in the forward pass on a CPU."""


class TokenScores(NamedTuple):
    """What the model says about given tokens, all of one shape."""

    logp: Tensor
    """Log-probs in nats."""
    entropy: Tensor
    """Of the distribution, in nats."""
    top: Tensor
    """1 where no other token is more probable."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens [N] whose log-probs are wanted, and the distribution they are drawn from."""

    ids_N: Tensor
    predictor_N: Tensor | None
    """The index of the hidden state that predicts each token; None: token n is predicted from hidden state n."""
    sampling: Sampling
    seen: TokenHistory | None = None
    """The earlier tokens, for a repetition penalty."""
    entropy_gradient: bool = False
    """Whether entropies have a gradient."""
    on_cpu: bool | None = None
    """Whether scores are computed as on a CPU; None: as the device."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Which tokens of the vocabulary occur before each of N = B x completion tokens."""

    first_BV: Tensor
    """Where each token first occurs in a row's completion; -1: in the prompt, `completion`: nowhere."""
    completion: int

    def rows(self, start: int, end: int) -> Tensor:
        """The tokens seen before each of the tokens start to end, as bools [n, V]."""
        token_N = torch.arange(start, end, device=self.first_BV.device)
        return self.first_BV[token_N // self.completion] < (token_N % self.completion).unsqueeze(1)


@contextmanager
def scoring(head: torch.nn.Module, targets: Targets) -> Iterator[None]:
    """A block in which `head` returns the `TokenScores` of the targets: [..., 3] in float32, or [1, N, 3] if packed."""

    def forward(hidden: Tensor) -> Tensor:
        hidden_NH = _pick(hidden.reshape(-1, hidden.shape[-1]), targets.predictor_N)
        sampling = targets.sampling
        plain = sampling.repetition_penalty == 1 and not sampling.truncates and not targets.entropy_gradient
        linear = type(head) in (torch.nn.Linear, Float32Head) and getattr(head, "bias", None) is None
        if plain and linear and (hidden.device.type == "cpu" or _has_kernels(hidden.device)):
            on_cpu = hidden.device.type == "cpu" if targets.on_cpu is None else targets.on_cpu
            how = _How(sampling.temperature or 1.0, isinstance(head, Float32Head), on_cpu)
            scores = _Scores.apply(hidden_NH, head.weight, targets.ids_N, how)  # type: ignore[no-untyped-call]
        else:
            scores = _any_scores(head, hidden_NH, targets)
        shape = hidden.shape[:-1] if targets.predictor_N is None else (1, len(targets.ids_N))
        return torch.stack(scores, -1).view(*shape, 3)

    with replace_forward(head, forward):
        yield


@contextmanager
def repeating(head: torch.nn.Module | None, predictor_N: Tensor | None) -> Iterator[None]:
    """A block in which `head` returns logits [1, N, V] for hidden states [1, U, H], repeated by `predictor_N`."""
    if head is None or predictor_N is None:
        yield
        return
    plain = head.forward
    with replace_forward(head, lambda hidden: plain(_pick(hidden[0], predictor_N).unsqueeze(0))):
        yield


def _pick(hidden_UH: Tensor, predictor_N: Tensor | None) -> Tensor:
    """Hidden states [N, H] of the targets. An embedding sums its gradient in a fixed order, unlike an index."""
    return hidden_UH if predictor_N is None else torch.nn.functional.embedding(predictor_N, hidden_UH)


@contextmanager
def replace_forward(head: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A block in which the module has another forward; no other thread may call the model meanwhile."""
    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


@torch.no_grad()
def mark_head(head: torch.nn.Module, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """The model's logits when its output head returns a mark, and the mark, in the model's compute dtype.

    They are equal unless the model scales or caps the output of its head.
    """
    marks: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        n = hidden.shape[1]
        mark = 128 * torch.arange(1, 2 * n + 1, device=hidden.device)  # exact in bfloat16
        marks.append(mark.view(1, n, 2).to(hidden.dtype))
        return marks[-1]

    with replace_forward(head, forward):
        logits = model(
            input_ids=torch.zeros(1, 8, dtype=torch.long, device=next(model.parameters()).device), use_cache=False
        ).logits
    return logits, marks[-1]


def _pieces(n: int, size: int) -> Iterator[slice]:
    """Slices of `n` items; at least one, which may be empty."""
    return (slice(start, min(start + size, n)) for start in range(0, max(n, 1), size))


@torch.library.custom_op("grpocli::score_rows", mutates_args=())
def _kernel_scores(logits_nV: torch.Tensor, ids_n: torch.Tensor, temperature: float) -> torch.Tensor:
    """The results [4, n] of `_row_scores`, from logits of the whole vocabulary before the temperature."""
    from grpocli.models.head_kernels import scores

    return scores(logits_nV, ids_n, temperature)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and compiles the kernels of a GPU's head, for which it needs a C compiler."""
    try:
        _kernel_scores(torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.long, device=device), 1.0)
    except (ImportError, OSError, RuntimeError, CalledProcessError):
        logger.warning("Triton does not run here, so the output head takes torch's operations", exc_info=True)
        return False
    return True


@_kernel_scores.register_fake
def _(logits_nV: Tensor, ids_n: Tensor, temperature: float) -> Tensor:
    return logits_nV.new_empty(4, len(ids_n), dtype=torch.float32)


@torch.library.custom_op("grpocli::differentiate_logits", mutates_args=("logits_nv",))
def _kernel_gradient_(
    logits_nv: torch.Tensor,
    ids_n: torch.Tensor,
    normalizer_n: torch.Tensor,
    gradient_n: torch.Tensor,
    start: int,
    temperature: float,
) -> None:
    """Replace logits by their gradient, as `_How.gradient_` does, in their own dtype."""
    from grpocli.models.head_kernels import gradient_

    gradient_(logits_nv, ids_n, normalizer_n, gradient_n, start, temperature)


@_kernel_gradient_.register_fake
def _(*_: Any) -> None:
    return


@dataclass(frozen=True, slots=True)
class _How:
    """How `_Scores` computes."""

    temperature: float
    in_float32: bool
    """Whether the head is a `Float32Head`."""
    on_cpu: bool
    """Without the kernels of a GPU."""

    def at_once(self, dtype: torch.dtype) -> int:
        """Logits of a piece. The kernels need no copies in float32, and so take as many bytes as a CPU."""
        if self.on_cpu or self.in_float32:
            return LOGITS_AT_ONCE
        return LOGITS_AT_ONCE * (2 if dtype == torch.float32 else 6)

    def logits(self, hidden_nH: Tensor, weight_vH: Tensor) -> Tensor:
        """Logits: on a CPU in float32 and divided by the temperature, on a GPU as the product writes them."""
        with torch.autocast(hidden_nH.device.type, enabled=False):
            logits_nv = product(hidden_nH, weight_vH.T, self.on_cpu) if self.in_float32 else hidden_nH @ weight_vH.T
        if not self.on_cpu:
            return logits_nv
        logits_nv = logits_nv.float()
        return logits_nv if self.temperature == 1 else logits_nv.div_(self.temperature)

    def gradient_(self, logits_Nv: Tensor, ids_N: Tensor, normalizer_N: Tensor, gradient_N: Tensor, start: int) -> None:
        """Replace logits of the tokens from `start` on by their gradient: (1 at the chosen token) - probabilities.

        gradient_N: of the log-probs, divided by the temperature.
        """
        if not self.on_cpu:
            _kernel_gradient_(logits_Nv, ids_N, normalizer_N, gradient_N, start, self.temperature)
            return
        gradient_N1 = gradient_N.unsqueeze(1)
        logits_Nv.sub_(normalizer_N.unsqueeze(1)).exp_().mul_(-gradient_N1)
        place_N1 = (ids_N - start).unsqueeze(1)
        here_N1 = (place_N1 >= 0) & (place_N1 < logits_Nv.shape[1])
        logits_Nv.scatter_add_(1, place_N1 * here_N1, gradient_N1 * here_N1)

    def factors(self, gradient_Nv: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Tensors whose sum is the gradient of logits, to be multiplied by operands of a dtype.

        A `Float32Head` does not round it: a CPU multiplies it in float32, and a GPU takes it in two parts.
        """
        if not self.in_float32:
            return (gradient_Nv.to(dtype),)
        return (gradient_Nv,) if self.on_cpu or dtype == torch.float32 else parts_(gradient_Nv, dtype)

    def add_product(self, sum_NM: Tensor, a_NK: Tensor, b_KM: Tensor, beta: int = 1) -> None:
        """sum <- beta * sum + a b. A GPU multiplies and adds at once."""
        if not self.on_cpu:
            add_product_(sum_NM, a_NK, b_KM, beta)
            return
        product_NM = product(a_NK, b_KM, self.on_cpu) if self.in_float32 else a_NK @ b_KM
        sum_NM.add_(product_NM) if beta else sum_NM.copy_(product_NM)


def add_product_(sum_NM: Tensor, a_NK: Tensor, b_KM: Tensor, beta: int) -> None:
    """sum <- beta * sum + a b, on a GPU, in the dtype of the sum: that of the operands, or float32."""
    wider: Any = {} if sum_NM.dtype == a_NK.dtype else {"out_dtype": sum_NM.dtype}
    torch.addmm(sum_NM, a_NK, b_KM, beta=beta, out=sum_NM, **wider)


class _Scores(torch.autograd.Function):
    """`TokenScores` for a linear head with only a temperature; entropies have no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, how: _How) -> tuple[Tensor, ...]:
        dtype = compute_dtype(hidden_NH)
        cast_NH, cast_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        if how.on_cpu:
            pieces = _pieces(len(ids_N), max(1, IN_CACHE // COLUMNS))
            found = [_row_scores(cast_NH[piece], cast_VH, ids_N[piece], how) for piece in pieces]
        else:
            rows = max(1, how.at_once(dtype) // max(1, len(cast_VH)))
            if ctx.needs_input_grad[1]:  # the backward pass holds the weight's gradient besides
                rows += weight_VH.shape[1] * weight_VH.itemsize // (4 if how.in_float32 else dtype.itemsize)
            found = [
                _kernel_scores(how.logits(cast_NH[piece], cast_VH), ids_N[piece], how.temperature)
                for piece in _pieces(len(ids_N), rows)
            ]
        logp_N, entropy_N, top_N, normalizer_N = torch.cat(found, 1)
        ctx.save_for_backward(cast_NH, cast_VH, ids_N, normalizer_N)
        ctx.how, ctx.dtypes = how, (hidden_NH.dtype, weight_VH.dtype)
        ctx.mark_non_differentiable(entropy_N, top_N)
        return logp_N, entropy_N, top_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cast_NH, cast_VH, ids_N, normalizer_N = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        how, (hidden_dtype, weight_dtype) = ctx.how, ctx.dtypes
        gradient_N = gradients[0] / how.temperature
        hidden_NH = torch.zeros_like(cast_NH, dtype=torch.float32) if of_hidden else None
        weight_VH = torch.empty_like(cast_VH, dtype=weight_dtype) if of_weight else None
        # pieces of the vocabulary, not of the rows, so that each part of the weight's gradient is written once
        columns = max(1, how.at_once(cast_VH.dtype) // max(1, len(ids_N)))
        columns = columns // 64 * 64 or columns  # products are fast at multiples of 64
        for piece in _pieces(len(cast_VH), columns):
            logits_Nv = how.logits(cast_NH, cast_VH[piece])
            how.gradient_(logits_Nv, ids_N, normalizer_N, gradient_N, piece.start)
            factors = how.factors(logits_Nv, cast_VH.dtype)
            del logits_Nv  # before the products
            for k, factor_Nv in enumerate(factors):
                if hidden_NH is not None:
                    how.add_product(hidden_NH, factor_Nv, cast_VH[piece])
                if weight_VH is not None:
                    how.add_product(weight_VH[piece], factor_Nv.T, cast_NH, beta=min(k, 1))
            del factors, factor_Nv  # before the next piece
        return None if hidden_NH is None else hidden_NH.to(hidden_dtype), weight_VH, None, None


def _row_scores(hidden_nH: Tensor, weight_VH: Tensor, ids_n: Tensor, how: _How) -> Tensor:
    """Log-probs of the ids, entropies, whether the ids are the most probable ones, and normalizers: [4, n].

    By an online softmax over pieces of the vocabulary, which keeps the largest logit so far and, relative to it, the
    sums of exp(logit) and of exp(logit) * logit.
    """
    n = len(ids_n)
    largest_n = hidden_nH.new_full((n,), torch.finfo(torch.float32).min, dtype=torch.float32)
    sum_n, weighted_n, chosen_n = (torch.zeros_like(largest_n) for _ in range(3))
    for piece in _pieces(len(weight_VH), COLUMNS):
        logits_nv = how.logits(hidden_nH, weight_VH[piece])
        place_n = ids_n - piece.start
        here_n = (place_n >= 0) & (place_n < logits_nv.shape[1])
        chosen_n = logits_nv.gather(1, (place_n * here_n).unsqueeze(1)).squeeze(1).where(here_n, chosen_n)
        before_n, largest_n = largest_n, torch.maximum(largest_n, logits_nv.amax(-1))
        weights_nv = logits_nv.sub_(largest_n.unsqueeze(1)).exp()
        less_n = before_n - largest_n
        weighted_n = less_n.exp() * (weighted_n + less_n * sum_n)
        sum_n = less_n.exp() * sum_n + weights_nv.sum(-1)
        weighted_n = weighted_n + weights_nv.mul_(logits_nv).sum(-1)
    normalizer_n = largest_n + sum_n.log()
    top_n = (chosen_n >= largest_n).to(chosen_n.dtype)
    return torch.stack((chosen_n - normalizer_n, sum_n.log() - weighted_n / sum_n, top_n, normalizer_n))


def _any_scores(head: torch.nn.Module, hidden_NH: Tensor, targets: Targets) -> TokenScores:
    """Scores for any head and any sampling parameters, with torch's autograd."""

    def scores(hidden_nH: Tensor, piece: slice) -> TokenScores:
        return _token_scores(type(head).forward(head, hidden_nH), targets, piece)

    pieces = _pieces(len(targets.ids_N), max(1, LOGITS_AT_ONCE // _vocabulary(head)))
    return _join([checkpoint(scores, hidden_NH[piece], piece, use_reentrant=False) for piece in pieces])


def of_logits(logits_NV: Tensor, targets: Targets) -> TokenScores:
    """Scores from logits [N, V], for a model that scales or caps the output of its head."""
    pieces = _pieces(len(targets.ids_N), max(1, LOGITS_AT_ONCE // logits_NV.shape[1]))
    return _join([_token_scores(logits_NV[piece], targets, piece) for piece in pieces])


def _join(pieces: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _token_scores(logits_nV: Tensor, targets: Targets, piece: slice) -> TokenScores:
    """The scores of a piece of the targets."""
    ids_n = targets.ids_N[piece]
    seen_nV = targets.seen.rows(piece.start, piece.stop) if targets.seen else None
    logits_nV = sampling_logits(logits_nV, targets.sampling, keep_N=ids_n, seen_NV=seen_nV)
    normalizer_n = logits_nV.logsumexp(-1)
    chosen_n = logits_nV.gather(1, ids_n.unsqueeze(1)).squeeze(1)
    top_n = (chosen_n >= logits_nV.amax(-1)).to(chosen_n.dtype).detach()
    with torch.set_grad_enabled(targets.entropy_gradient and torch.is_grad_enabled()):
        probs_nV = (logits_nV - normalizer_n.unsqueeze(1)).exp()
        entropy_n = normalizer_n - (probs_nV * logits_nV.masked_fill(logits_nV.isinf(), 0.0)).sum(-1)
    return TokenScores(chosen_n - normalizer_n, entropy_n, top_n)


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module that turns hidden states into logits; the model may be wrapped by DDP or DeepSpeed."""
    plain: Any = getattr(model, "module", model)
    head: torch.nn.Module | None = plain.get_output_embeddings()
    return head


def completion_scores(
    model: torch.nn.Module,
    batch: MicroBatch,
    sampling: Sampling,
    context: AbstractContextManager[Any],
    entropy_gradient: bool = False,
    at_head: bool = True,
    on_cpu: bool | None = None,
) -> TokenScores:
    """The scores [B, T] of a micro-batch's completions under any causal model of transformers.

    Values at padding are undefined. at_head: whether the model's logits are exactly the output of its output head.
    on_cpu: as in `Targets`.
    """
    head, layout, ids_BT = output_head(model), batch.layout, batch.completion_ids
    seen = None
    if sampling.repetition_penalty != 1:
        if not isinstance(layout, Padded):
            raise ValueError("a repetition penalty needs padded rows")
        n = ids_BT.shape[1]
        seen = TokenHistory(first_occurrence(layout.input_ids, layout.attention_mask, n, _vocabulary(head)), n)
    targets = Targets(layout.targets(ids_BT), layout.predictor_N, sampling, seen, entropy_gradient, on_cpu)
    with context, scoring(head, targets) if at_head and head is not None else repeating(head, layout.predictor_N):
        output = layout.forward(model)
    values_KN = torch.stack(output.unbind(-1) if at_head else of_logits(output, targets))
    return TokenScores(*layout.spread(values_KN))


def _vocabulary(head: Any) -> int:
    """The number of logits; ZeRO-3 hides the shape of weights, so `out_features` comes first."""
    return int(getattr(head, "out_features", 0) or len(head.weight))
