"""`grpocli reward-check`: agreement, disagreements and their output."""

from __future__ import annotations

from pathlib import Path

import pytest

LINES = '{"prompt": "1+1", "answer": "2"}\n{"prompt": "x", "answer": "%s"}\n{"prompt": "2+1", "answer": "3"}\n'
ONE = '{"prompt": "?", "answer": "1"}\n'


def task(folder: Path, train: str, evaluate: str = ONE) -> list[str]:
    """The task of two files in a folder."""
    for name, text in {"d": train, "e": evaluate}.items():
        (folder / f"{name}.jsonl").write_text(text)
    return ["task=jsonl", f"task.path={folder}/d.jsonl", f"task.eval_path={folder}/e.jsonl"]


@pytest.mark.slow
def test_agreeing_rewards_are_reported(grpocli) -> None:
    code, out, err = grpocli("reward-check", "task=[arithmetic,letter_counting]", "reward=[exact_match,number,format]",
                             "task.arithmetic.rewards=[exact_match]", "task.letter_counting.rewards=[number,format]",
                             "--examples", "40", "--split", "eval", "--answer", "{answer}")  # fmt: skip
    assert (code, err.splitlines()[0]) == (0, "exact_match scores arithmetic eval ...")
    rows = [line.split() for line in out.splitlines() if "40/40" in line]
    assert [row[:3] for row in rows][:2] == [
        ["arithmetic", "eval", "exact_match"],
        ["letter_counting", "eval", "number"],
    ]
    assert all(row[3:8] == ["40/40", "40/40", "40/40", "0", "100.00%"] for row in rows[:2])


@pytest.mark.parametrize(
    ("answer", "options", "code", "said"),
    [
        ("two", [], 1, "number: fails on 3 answers, first of row 2 of FILE: there is no number in the answer 'two'"),
        ("two", ["--threshold", "0.6"], 0, "66.67%"),
        ("7", [], 0, "100.00%"),
    ],
)
def test_disagreements_are_shown(grpocli, tmp_path: Path, answer: str, options, code: int, said: str) -> None:
    words = [*task(tmp_path, LINES % answer), "reward=[number]", "--split", "train", *options]
    found, out, _ = grpocli("reward-check", *words)
    assert said.replace("FILE", f"{tmp_path}/d.jsonl") in out
    assert "own: the reference answer, which has to be right" in out
    assert found == code


@pytest.mark.parametrize(
    ("first", "options", "code"),
    [
        ("number,FILE:short", [], 0),
        ("FILE:short,number", [], 0),
        ("number,FILE:short", ["eval.reward=short"], 1),
        ("FILE:short", [], 0),
        ("FILE:short", ["eval.reward=short"], 1),
    ],
)
def test_only_the_reward_that_measures_accuracy_is_judged(grpocli, tmp_path: Path, first: str, options, code) -> None:
    (tmp_path / "mine.py").write_text("def short(completions): return [0.5 - len(str(c)) / 8 for c in completions]\n")
    rewards = f"reward=[{first.replace('FILE', f'{tmp_path}/mine.py')}]"
    found, out, _ = grpocli("reward-check", *task(tmp_path, LINES % "7"), rewards, *options, "--split", "train")
    row = next(line.split()[3:] for line in out.splitlines() if line.split()[:3] == ["jsonl", "train", "short"])
    assert (found, len(row), "train short:" in out) == (code, 6 if code else 5, code == 1)


def test_every_accepted_answer_is_checked(grpocli, tmp_path: Path) -> None:
    answers = '["1", "one 1"]', '["one 1", "2"]', '["3.0", "III 3"]'
    rows = [f'{{"prompt": "{answer[2]}?", "answer": {answer}}}' for answer in answers]
    words = task(tmp_path, "\n".join(rows), '{"prompt": "????", "answer": 4.0}\n')
    code, out, _ = grpocli("reward-check", *words, "reward=[exact_match]")
    rows = [line.split()[3:6] for line in out.splitlines() if "100.00%" in line]
    assert (code, rows) == (0, [["3/3", "3/3", "3/3"], ["1/1", "1/1", "0/0"]])


def test_answers_are_also_scored_in_other_forms(grpocli, tmp_path: Path) -> None:
    words = [*task(tmp_path, ONE, LINES % "0.5"), "--split", "eval", "reward=[number,exact_match]"]
    _, out, _ = grpocli("reward-check", *words, code=0)
    rows = {tuple(line.split()[2:]) for line in out.splitlines() if "jsonl" in line}
    assert ("number", *["3/3"] * 6) in rows
    assert ("exact_match", *["3/3"] * 3) in rows


def test_both_splits_are_checked_by_default(grpocli, tmp_path: Path) -> None:
    _, out, _ = grpocli("reward-check", *task(tmp_path, LINES % "two", LINES % "4"), "reward=[number]", code=1)
    assert f"jsonl train number: fails on 3 answers, first of row 2 of {tmp_path}/d.jsonl: there is no number" in out
    assert out.count("there is no number") == 1, "one line for all equal failures"
    assert [line.split()[:3] for line in out.splitlines() if "3/3" in line] == [["jsonl", "eval", "number"]] * 2
