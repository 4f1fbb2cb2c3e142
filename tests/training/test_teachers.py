"""Teachers as references: each scores its tasks' rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from training.test_packing import fresh
from training.updating import known, train_step, updater_for

from grpocli.algorithm.kl import EVERY_TASK
from grpocli.distributed.world import World
from grpocli.training.packing import MicroBatch, RowBatch
from grpocli.training.teachers import LoadedTeacher, Teachers
from grpocli.training.update import Updater
from grpocli.types import Row, Sampling

SAMPLING = Sampling(10)


def rows() -> list[Row]:
    """Three groups of two, of the tasks a, b and a."""
    made = []
    for group, task in enumerate("aba"):
        for k in range(2):
            ids = [3 + (7 * group + 5 * k + i) % 30 for i in range(3 + k)]
            made.append(Row([2, 5 + group], ids, [1] * len(ids), 0.0, group, [-1.0] * len(ids), task=task))
    return made


def other(seed: int, vocabulary: int = 40) -> Any:
    """A model of another shape, with a padded vocabulary."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    return fresh(hidden_size=48, vocab_size=vocabulary, **heads).eval()


@torch.no_grad()
def literal(model: Any, row: Row) -> torch.Tensor:
    """The log-probs of a row's completion, straight from the model's logits."""
    ids = torch.tensor([*row.prompt_ids, *row.completion_ids])
    logp = model(ids[None]).logits[0].log_softmax(-1)
    return torch.stack([logp[i - 1, ids[i]] for i in range(len(row.prompt_ids), len(ids))])


def updater(little_model: Any, world: World, teachers: dict[str, Any], **train: int) -> Updater:
    overrides = "algorithm=opd", "algorithm/correction=none"
    up = updater_for(little_model, world, *overrides, reference=Teachers([]), sampling=SAMPLING, **train)
    up.reference.loaded += [LoadedTeacher(copy.deepcopy(one), up.policy, (task,)) for task, one in teachers.items()]
    return up


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 12])
def test_each_teacher_scores_only_the_rows_of_its_tasks(little_model, world, micro_batch_tokens: int) -> None:
    teachers = {"a": other(1), "b": other(2, vocabulary=64)}
    up = updater(little_model, world, teachers, micro_batch_tokens=micro_batch_tokens)
    scored = rows()
    train_step(up, scored, n_groups=3)
    for row in scored:
        found = known(up, row, "ref_logp")
        torch.testing.assert_close(found, literal(teachers[row.task], row), rtol=1e-5, atol=1e-5)


def test_a_teacher_with_the_policys_weights_teaches_nothing(little_model, world) -> None:
    metrics = train_step(updater(little_model, world, {EVERY_TASK: little_model}), rows(), n_groups=3)
    assert metrics["grad_norm"] < 1e-5
    assert abs(metrics["kl"]) < 1e-6
    learns = train_step(updater(little_model, world, {EVERY_TASK: other(1)}), rows(), n_groups=3)
    assert learns["grad_norm"] > 0.1


def test_with_sharded_weights_every_process_calls_every_teacher(little_model, world, monkeypatch) -> None:
    """A forward of sharded weights needs all processes, also those that have no row of the teacher's task."""
    up = updater(little_model, world, {"a": little_model, "b": little_model, "c": little_model})
    assert isinstance(up.reference, Teachers)
    calls: list[tuple[str, int]] = []

    class Counted(LoadedTeacher):
        def logp(self, batch: MicroBatch, sampling: Sampling) -> torch.Tensor:
            calls.append((self.tasks[0], int(batch.mask.any(1).sum())))
            return super().logp(batch, sampling)

    for teacher in up.reference.loaded:
        teacher.__class__ = Counted
    scored = RowBatch(rows())
    batch = MicroBatch.build(scored.rows, world.device)
    up.reference.score(scored, batch, SAMPLING)
    assert calls == [("a", 4), ("b", 2)]
    calls.clear()
    monkeypatch.setattr(type(world.parallel), "replicated", False)
    up.reference.score(scored, batch, SAMPLING)
    assert calls == [("a", 4), ("b", 2), ("c", 0)]
