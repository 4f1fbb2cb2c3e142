"""Random optimizer windows for property tests, and functions that split and pad them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from algorithm.literal import NAN
from hypothesis import strategies as st

from grpocli.algorithm import Algorithm
from grpocli.algorithm.advantage import MaxRL
from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.metrics import combined
from grpocli.composition.compose import register_parts
from grpocli.config.parts import choices_of

WEIGHTS = {"a": 1.0, "b": 0.5}
ALGORITHMS = ("grpo", "dapo", "drgrpo", "dgpo")
OF_CHOICES = ("gspo", "luspo", "cispo", "sapo", "gmpo", "rloo", "reinforce_pp", "maxrl", "dppo")
"""Named algorithms, of which every choice is tested by itself, too."""


@functools.cache
def choices(*kinds: str) -> dict[str, tuple[str, ...]]:
    """The overrides of every registered choice of these kinds of parts, by `kind=choice`."""
    register_parts()
    names = [(kind, name) for kind in kinds or PARTS for name in choices_of(f"algorithm/{kind}")]
    return {f"{kind}={name}": (f"algorithm/{kind}={name}",) for kind, name in names}


def suited(algorithm: Algorithm, rewards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rewards that the advantage part accepts: MaxRL refuses negative scores."""
    return {name: x.abs() for name, x in rewards.items()} if isinstance(algorithm.advantage, MaxRL) else rewards


def advantages_in(algorithm: Algorithm, window: Window, rewards: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """The advantages [B] of a window, of its own or of other rewards."""
    rewards = suited(algorithm, window.rewards if rewards is None else rewards)
    shape = next(iter(rewards.values())).shape
    return algorithm.advantages(rewards, WEIGHTS, lengths=window.mask.sum(1).reshape(shape)).reshape(-1)


@dataclass(frozen=True)
class Window:
    """All rows of an update: rewards {name: [P, G]}, token values [B, T], mask [B, T], group_ids [B]."""

    rewards: dict[str, torch.Tensor]
    logp: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    sampler: torch.Tensor
    mask: torch.Tensor
    group_ids: torch.Tensor


@dataclass(frozen=True)
class Result:
    """The loss of a window, its gradient with respect to log-probs and entropies, metrics, and each piece's loss."""

    loss: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, torch.Tensor]
    pieces: torch.Tensor


def row_of_rewards(g: int) -> st.SearchStrategy[list[float]]:
    """One group's values of one reward: any, all equal, only one, or none."""
    value = st.sampled_from([0.0, 0.1, 0.5, 1.0, -0.7])
    alone = st.tuples(st.integers(0, g - 1), value).map(lambda at: [at[1] if k == at[0] else NAN for k in range(g)])
    return st.one_of(
        st.lists(value | st.just(NAN), min_size=g, max_size=g), value.map(lambda x: [x] * g), alone, st.just([NAN] * g)
    )


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Groups of ragged completions with gaps, some rows without a token, values outside of the mask NaN."""
    p, g = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    rewards = {name: torch.tensor([draw(row_of_rewards(g)) for _ in range(p)], dtype=torch.float64) for name in WEIGHTS}
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=p * g, max_size=p * g)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    t = max(1, int(lengths.max()))
    mask = torch.arange(t) < lengths[:, None]
    if draw(st.booleans()):
        mask &= torch.rand(p * g, t, generator=generator) < 0.7
    logp = -torch.rand(p * g, t, generator=generator, dtype=torch.float64) * 3

    def near(scale: float) -> torch.Tensor:
        noise = scale * torch.randn(p * g, t, generator=generator, dtype=torch.float64)
        return (logp + noise).clamp(max=-1e-3).masked_fill(~mask, NAN)  # probabilities stay below 1

    return Window(
        rewards=rewards,
        logp=near(0.0),
        entropy=near(1.0).abs(),
        old=near(0.4),
        ref=near(0.4),
        sampler=near(0.3),
        mask=mask.long(),
        group_ids=torch.arange(p).repeat_interleave(g) * 3 - 1,  # any integers
    )


def run(
    algorithm: Algorithm,
    window: Window,
    advantages: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    dtype: torch.dtype,
    padding: torch.Generator | None = None,
) -> Result:
    """The sum of the losses of `pieces` (row indices), each padded by itself if there is a generator.

    One piece of all rows is given as a user of the library gives it: without totals or selected tokens.
    """
    everything = len(pieces) == 1
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (window.logp, window.entropy)]
    advantages = advantages.to(dtype)
    totals = algorithm.totals(advantages, window.mask, window.group_ids, micro_batches=len(pieces))
    selected = algorithm.tokens(leaves[1].detach(), window.mask) if algorithm.tokens.needs_entropy else None
    parts, metrics = [], dict[str, torch.Tensor]()
    for rows in pieces:
        place = placement(window.mask[rows], padding)

        def cut(
            x: torch.Tensor | None, outside: float, rows: torch.Tensor = rows, place: torch.Tensor = place
        ) -> torch.Tensor | None:
            return None if x is None else spread(x[rows].to(dtype), place, outside)

        part, more = algorithm.loss(
            cut(leaves[0], NAN),
            cut(window.old, NAN),
            advantages[rows],
            cut(window.mask, 0).long(),
            group_ids=window.group_ids[rows],
            ref_logp=cut(window.ref, NAN),
            rollout_logp=cut(window.sampler, NAN),
            entropy=cut(leaves[1], NAN),
            selected=None if everything else cut(selected, 1.0),
            totals=None if everything else totals,
        )
        parts.append(part)
        metrics = {k: combined(k, metrics[k], v) if metrics else v for k, v in more.items()}
    losses = torch.stack(parts)
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    return Result(losses.sum().detach(), torch.cat(gradients), metrics, losses.detach())


def placement(mask_BT: torch.Tensor, padding: torch.Generator | None) -> torch.Tensor:
    """The column in a piece of each column of the window; -1 if no row of the piece has a token there."""
    t = mask_BT.shape[1]
    if padding is None:
        return torch.arange(t)
    used = mask_BT.any(0)
    n = int(used.sum())
    more = int(torch.randint(0, 4, (), generator=padding))
    columns = torch.randperm(max(n + more, 1), generator=padding)[:n].sort().values
    place = torch.full((t,), -1)
    place[used] = columns
    return torch.cat([place, place.new_tensor([max(n + more, 1)])])  # the last value is the width


def spread(x_BT: torch.Tensor, place: torch.Tensor, outside: float) -> torch.Tensor:
    """The columns of x moved to their places, with `outside` between them."""
    t = x_BT.shape[1]
    if len(place) == t:
        return x_BT
    made = x_BT.new_full((len(x_BT), int(place[-1])), outside)
    used = place[:t] >= 0
    return made.index_copy(1, place[:t][used], x_BT[:, used])


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """A seed, a number of processes and a number of rows in a micro-batch."""
    return draw(st.integers(0, 9999)), draw(st.integers(1, 3)), draw(st.integers(1, 5))


def deal(n: int, split: tuple[int, int, int]) -> list[torch.Tensor]:
    """n rows in random order, dealt to processes with uneven shares (one may be empty), in micro-batches."""
    seed, processes, size = split
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    edges = torch.randint(0, n + 1, (processes - 1,), generator=generator).sort().values.tolist()
    shares = order.tensor_split(edges) if edges else [order]
    return [piece for share in shares for piece in share.split(size)]
