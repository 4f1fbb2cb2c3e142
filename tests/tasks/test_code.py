"""task=code: the columns of MBPP, HumanEval and grpocli."""

from __future__ import annotations

import json

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli_tools.reward_check.reward_check_command import main

MBPP = [
    {
        "task_id": i,
        "text": f"Add {i}.",
        "code": f"def add(x):\n    return x + {i}",
        "test_list": [f"assert add(1) == {i + 1}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for i in range(1, 7)
]
HUMAN_EVAL = [
    {
        "task_id": f"x/{i}",
        "prompt": f'def add(x: int) -> int:\n    """Add {i}."""\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
    }
    for i in range(1, 7)
]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_of_mbpp_are_converted(tmp_path):
    path = written(tmp_path / "mbpp.jsonl", MBPP)
    task = build_run(compose(["task=mbpp", f"task.path={path}", "task.eval_split=null"])).task
    example = next(one for one in task.examples("train") if one["task_id"] == 3)
    assert example["tests"] == ["assert add(1) == 4"]
    assert example["answer"] == MBPP[2]["code"]
    (message,) = example["prompt"]
    assert "Add 3." in message["content"]
    assert message["content"].endswith("\nassert add(1) == 4")


def test_columns_of_humaneval_are_converted(tmp_path):
    path = written(tmp_path / "he.jsonl", HUMAN_EVAL)
    task = build_run(compose(["task=humaneval", f"task.path={path}"])).task
    assert len(task.examples("eval")) == len(HUMAN_EVAL)
    with pytest.raises(ConfigError, match=r"task.split=null: the task is for `grpocli eval`"):
        task.examples("train")
    example = task.examples("eval")[0]
    assert example["before"] in example["prompt"][0]["content"]
    assert (example["tests"], example["entry_point"]) == (HUMAN_EVAL[0]["test"], "add")


@pytest.mark.processes
@pytest.mark.parametrize(("task", "rows"), [("mbpp", MBPP), ("humaneval", HUMAN_EVAL)])
def test_reference_answers_pass(tmp_path, capsys, task, rows):
    path = written(tmp_path / "rows.jsonl", rows)
    given = [f"task={task}", f"task.path={path}", "task.split=null", "task.eval_split=test", "reward=[code]"]
    assert main(given) == 0
    assert "100.00%" in capsys.readouterr().out
    wrong = {"test_list": ["assert add(1) == 0"], "test": "def check(f):\n    assert f(1) == 0"}
    written(path, [{**row, **{name: text for name, text in wrong.items() if name in row}} for row in rows])
    assert main(given) == 1
    assert "scores 0 (AssertionError)" in capsys.readouterr().out
