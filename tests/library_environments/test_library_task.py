"""The split of tasks whose examples are a library's."""

from __future__ import annotations

import pytest

from grpocli.library_environments.openenv import OpenEnvTask


@pytest.mark.parametrize("total", [3, 150, 400, 10_000])
def test_held_out_examples_do_not_depend_on_the_size_of_the_training_data(total: int) -> None:
    for sizes in ((40, 1000), (1, 90)):
        tasks = [OpenEnvTask(base_url="http://127.0.0.1:1", train_size=n, eval_size=100) for n in sizes]
        splits = [
            [set(task.rows_of(split, min(total, task.wanted), "task.env", "x")) for split in ("train", "eval")]
            for task in tasks
        ]
        assert splits[0][1] == splits[1][1]
        for (train, held_out), n in zip(splits, sizes, strict=True):
            assert not train & held_out
            assert len(train) == min(n, total - len(held_out))
            assert 1 <= len(held_out) <= max(1, total // 5)
