"""Teachers as references: each scores its tasks' rows, from weights here or at a server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from composed import built
from rollout.stand_in import StandIn
from training.updating import known, train_step, updater_for

from grpocli.algorithm.kl import EVERY_TASK
from grpocli.distributed.world import World
from grpocli.errors import ConfigError, RunError, ServiceGone
from grpocli.models.tiny import make_tokenizer
from grpocli.training.packing import MicroBatch, RowBatch
from grpocli.training.teachers import LoadedTeacher, ServedTeacher, Teachers, check_served
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


def other(little_model: Any, seed: int, vocabulary: int = 40) -> Any:
    """A model of another shape, with a padded vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = little_model.config.to_dict() | {"hidden_size": 48, "num_attention_heads": 3, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**config | {"head_dim": 16})).eval()


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
    teachers = {"a": other(little_model, 1), "b": other(little_model, 2, vocabulary=64)}
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
    learns = train_step(updater(little_model, world, {EVERY_TASK: other(little_model, 1)}), rows(), n_groups=3)
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


class Server(StandIn):
    """A stand-in for a vLLM server: the log-prob of a token is minus its number divided by 100.

    loses_after: the number of scored completions after which it drops connections.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scored, self.busy, self.refuses, self.hangs, self.detokenizes_wrong = 0, 0, False, False, False
        self.loses_after: int | None = None
        self.tokenizer: Any = make_tokenizer()
        self.card: dict[str, Any] = {"id": "teacher", "max_model_len": 512}
        self.answer = self.reply

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "adapter", "parent": "teacher"}, self.card]}
        assert body["model"] == "teacher"
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(body["tokens"][: -2 if self.detokenizes_wrong else None])}
        with self.lock:
            self.busy -= 1
            busy = self.busy >= 0
            self.scored += not busy
        if self.loses_after is not None and self.scored > self.loses_after:
            raise ConnectionAbortedError  # without an answer
        if self.hangs and self.scored > 2:
            self.closed.wait(60)
        if busy or self.refuses:
            return (503, {"error": "later"}) if busy else (400, {"error": "too long"})
        entries = [None, *({str(i): {"logprob": -i / 100}} for i in body["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": entries}]}

    @property
    def keys(self) -> set[str | None]:
        """The keys of requests for scores."""
        return {key for path, key in self.heard if path == "/v1/completions"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("grpocli.training.teachers.FIRST_DELAY", 0.01)
    made = Server()
    yield made
    made.close()


def teachers_at(url: str, timeout: float = 30.0, tasks: tuple[str, ...] = (EVERY_TASK,)) -> Teachers:
    return Teachers([], [ServedTeacher(url, tasks, "algorithm.kl.base_url", "secret-key", timeout)])


def test_a_server_scores_the_rows_of_its_tasks(little_model, world, server: Server) -> None:
    up = updater(little_model, world, {"b": little_model}, micro_batch_tokens=12)
    assert isinstance(up.reference, Teachers)
    up.reference.served += teachers_at(server.url, tasks=("a",)).served
    server.busy = 2
    scored = rows()
    train_step(up, scored, n_groups=3)
    for row in scored:
        served = torch.tensor([-i / 100 for i in row.completion_ids])
        expected = served if row.task == "a" else literal(little_model, row)
        torch.testing.assert_close(known(up, row, "ref_logp"), expected, rtol=1e-5, atol=1e-5)
    assert server.scored == 4
    assert server.keys == {"Bearer secret-key"}


def finish(teachers: Teachers, world: World) -> None:
    scored = [RowBatch(rows())]
    teachers.begin(scored)
    teachers.finish(scored, world)


def test_a_server_that_is_late_or_gone_stops_the_run_and_one_that_refuses_fails_it(world, server: Server) -> None:
    server.hangs = True
    with pytest.raises(ServiceGone, match=r"scored \d of 6 completions within algorithm.kl.timeout=0.5 s"):
        finish(teachers_at(server.url, timeout=0.5), world)
    server.hangs, server.refuses = False, True
    with pytest.raises(RunError, match=r"refused to score a completion .*HTTP 400.*too long") as refused:
        finish(teachers_at(server.url), world)
    assert not isinstance(refused.value, ServiceGone)
    server.close()
    with pytest.raises(ServiceGone, match=f"algorithm.kl.base_url={server.url}: .* cannot be reached"):
        finish(teachers_at(server.url), world)


def test_a_server_is_checked_before_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret-key")
    kl = built("algorithm=opd", f"algorithm.kl.base_url={server.url}/v1/", "algorithm.kl.api_key=TEACHER_KEY").kl
    ours = make_tokenizer()
    check_served(kl, ours, longest=100)
    assert server.keys == {"Bearer secret-key"}

    for name, value in (("card", server.card | {"max_model_len": 100}), ("detokenizes_wrong", True), ("refuses", True)):
        with monkeypatch.context() as changed:
            changed.setattr(server, name, value)
            with pytest.raises(ConfigError) as refused:
                check_served(kl, ours, longest=100)
            assert refused.value.key == "algorithm.kl.base_url", name
