"""How the tokens of a micro-batch's rows lie in one forward of the model: end to end, or side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from grpocli.models.attention import Block, Segment, Segments, blocks_of

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.types import Row


PADDING = 0.1
"""The most of a padded micro-batch that is padding."""
UNEVEN = 0.1
"""How much more than its share a process may have, so that no prompt is computed in two of them."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows side by side: prompts padded on the left, completions on the right, so that completions align.

    input_ids, attention_mask, position_ids [B, L], of which the last `completion` are completions.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion: int

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device) -> Padded:
        prompts_BL = pad([torch.tensor(r.prompt_ids) for r in rows], left=True)
        prompt_mask_BL = pad([torch.ones(len(r.prompt_ids), dtype=torch.long) for r in rows], left=True)
        ids_BT = pad([torch.tensor(r.completion_ids, dtype=torch.long) for r in rows])
        present_BT = pad([torch.ones(len(r.completion_ids), dtype=torch.long) for r in rows])
        attention_mask = torch.cat([prompt_mask_BL, present_BT], 1)
        return cls(
            input_ids=torch.cat([prompts_BL, ids_BT], 1).to(device),
            attention_mask=attention_mask.to(device),
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0).to(device),
            completion=ids_BT.shape[1],
        )

    @staticmethod
    def deal(rows: Sequence[Row], processes: int) -> list[list[Row]]:
        """Rows for each process, balanced by tokens: longest first, to whoever has least. The same in every process."""
        return _least_loaded([[row] for row in rows], processes)

    @staticmethod
    def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of at most max_tokens tokens, padding included, which is at most a tenth of them."""
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
        """Tokens that the model computes, padding included."""
        return len(rows) * (max(len(r.prompt_ids) for r in rows) + max(len(r.completion_ids) for r in rows))

    @staticmethod
    def distinct(rows: Sequence[Row]) -> int:
        """Tokens of them that are no padding."""
        return sum(row.n_tokens for row in rows)

    @property
    def before_N(self) -> None:
        """Each token is predicted from a place of its own."""
        return None

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """The tokens [N] that log-probs are wanted of: all of [B, T], padding included."""
        return completion_ids_BT.reshape(-1)

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of those tokens [B, T]."""
        return values_N.view(len(self.input_ids), self.completion)

    def forward(self, model: torch.nn.Module) -> Tensor:
        """What the output head returns for each of those tokens [N, ...]."""
        length = self.input_ids.shape[1]
        before_T = torch.arange(length - self.completion - 1, length - 1, device=self.input_ids.device)
        found: Tensor = model(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            position_ids=self.position_ids,
            use_cache=False,
            logits_to_keep=before_T,
        ).logits
        return found.flatten(0, 1)


