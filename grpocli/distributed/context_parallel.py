"""hardware.context_parallel: several processes share each micro-batch, for rows that fit no device.

As in DeepSpeed-Ulysses (arXiv 2309.14509): each process has a part of the tokens, and every operation of a decoder
layer but attention is per token. Around attention an all-to-all exchanges parts: from all heads of a process's tokens
to some heads of all tokens, and back. So attention itself, over segments and with any kernel, is that of a single
process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from grpocli.models.frozen_linear import compute_dtype
from grpocli.models.shared_prompt_attention import Attends

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class ContextParallel:
    """This process as number `rank` of the `size` processes that share a micro-batch.

    It has the tokens rank, rank + size, rank + 2 size ... of a sequence, whose length is a multiple of `size`.
    """

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    @classmethod
    def of(cls, rank: int, processes: int, size: int, timeout: timedelta) -> ContextParallel | None:
        """This process in its group of `size` processes of consecutive ranks; None for a size of 1. Collective."""
        if size == 1:
            return None
        found = None
        for first in range(0, processes, size):  # every process takes part in making every group
            group = torch.distributed.new_group(list(range(first, first + size)), timeout=timeout)
            if first <= rank < first + size:
                found = cls(group, rank - first, size)
        return found

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all of them where one is enough."""
        return self.rank == 0

    def by_heads(self, *states: Tensor) -> list[Tensor]:
        """States [1, heads, L / size, D] of this process's tokens -> [1, heads / size, L, D] of all tokens.

        Heads of keys and values are repeated if there are fewer than processes, or they cannot be dealt out evenly.
        """
        repeats = [self.size // math.gcd(state.shape[1], self.size) for state in states]
        parts = [
            (state if times == 1 else state.repeat_interleave(times, 1))[0].unflatten(0, (self.size, -1))
            for state, times in zip(states, repeats, strict=True)
        ]
        # one message for queries, keys and values: [size, L / size, heads / size * D, all three]
        sent = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], 2)
        line = self._exchange(sent).transpose(0, 1).flatten(0, 1)
        widths = [part.shape[1] * part.shape[3] for part in parts]
        return [
            piece.unflatten(1, (part.shape[1], -1)).transpose(0, 1).unsqueeze(0)
            for part, piece in zip(parts, line.split(widths, 1), strict=True)
        ]

    def by_tokens(self, output: Tensor) -> Tensor:
        """The output of attention [1, L, heads / size, D] of all tokens -> [1, L / size, heads, D] of own tokens."""
        sent = output[0].unflatten(0, (-1, self.size)).transpose(0, 1)
        return self._exchange(sent).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the processes' parts. Its gradient goes to this process's part alone, so that they add up."""
        total: Tensor = _Sum.apply(part, self.group)  # type: ignore[no-untyped-call]
        return total

    def _exchange(self, sent: Tensor) -> Tensor:
        """sent[k] goes to process k; the result[k] comes from process k."""
        received: Tensor = _AllToAll.apply(sent.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return received


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention of this process's tokens of a sequence."""

    whole: Attends
    """Attention of all `tokens` tokens."""
    tokens: int
    """The processes' shares may have filler behind them."""
    processes: ContextParallel

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        """The output [1, L / size, heads, D] for states [1, heads, L / size, D]."""
        if query.is_cuda:  # the rotation of positions has left them in float32, twice the bytes to exchange
            query, key, value = (state.to(compute_dtype(query)) for state in (query, key, value))
        filler = query.shape[2] * self.processes.size - self.tokens
        query, key, value = (state[:, :, : self.tokens] for state in self.processes.by_heads(query, key, value))
        output = self.whole.attend(query, key, value, how)
        return self.processes.by_tokens(pad(output, (0, 0, 0, 0, 0, filler)) if filler else output)


class _AllToAll(torch.autograd.Function):
    """torch's all-to-all of equal parts along the first dimension. Its gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient: Tensor = _AllToAll.apply(gradients[0].contiguous(), ctx.group)  # type: ignore[no-untyped-call]
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over processes; see `ContextParallel.sum`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
