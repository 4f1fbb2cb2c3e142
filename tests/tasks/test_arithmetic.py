"""task=arithmetic: the same problems on every machine, and disjoint splits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.generated import OPERATIONS, Arithmetic


def questions(task: Arithmetic, split: str) -> list[str]:
    return [example["prompt"][0]["content"] for example in task.examples(split)]


@pytest.mark.parametrize("digits", [1, 2, 3, 9])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_answers_are_right(digits: int, operation: str) -> None:
    for example in Arithmetic(digits=digits, operation=operation, train_size=50).examples("train"):
        assert example["prompt"][0]["role"] == "user"
        first, second = example["prompt"][0]["content"].removesuffix("=").split(operation)
        assert len(first) == len(second) == digits
        assert int(example["answer"]) == OPERATIONS[operation](int(first), int(second))


@pytest.mark.parametrize("digits", [1, 2])
def test_the_splits_are_disjoint_and_cover_every_pair(digits: int) -> None:
    task = Arithmetic(digits=digits)
    train, held_out = questions(task, "train"), questions(task, "eval")
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == {1: 100, 2: 8100}[digits]
    assert 0.05 < len(held_out) / len(train) < 0.2


def test_a_pair_keeps_its_split_when_the_sizes_change() -> None:
    small = Arithmetic(digits=3, train_size=2000, eval_size=20)
    large = Arithmetic(digits=3, train_size=20, eval_size=2000)
    assert not set(questions(small, "train")) & set(questions(large, "eval"))
    assert questions(small, "eval") == questions(large, "eval")[:20]


def test_the_first_problems_cover_the_range() -> None:
    first = [int(q.split("+")[0]) for q in questions(Arithmetic(), "eval")[:128]]
    assert min(first) < 15
    assert max(first) > 94
    assert 45 < sum(first) / len(first) < 64


@pytest.mark.processes
def test_another_process_makes_the_same_problems() -> None:
    code = (
        "import json; from grpocli.tasks.generated import Arithmetic; "
        "print(json.dumps(list(Arithmetic().examples('eval'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == list(Arithmetic().examples("eval"))


def test_the_default_problems_are_pinned() -> None:
    """If this changes, old and new runs cannot be compared, which belongs in the changelog."""
    lines = "\n".join(questions(Arithmetic(), "train") + questions(Arithmetic(), "eval"))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == "c015e790270b7906"


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [("digits", 0, "task.digits=0"), ("operation", "/", "task.operation=/"), ("eval_size", 0, "task.eval_size=0")],
)
def test_bad_values_name_their_key(field: str, value: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Arithmetic(**{field: value})