def rounded(n: int) -> int:
    """The next number that has 5 bits and then zeros.

    On a CPU each new size of a bfloat16 matrix product compiles a kernel that is never freed: so there are few sizes.
    On a GPU they cost 3 % more tokens on average, and memory is allocated in few sizes.
    """
    step = 1 << max(0, n.bit_length() - 5)
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows end to end, a prompt once before its completions, and a little filler, up to the next `rounded` number.

    input_ids, position_ids [1, L]. last_U: the tokens that stand before a completion's, each once: the gradients of all
    completions at a prompt's last token are then summed in one order. before_N: which of them stands before each
    completion token, row by row; then filler. place_C: where those tokens are among B * T, rows side by side of
    `completion` places.
    """

    input_ids: Tensor
    position_ids: Tensor
    last_U: Tensor
    before_N: Tensor
    place_C: Tensor
    completion: int
    rows: int
    segments: Segments

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, on_cpu: bool | None = None) -> Packed:
        """on_cpu: how attention is called; by default as on the device."""
        on_cpu = device.type == "cpu" if on_cpu is None else on_cpu
        sequence, segments = _TokenSequence(), []
        before: list[list[int]] = [[] for _ in rows]
        for prompt, numbers in by_prompt(rows):
            if not prompt:
                raise ValueError("a prompt has no tokens: nothing predicts the first one of a completion")
            last = sequence.add(prompt) + len(prompt) - 1
            made = []
            for block in blocks_of(len(prompt), [len(rows[k].completion_ids) for k in numbers]):
                found = [numbers[k] for k in block]
                for number in found:
                    first = sequence.add(ids := rows[number].completion_ids, len(prompt))
                    before[number] = [last, *range(first, first + len(ids) - 1)][: len(ids)]
                if lengths := [n for k in found if (n := len(rows[k].completion_ids))]:
                    made.append(Block.of(len(prompt), lengths, device, on_cpu))
            segments.append(Segment(len(prompt), tuple(made)))
        if filler := rounded(len(sequence.ids)) - len(sequence.ids):
            sequence.fill(filler)
            segments.append(Segment(filler))
        longest = max(len(r.completion_ids) for r in rows)
        places = [k * longest + t for k, r in enumerate(rows) for t in range(len(r.completion_ids))]
        flat = [k for row in before for k in row]
        once = {place: k for k, place in enumerate(dict.fromkeys(flat or [0]))}
        before_N = [once[place] for place in flat] + [0] * (rounded(len(flat)) - len(flat))
        return cls(
            input_ids=torch.tensor([sequence.ids], device=device),
            position_ids=torch.tensor([sequence.positions], device=device),
            last_U=torch.tensor(list(once), dtype=torch.long, device=device),
            before_N=torch.tensor(before_N, dtype=torch.long, device=device),
            place_C=torch.tensor(places, dtype=torch.long, device=device),
            completion=longest,
            rows=len(rows),
            segments=Segments(tuple(segments), on_cpu=on_cpu),
        )

    @staticmethod
    def deal(rows: Sequence[Row], processes: int) -> list[list[Row]]:
        """Rows for each process, balanced by tokens; groups are cut only where whole ones cannot be shared evenly."""
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
    def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of at most max_tokens tokens, a prompt counted once; more where a single row has more."""
        batches: list[list[Row]] = []
        size = 0
        for prompt, numbers in by_prompt(rows):
            due = len(prompt)  # tokens of the prompt that are not in this micro-batch yet
            for row in sorted((rows[k] for k in numbers), key=lambda r: -len(r.completion_ids)):
                if not batches or rounded(size + due + len(row.completion_ids)) > max_tokens:
                    batches.append([])
                    size, due = 0, len(prompt)
                batches[-1].append(row)
                size += due + len(row.completion_ids)
                due = 0
        return batches

    @staticmethod
    def size(rows: Sequence[Row]) -> int:
        """Tokens that the model computes, filler included."""
        return rounded(Packed.distinct(rows))

    @staticmethod
    def distinct(rows: Sequence[Row]) -> int:
        """Tokens of them that are no filler: prompts once."""
        return sum(len(prompt) for prompt, _ in by_prompt(rows)) + sum(len(r.completion_ids) for r in rows)

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """The tokens [N] that log-probs are wanted of: the completions', row by row, and filler."""
        ids_C = completion_ids_BT.reshape(-1).index_select(0, self.place_C)
        return torch.nn.functional.pad(ids_C, (0, len(self.before_N) - len(ids_C)))

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of those tokens [B, T]; 0 where there is none."""
        flat = values_N.new_zeros(self.rows * self.completion)
        return flat.index_copy(0, self.place_C, values_N[: len(self.place_C)]).view(self.rows, self.completion)

    def forward(self, model: torch.nn.Module) -> Tensor:
        """What the output head returns for each of those tokens, which it repeats `last_U` for (`head.scoring`)."""
        # a mask of four dimensions is used as it is: none is made of L x L
        found: Tensor = model(
            input_ids=self.input_ids,
            attention_mask=self.input_ids.new_zeros(1, 1, 1, 1),
            position_ids=self.position_ids,
            use_cache=False,
            logits_to_keep=self.last_U,
            segments=self.segments,
        ).logits
        return found[0]


Layout = Padded | Packed


class _TokenSequence:
    """A sequence that is written from left to right."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []

    def add(self, ids: Sequence[int], position: int = 0) -> int:
        """Where they begin. position: of the first of them in its row."""
        start = len(self.ids)
        self.ids += ids
        self.positions += range(position, position + len(ids))
        return start

    def fill(self, n: int) -> None:
        """n tokens that nobody attends to; all in the first place of a row, which every model has."""
        self.ids += [0] * n
        self.positions += [0] * n


def _least_loaded(parts: Sequence[list[Row]], processes: int) -> list[list[Row]]:
    """The largest part first, each to the process that has least."""
    shares: list[list[Row]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for part in sorted(parts, key=lambda part: -_cost(part)):
        poorest = loads.index(min(loads))
        shares[poorest] += part
        loads[poorest] += _cost(part)
    return shares


def _cost(rows: Sequence[Row]) -> int:
    """Tokens of rows with one prompt."""
    return len(rows[0].prompt_ids) + sum(len(r.completion_ids) for r in rows)


def by_prompt(rows: Sequence[Row]) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt with the numbers of its rows: those of one group."""
    numbers = sorted(range(len(rows)), key=lambda k: rows[k].group)
    for _, group in groupby(numbers, key=lambda k: (rows[k].group, tuple(rows[k].prompt_ids))):
        found = list(group)
        yield rows[found[0]].prompt_ids, found


def pad(values: Iterable[Tensor], left: bool = False) -> Tensor:
    """One row each; 0 where they are shorter than the longest."""
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_side="left" if left else "right")
