"""From rollouts to micro-batches: how rows are dealt to processes, grouped, and laid out in one forward."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad

from grpocli.distributed.context_parallel import SharedAttention
from grpocli.hardware import to_device
from grpocli.models import flex_attention
from grpocli.models.flex_attention import TiledMask
from grpocli.models.shared_prompt_attention import Attends, Segments, masks_without_waiting, rounded
from grpocli.types import Group, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.distributed.context_parallel import ContextParallel

    Array = NDArray[Any]

PADDING = 0.1
"""The largest share of padding in a padded micro-batch."""
STEP = 64
"""Tokens between two sizes of micro-batches that `Packed.pack` tries."""
UNEVEN = 0.1
"""Tokens above an equal share that a process may get, as a fraction, so that each prompt is computed in one process."""


class _WholeRows:
    """A layout of rows that no other process shares."""

    __slots__ = ()

    def total(self, part: Tensor) -> Tensor:
        """A sum over the tokens of this layout, summed over the layouts of all processes that share the rows."""
        return part


@dataclass(frozen=True, slots=True)
class Padded(_WholeRows):
    """One row per sequence: prompts padded on the left, completions on the right, so that completions align.

    input_ids, attention_mask, position_ids [B, L].
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion: int
    """The last so many columns are completions."""
    full: bool = False
    """Whether no row has padding."""
    predictor_N: ClassVar[None] = None
    """Each target token has a hidden state of its own."""

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device) -> Padded:
        # a real token, because models keep a zero embedding for padding, whose norm has no gradient (Gemma 3n)
        filler = next((token for r in rows for token in r.prompt_ids), 0)
        prompts, completions = [r.prompt_ids for r in rows], [r.completion_ids for r in rows]
        ids_BL = np.concatenate(
            [ragged(prompts, np.int64, filler, left=True), ragged(completions, np.int64, filler)], 1
        )
        mask_BL = np.concatenate([present(prompts, left=True), present(completions)], 1)
        position_BL = (mask_BL.cumsum(1) - 1).clip(min=0)
        return cls(
            input_ids=to_device(torch.from_numpy(ids_BL), device),
            attention_mask=to_device(torch.from_numpy(mask_BL.astype(np.int64)), device),
            position_ids=to_device(torch.from_numpy(position_BL), device),
            completion=max(map(len, completions)),
            full=bool(mask_BL.all()),
        )

    @staticmethod
    def deal(rows: Sequence[Row], processes: int) -> list[list[Row]]:
        """The rows of each process, balanced by tokens."""
        return _least_loaded([[row] for row in rows], processes)

    @staticmethod
    def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of at most max_tokens tokens, of which at most PADDING is padding."""
        batches: list[list[Row]] = []
        for row in sorted(rows, key=lambda r: (len(r.completion_ids), len(r.prompt_ids))):
            tried = [*batches[-1], row] if batches else [row]
            size = Padded.size(tried)
            if not batches or size > max_tokens or size - Padded.distinct(tried) > PADDING * size:
                batches.append([])
            batches[-1].append(row)
        return batches

    @staticmethod
    def size(rows: Sequence[Row]) -> int:
        """The number of tokens that the model computes, padding included."""
        return len(rows) * (max(len(r.prompt_ids) for r in rows) + max(len(r.completion_ids) for r in rows))

    @staticmethod
    def distinct(rows: Sequence[Row]) -> int:
        """The number of tokens without padding."""
        return sum(row.n_tokens for row in rows)

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """The target tokens [N]: all of [B, T], padding included."""
        return completion_ids_BT.reshape(-1)

    def spread(self, values_KN: Tensor) -> Tensor:
        """K values of each target as [K, B, T]."""
        return values_KN.view(len(values_KN), len(self.input_ids), self.completion)

    def members(self) -> Tensor:
        """[B, N] in float32: 1 where one of all N tokens is of a row, its prompt included."""
        members_BN: Tensor = torch.block_diag(*self.attention_mask.float())
        return members_BN

    def forward(self, model: torch.nn.Module) -> Tensor:
        """The output of the output head for each target [N, ...]."""
        length = self.input_ids.shape[1]
        before_T = torch.arange(length - self.completion - 1, length - 1, device=self.input_ids.device)
        with masks_without_waiting(self.full):
            logits: Tensor = model(
                input_ids=self.input_ids,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids,
                use_cache=False,
                logits_to_keep=before_T,
            ).logits
        return logits.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Packed(_WholeRows):
    """All rows in one sequence: each prompt once, before its completions, and filler up to the next `fitting` size."""

    input_ids: Tensor
    """[1, L], as `position_ids`."""
    position_ids: Tensor
    keep_U: Tensor
    """The positions whose hidden states predict completion tokens, each once: so gradients have a fixed order."""
    predictor_N: Tensor
    """For each completion token, row by row, the index in keep_U of the position that predicts it; then filler."""
    index_C: Tensor
    """The indices of the completion tokens in [B, T], flattened, with T = `completion`."""
    completion: int
    rows: int
    segments: Attends
    spans: tuple[tuple[int, int, int, int], ...] = ()
    """For each row the first position of its prompt and of its completion, and their numbers of tokens."""
    attention: ClassVar[type[Segments | TiledMask]] = Segments

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, on_cpu: bool | None = None) -> Packed:
        """The rows in one sequence. on_cpu: whether attention is called as on a CPU; None: as on `device`."""
        on_cpu = device.type == "cpu" if on_cpu is None else on_cpu
        ids: list[int] = []
        spans, prompts, positions = [(0, 0, 0, 0)] * len(rows), [], []
        for prompt, row_indices in by_prompt(rows):
            if not prompt:
                raise ValueError("a prompt has no tokens, so nothing predicts the first token of its completions")
            start = len(ids)
            ids += prompt
            positions.append(np.arange(len(prompt)))
            for index in row_indices:
                own = rows[index].completion_ids
                spans[index] = (start, len(ids), len(prompt), len(own))
                ids += own
                positions.append(np.arange(len(prompt), len(prompt) + len(own)))
            prompts.append((len(prompt), [n for k in row_indices if (n := len(rows[k].completion_ids))]))
        if filler := cls.fitting(len(ids)) - len(ids):  # real tokens, as in `Padded.build`, to which none attends
            ids += ids[-1:] * filler
            positions.append(np.zeros(filler, np.int64))
            prompts.append((filler, []))
        keep_U, predictor_N = index_predictors(predictors(spans))
        present_BT = present([r.completion_ids for r in rows])
        return cls(
            input_ids=to_device(torch.from_numpy(np.array([ids])), device),
            position_ids=to_device(torch.from_numpy(np.concatenate(positions)[None]), device),
            keep_U=to_device(torch.from_numpy(keep_U), device),
            predictor_N=to_device(torch.from_numpy(predictor_N), device),
            index_C=to_device(torch.from_numpy(np.flatnonzero(present_BT)), device),
            completion=present_BT.shape[1],
            rows=len(rows),
            segments=cls.attention.build(prompts, device, on_cpu),
            spans=tuple(spans),
        )

    @staticmethod
    def deal(rows: Sequence[Row], processes: int) -> list[list[Row]]:
        """The rows of each process, balanced by tokens; groups are split only if whole ones would be UNEVEN."""
        if processes == 1:
            return [list(rows)]
        groups = [[rows[k] for k in numbers] for _, numbers in by_prompt(rows)]
        share = sum(map(_cost, groups)) / processes
        whole = _least_loaded(groups, processes)
        if max(map(Packed.distinct, whole)) <= (1 + UNEVEN) * share:
            return whole
        parts = []
        for group in groups:
            group.sort(key=lambda r: -len(r.completion_ids))
            pieces = min(len(group), -int(-2 * _cost(group) // share))
            parts += [group[i::pieces] for i in range(pieces)]
        return _least_loaded(parts, processes)

    @staticmethod
    def fitting(n: int) -> int:
        """The size of a sequence of n tokens, filler included."""
        return rounded(n)

    @classmethod
    def pack(cls, rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """As few micro-batches of at most max_tokens tokens as possible, counting a prompt once, and of about one size.

        A small one at the end would have a GPU wait for each launch. A longer row has its own micro-batch.
        """
        longest_first = [
            sorted((rows[k] for k in numbers), key=lambda r: -len(r.completion_ids)) for _, numbers in by_prompt(rows)
        ]
        batches = cls._filled(longest_first, max_tokens)
        n = len(batches)
        if n < 2:
            return batches
        limits = range(0, max_tokens, STEP)
        least = bisect_left(limits, True, key=lambda limit: len(cls._filled(longest_first, limit)) <= n)
        return cls._filled(longest_first, limits[least]) if least < len(limits) else batches

    @classmethod
    def _filled(cls, groups: Sequence[Sequence[Row]], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of which each but the last has as many rows as fit. groups: rows with the same prompt."""
        batches: list[list[Row]] = []
        size, limit = 0, max(max_tokens, cls.fitting(1))  # the filler of a few rows has room for more
        for group in groups:
            due = len(group[0].prompt_ids)  # its tokens if the prompt is not in this micro-batch yet, otherwise 0
            for row in group:
                if not batches or cls.fitting(size + due + len(row.completion_ids)) > limit:
                    batches.append([])
                    size, due = 0, len(row.prompt_ids)
                batches[-1].append(row)
                size += due + len(row.completion_ids)
                due = 0
        return batches

    @classmethod
    def size(cls, rows: Sequence[Row]) -> int:
        """The number of tokens that the model computes, filler included."""
        return cls.fitting(Packed.distinct(rows))

    @staticmethod
    def distinct(rows: Sequence[Row]) -> int:
        """The number of tokens without filler; prompts count once."""
        return sum(len(prompt) for prompt, _ in by_prompt(rows)) + sum(len(r.completion_ids) for r in rows)

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """The target tokens [N]: the completions, row by row, and filler."""
        ids_C = completion_ids_BT.reshape(-1).index_select(0, self.index_C)
        return pad(ids_C, (0, len(self.predictor_N) - len(ids_C)))

    def spread(self, values_KN: Tensor) -> Tensor:
        """K values of each target as [K, B, T]; 0 at padding."""
        flat = values_KN.new_zeros(len(values_KN), self.rows * self.completion)
        spread = flat.index_copy(1, self.index_C, values_KN[:, : len(self.index_C)])
        return spread.view(len(values_KN), self.rows, self.completion)

    def members(self) -> Tensor:
        """[B, N] in float32: 1 where one of all N tokens is of a row, its prompt included."""
        member_BN = torch.zeros(self.rows, self.input_ids.shape[1])
        for row, (prompt, first, n_prompt, n) in enumerate(self.spans):
            member_BN[row, prompt : prompt + n_prompt] = 1
            member_BN[row, first : first + n] = 1
        return to_device(member_BN, self.input_ids.device)

    def forward(self, model: torch.nn.Module) -> Tensor:
        """The output of the output head for each target; `logprobs.scoring` repeats hidden states by `predictor_N`."""
        # transformers uses a mask of four dimensions as it is, instead of making one of L x L
        logits: Tensor = model(
            input_ids=self.input_ids,
            attention_mask=self.input_ids.new_zeros(1, 1, 1, 1),
            position_ids=self.position_ids,
            use_cache=False,
            logits_to_keep=self.keep_U,
            segments=self.segments,
        ).logits
        return logits[0]


