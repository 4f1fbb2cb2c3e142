"""The order of examples as a law: a permutation an epoch, from a seed and a counter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpocli.tasks.order import Order


@given(n=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = Order(n, seed)
    assert sorted(order.index(epoch * n + i) for i in range(n)) == list(range(n))


@given(draws=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_draw_does_not_depend_on_what_was_drawn_before(draws: list[int]) -> None:
    order = Order(7, seed=1)
    assert [order.index(d) for d in draws] == [Order(7, seed=1).index(d) for d in draws]


def test_the_order_is_this_one_on_every_machine() -> None:
    order = Order(6, seed=0)
    assert [[order.index(e * 6 + i) for i in range(6)] for e in range(2)] == ORDER


def test_no_two_draws_share_a_uid() -> None:
    order = Order(5, seed=2)
    uids = [order.uid(d) for d in range(20)]
    assert len(set(uids)) == 20
    assert uids[7] == f"1-{order.index(7)}"


ORDER = [[3, 2, 1, 0, 4, 5], [4, 5, 1, 2, 0, 3]]
