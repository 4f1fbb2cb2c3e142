"""Each epoch is a permutation, a function of the seed and a counter."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from grpocli.tasks.curriculum import Order, TaskScheduler


@given(n=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = Order(n, seed)
    assert sorted(order.index(epoch * n + i) for i in range(n)) == list(range(n))


@given(draws=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_draw_does_not_depend_on_earlier_draws(draws: list[int]) -> None:
    order = Order(7, seed=1)
    assert [order.index(d) for d in draws] == [Order(7, seed=1).index(d) for d in draws]


def test_the_order_is_pinned() -> None:
    order = Order(6, seed=0)
    assert [[order.index(e * 6 + i) for i in range(6)] for e in range(2)] == ORDER


@given(
    weights=st.lists(st.floats(0.05, 10), min_size=2, max_size=6), seed=st.integers(0, 2**40), at=st.integers(0, 9999)
)
def test_tasks_keep_their_shares_in_every_part_of_the_order(weights: list[float], seed: int, at: int) -> None:
    rotation = TaskScheduler(weights, seed)
    stretch = Counter(rotation.of(draw)[0] for draw in range(at, at + 200))
    for task, weight in enumerate(weights):
        assert abs(stretch[task] - 200 * weight / sum(weights)) < 6


def test_the_count_of_a_tasks_draws_does_not_depend_on_the_order_of_calls() -> None:
    rotation, counts = TaskScheduler([1, 2, 1], seed=5), Counter[int]()
    late = TaskScheduler([1, 2, 1], seed=5).of(5000)
    for draw in range(5001):
        found = rotation.of(draw)
        assert found[1] == counts[found[0]]
        counts[found[0]] += 1
    assert found == late
    assert [TaskScheduler([1, 2, 1], seed=s).of(0) for s in range(9)] != [rotation.of(0)] * 9


ORDER = [[3, 2, 1, 0, 4, 5], [4, 5, 1, 2, 0, 3]]