class FlexPacked(Packed):
    """The same, whose attention is torch's `flex_attention`: whole tiles, whose number has 5 significant bits."""

    __slots__ = ()
    attention = TiledMask

    @staticmethod
    def fitting(n: int) -> int:
        """The size of a sequence of n tokens: two tiles at least, because torch compiles apart what there is one of."""
        return flex_attention.TILE * max(2, rounded(-(-n // flex_attention.TILE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard(Packed):
    """hardware.context_parallel: this process's tokens of a packed sequence, and the completion tokens they predict.

    input_ids, position_ids, keep_U and predictor_N are of this process's tokens, the other fields of the whole.
    `forward`, `spread` and `total` are collective among the processes. `shards_of` makes a class for them.
    """

    whole: Packed
    """The sequence, the same in all processes."""
    target_C: Tensor
    """The indices of this process's targets among all completion tokens."""
    processes: ClassVar[ContextParallel]
    layout: ClassVar[type[Packed]]

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, on_cpu: bool | None = None) -> SequenceShard:
        whole, n, rank = cls.layout.build(rows, device, on_cpu), cls.processes.size, cls.processes.rank
        tokens = whole.input_ids.shape[1]
        # from `spans`, which are on the CPU, so that nothing waits for the device
        position_C = predictors(whole.spans)
        target_C = np.flatnonzero(position_C % n == rank)
        keep_U, predictor_N = index_predictors(position_C[target_C] // n)
        return cls(
            input_ids=_divisible(whole.input_ids, n)[:, rank::n],
            position_ids=_divisible(whole.position_ids, n)[:, rank::n],
            keep_U=to_device(torch.from_numpy(keep_U), device),
            predictor_N=to_device(torch.from_numpy(predictor_N), device),
            segments=SharedAttention(whole.segments, tokens, cls.processes),
            **{name: getattr(whole, name) for name in ("index_C", "completion", "rows", "spans")},
            whole=whole,
            target_C=to_device(torch.from_numpy(target_C), device),
        )

    @classmethod
    def pack(cls, rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of which each process has at most max_tokens tokens."""
        return cls.layout.pack(rows, max_tokens * cls.processes.size)

    @classmethod
    def size(cls, rows: Sequence[Row]) -> int:
        """The number of tokens that all processes together compute."""
        return cls.layout.size(rows)

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """This process's target tokens [N], and filler."""
        ids_N = self.whole.targets(completion_ids_BT).index_select(0, self.target_C)
        return pad(ids_N, (0, len(self.predictor_N) - len(ids_N)))

    def spread(self, values_KN: Tensor) -> Tensor:
        """K values of each target of all processes as [K, B, T]; 0 at padding."""
        zeros = values_KN.new_zeros(len(values_KN), len(self.whole.predictor_N))
        own = zeros.index_copy(1, self.target_C, values_KN[:, : len(self.target_C)])
        return self.whole.spread(self.processes.sum(own))

    def members(self) -> Tensor:
        """[B, N] in float32: 1 where one of this process's N tokens is of a row, its prompt included."""
        member_BL, n = self.whole.members(), self.processes.size
        return pad(member_BL, (0, -member_BL.shape[1] % n))[:, self.processes.rank :: n]

    def total(self, part: Tensor) -> Tensor:
        """The sum over the processes of a sum over their tokens."""
        return self.processes.sum(part)


_SHARDS: dict[tuple[ContextParallel, type[Packed]], type[SequenceShard]] = {}


def shards_of(processes: ContextParallel, layout: type[Packed]) -> type[SequenceShard]:
    """The layout of processes that share each micro-batch. layout: of whole sequences."""
    if (key := (processes, layout)) not in _SHARDS:
        _SHARDS[key] = type("SequenceShard", (SequenceShard,), {"processes": processes, "layout": layout})
    return _SHARDS[key]


def _divisible(values_1L: Tensor, n: int) -> Tensor:
    """The values, and their last one repeated until n divides their number: a real token, as in `Padded.build`."""
    filler = -values_1L.shape[1] % n
    return torch.cat([values_1L, values_1L[:, -1:].expand(1, filler)], 1) if filler else values_1L


Layout = Padded | Packed


def _least_loaded(parts: Sequence[list[Row]], processes: int) -> list[list[Row]]:
    """Deal parts to processes: the largest first, each to the least loaded process."""
    shares: list[list[Row]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for part in sorted(parts, key=lambda part: -_cost(part)):
        poorest = loads.index(min(loads))
        shares[poorest] += part
        loads[poorest] += _cost(part)
    return shares


def _cost(rows: Sequence[Row]) -> int:
    """The number of tokens of rows with the same prompt."""
    return len(rows[0].prompt_ids) + sum(len(r.completion_ids) for r in rows)


def by_prompt(rows: Sequence[Row]) -> Iterator[tuple[list[int], list[int]]]:
    """Each group's prompt with the indices of its rows."""
    numbers = sorted(range(len(rows)), key=lambda k: rows[k].group)
    for _, group in groupby(numbers, key=lambda k: (rows[k].group, tuple(rows[k].prompt_ids))):
        indices = list(group)
        yield rows[indices[0]].prompt_ids, indices


def predictors(spans: Iterable[tuple[int, int, int, int]]) -> Array:
    """The position that predicts each completion token [C], row by row. spans: of `Packed`."""
    parts = [np.zeros(0, np.int64)]
    for prompt, first, n_prompt, n in spans:
        parts += [np.array([prompt + n_prompt - 1]), np.arange(first, first + n - 1)] if n else []
    return np.concatenate(parts)


def index_predictors(position_C: Array) -> tuple[Array, Array]:
    """`keep_U` and `predictor_N` of `Packed` for the positions that predict completion tokens."""
    keep_U, predictor_N = np.unique(position_C, return_inverse=True)
    predictor_N = np.pad(predictor_N, (0, rounded(len(predictor_N)) - len(predictor_N)))
    return keep_U if len(keep_U) else np.zeros(1, np.int64), predictor_N


def present(values: Sequence[Sequence[float]], left: bool = False) -> Array:
    """Where values of different lengths are in [B, T], and no padding. left: the padding comes first."""
    present_BT: Array = np.arange(max(map(len, values))) < np.array([len(one) for one in values])[:, None]
    return present_BT[:, ::-1] if left else present_BT


def ragged(values: Sequence[Sequence[float]], dtype: Any, value: float = 0, left: bool = False) -> Array:
    """Values of different lengths as [B, T], padded with `value`."""
    present_BT = present(values, left)
    padded_BT = np.full(present_BT.shape, value, dtype)
    padded_BT[present_BT] = np.fromiter(chain.from_iterable(values), dtype)
    return padded_BT


def padded(values: Sequence[Sequence[float]], dtype: Any = None) -> Tensor:
    """The same as a tensor, padded with 0. dtype: of numpy; None: torch's default."""
    return torch.from_numpy(ragged(values, dtype or str(torch.get_default_dtype()).removeprefix("torch.")))


def rows_of(groups: Sequence[Group], advantages_PG: Tensor, algorithm: Algorithm, version: int) -> list[Row]:
    """One row for each completion, with its advantage. version: the weight version that the step trains."""
    return [
        Row.of(
            rollout,
            advantage * group.prompt.loss_multiplier,
            number,
            algorithm.keep.mask_truncated,
            algorithm.old_is_sampler(stale=rollout.completion.version < version),
        )
        for number, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True))
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


@dataclass(slots=True)
class RowBatch:
    """The rows of a micro-batch, and what is known of their tokens so far."""

    rows: list[Row]
    known: dict[str, Tensor] = field(default_factory=dict)
    """[B, T], padded as `MicroBatch`, NaN where unknown, by the names of fields of `Row`. And `selected`: 1 for tokens
    in the policy-gradient term (without it: all)."""

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> RowBatch:
        """The rows with the log-probs that they bring along."""
        known = {}
        if any(row.old_logp is not None for row in rows):
            values = [row.old_logp or [math.nan] * len(row.completion_ids) for row in rows]
            known["old_logp"] = to_device(padded(values), device)
        return cls(rows, known)

    def set_missing(self, name: str, values_BT: Tensor) -> None:
        """Set values where they are unknown; those of the sampler or of an earlier update stay."""
        known_BT = self.known.get(name)
        self.known[name] = values_BT if known_BT is None else values_BT.where(known_BT.isnan(), known_BT)

    def tokens(self, names: Sequence[str]) -> Tensor:
        """K kinds of values of all tokens, row by row [K, N]; NaN where they are unknown."""
        index_N = torch.from_numpy(np.flatnonzero(present([row.completion_ids for row in self.rows])))
        unknown_BT = torch.full_like(next(iter(self.known.values())), math.nan)
        values_KBT = torch.stack([self.known.get(name, unknown_BT) for name in names])
        return values_KBT.flatten(1).index_select(1, to_device(index_N, values_KBT.device))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of rows that no update changes. `layout` holds the same rows as the model's forward takes them.

    completion_ids, mask, rollout_logp [B, T]; advantages, group_ids [B].
    """

    layout: Layout
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    group_ids: Tensor
    rollout_logp: Tensor

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, layout: type[Layout] = Padded) -> MicroBatch:
        """The rows, padded, on `device`."""
        return cls(
            layout=layout.build(rows, device),
            completion_ids=to_device(padded([r.completion_ids for r in rows], np.int64), device),
            mask=to_device(padded([r.mask for r in rows], np.int64), device),
            advantages=to_device(torch.tensor([r.advantage for r in rows]), device),
            group_ids=to_device(torch.tensor([r.group for r in rows]), device),
            rollout_logp=to_device(padded([r.rollout_logp for r in rows]), device),
        )


def group_spans(n_groups: int, minibatches: int) -> list[range]:
    """The groups of each window of an epoch (one optimizer update); sizes differ by at most one group, none is 0."""
    pieces = min(minibatches, n_groups)
    edges = [n_groups * i // pieces for i in range(pieces + 1)] if pieces else []
    return [range(a, b) for a, b in pairwise(edges)]
