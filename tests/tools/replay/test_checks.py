"""Counts of a check: values that agree, differ, or cannot be checked."""

from __future__ import annotations

from grpocli_tools.replay.checks import Check, Difference, total


def test_every_excused_difference_counts_as_not_checked() -> None:
    check = Check("clipped", "tokens")
    for recorded in (0, 1, 0, 1):
        check.compare(Difference(3, "clipped", recorded, 0), same=recorded == 0)
    check.excuse("rounding")
    assert (check.agree, check.differ, check.unchecked, check.why) == (2, 0, 2, {"rounding": 2})
    assert total([check, check])[0].why == {"rounding": 4}
