"""Dealing rows to processes, packing them, and building micro-batches."""

from __future__ import annotations

import pytest
import torch
from composed import built
from hypothesis import given
from hypothesis import strategies as st

from grpocli.training.packing import FlexPacked, Layout, MicroBatch, Packed, Padded, RowBatch, group_spans, rows_of
from grpocli.types import Completion, Group, Prompt, Rollout, Row

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=30)


def row(prompt: int, completion: int, group: int = 0) -> Row:
    ids = list(range(completion))
    return Row(list(range(prompt)), ids, [1] * completion, 0.5, group, [-1.0] * completion)


@given(n_groups=st.integers(0, 20), minibatches=st.integers(1, 8))
def test_windows_cover_every_group_once(n_groups: int, minibatches: int) -> None:
    spans = group_spans(n_groups, minibatches)
    assert [g for span in spans for g in span] == list(range(n_groups))
    assert len(spans) == min(n_groups, minibatches)
    assert all(len(span) for span in spans)


def in_groups(lengths: list[tuple[int, int]]) -> list[Row]:
    """Rows in groups of three, each with one prompt."""
    return [row(lengths[k - k % 3][0], completion, k // 3) for k, (_, completion) in enumerate(lengths)]


@pytest.mark.parametrize("layout", [Padded, Packed])
@given(lengths=LENGTHS, processes=st.integers(1, 4))
def test_deal_gives_every_row_to_one_process(
    layout: type[Layout], lengths: list[tuple[int, int]], processes: int
) -> None:
    rows = in_groups(lengths)
    shares = layout.deal(rows, processes)
    assert sorted(id(r) for share in shares for r in share) == sorted(id(r) for r in rows)
    loads = [layout.size(share) if share else 0 for share in shares]
    if layout is Packed:  # the pieces of a group repeat its prompt
        assert max(loads) - min(loads) <= sum(loads) / processes + 90
    else:
        loads = [sum(r.n_tokens for r in share) for share in shares]
        assert max(loads) - min(loads) <= max([r.n_tokens for r in rows], default=0)


@pytest.mark.parametrize("layout", [Padded, Packed, FlexPacked])
@given(lengths=LENGTHS, limit=st.integers(1, 300))
def test_pack_respects_the_limit(layout: type[Layout], lengths: list[tuple[int, int]], limit: int) -> None:
    """A longer row is alone. Two tiles have room for more rows than a small limit says."""
    rows = in_groups(lengths)
    batches = layout.pack(rows, limit)
    assert sorted(id(r) for batch in batches for r in batch) == sorted(id(r) for r in rows)
    most = limit if layout is Padded else max(limit, layout.fitting(1))
    for batch in batches:
        tokens = MicroBatch.build(batch, torch.device("cpu"), layout).layout.input_ids.numel()
        assert tokens == layout.size(batch)
        assert tokens <= most or len(batch) == 1
        least = {Padded: 0.9, Packed: 16 / 17, FlexPacked: 0}[layout]
        assert tokens * least <= layout.distinct(batch) <= tokens
    if layout is not Padded:
        assert not batches or sum(map(layout.distinct, batches)) > (len(batches) - 1) * most / 4


def test_packed_rows_have_their_prompt_once() -> None:
    rows = [row(3, 2, 4), row(1, 2, 5), row(3, 1, 4)]
    layout = MicroBatch.build(rows, torch.device("cpu"), Packed).layout
    assert layout.input_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0, 1]]  # nine tokens: too few to need filler
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert isinstance(layout, Packed)
    assert layout.keep_U[layout.predictor_N].tolist() == [2, 3, 6, 7, 2]  # positions within rows, not in the sequence
    assert layout.keep_U.tolist() == [2, 3, 6, 7]
    assert layout.index_C.tolist() == [0, 1, 2, 3, 4]
    assert layout.spread(torch.arange(5.0)[None]).tolist() == [[[0, 1], [2, 3], [4, 0]]]


def test_prompts_are_padded_left_and_completions_right() -> None:
    batch = MicroBatch.build([row(3, 1, 4), row(1, 2, 5)], torch.device("cpu"))
    assert batch.layout.input_ids.tolist() == [[0, 1, 2, 0, 0], [0, 0, 0, 0, 1]]
    assert batch.layout.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.layout.position_ids.tolist() == [[0, 1, 2, 3, 3], [0, 0, 0, 1, 2]]
    assert batch.mask.tolist() == [[1, 0], [1, 1]]
    assert batch.group_ids.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("ended", "mask", "mask_truncated", "expected"),
    [("length", None, True, [0, 0, 0]), ("length", None, False, [1, 1, 1]), ("stop", [1, 0, 1], True, [1, 0, 1])],
)
def test_truncated_completions_and_tokens_of_the_environment_can_be_masked(
    ended: str, mask: list[int] | None, mask_truncated: bool, expected: list[int]
) -> None:
    done = Completion([5, 6, 7], [-1.0, 0.0, -2.0], ended, version=1, mask=mask)
    assert Row.of(Rollout(Prompt("u", [1], "p"), done, "t"), 1.0, 0, mask_truncated).mask == expected


def test_rows_with_and_without_old_log_probs_share_a_micro_batch() -> None:
    done = Completion([5, 6], [-1.0, -2.0], "stop", version=3)
    rollout = Rollout(Prompt("u", [1], "p"), done, "t")
    stale = Row.of(rollout, 1.0, 0, old_is_sampler=True)
    assert "old_logp" not in RowBatch.of([row(1, 3)], torch.device("cpu")).known
    both = RowBatch.of([stale, row(1, 3)], torch.device("cpu")).known["old_logp"]
    assert both[0].tolist() == [-1.0, -2.0, 0.0]
    assert both[1].isnan().all()


@pytest.mark.parametrize(
    ("correction", "version", "is_samplers"),
    [("none", 5, True), ("token_truncate", 5, False), ("none", 4, False), ("sampler", 4, True)],
)
def test_the_old_policy_of_a_row_follows_its_staleness_and_the_correction(
    correction: str, version: int, is_samplers: bool
) -> None:
    """A stale row's is the sampler unless a correction relates both; with `sampler` every row's is."""
    rollout = Rollout(Prompt("0", [1], "p"), Completion([3, 4], [-1.0, -0.5], "stop", version=4), "t", {})
    algorithm = built("algorithm=grpo", f"algorithm/correction={correction}")
    (row,) = rows_of([Group(rollout.prompt, [rollout])], torch.ones(1, 1), algorithm, version)
    assert row.old_logp == ([-1.0, -0.5] if is_samplers else None)
