"""Rows become examples: layouts of other trainers, templates, processors, worked examples, programs with tests.

Unusable rows are refused by their number.
"""

from __future__ import annotations

import csv
import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from cli.running import run_here
from jsonl import write

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.prompts import text_of
from grpocli.tasks.table import CodeProblems, Gsm8k, Jsonl, hold_out
from grpocli_tools.reward_check.reward_check_command import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
USER = {"role": "user", "content": "1+1="}
CHAT = [{"role": "system", "content": "Add."}, USER]
VERL = {
    "data_source": "add",
    "prompt": CHAT,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
GYM = {"responses_create_params": {"input": CHAT}, "verifier": {"expected": "2"}}
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NUMPY = str(CHAT).replace("}, {", "}\n {")
SAID = [("system", "Add."), ("human", "1+1="), ("gpt", "2")]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}]
BRIEF = {"role": "system", "content": "Be brief."}
CODE = """
def process(row):
    if row["id"] == 7:
        raise KeyError("question")
    if row["id"] == 8:
        return {"answer": 1}
    if row["id"] == 9:
        raise SystemExit("enough")
    return {"prompt": [{"role": "user", "content": f"{row['id']}"}], "answer": row["id"], "loss_multiplier": 0.5}
"""


def turns(*names: str) -> list[dict[str, str]]:
    return [dict(zip(names, one, strict=True)) for one in SAID]


def every(task: Any) -> list[dict[str, Any]]:
    return [one for split in ("train", "eval") for one in task.examples(split)]


def read(task: Any) -> None:
    """Make the prompts of all examples."""
    for one in every(task):
        text_of(one, f"row 2 of {task.path}")


@pytest.mark.parametrize(
    ("prompt", "options", "wanted"),
    [
        ("hi", {}, "hi"),
        (CHAT, {}, CHAT),
        ("1+1=", {"format": "chat"}, [USER]),
        (CHAT, {"format": "plain"}, "Add.\n1+1="),
        ("1+1=", {"system_prompt": "Be brief."}, [BRIEF, USER]),
        (CHAT, {"system_prompt": "Be brief."}, [BRIEF, USER]),
        ("hi", {"prefix": "1+1=2\n"}, "1+1=2\nhi"),
        ("hi", {"prompt_template": "{{{prompt}}}: {n:02d}"}, "{hi}: 07"),
        ("hi", {"prompt_template": "Q: {prompt}\nA:", "prefix": "Example\n"}, "Example\nQ: hi\nA:"),
        ([{**USER, "tool_calls": None}], {}, [USER]),
        # contents in parts, one message, messages within an object
        ([{"role": "user", "content": PARTS}], {}, [USER]),
        ([{"role": "user", "content": PARTS}], {"format": "plain"}, "1+1="),
        (USER, {}, [USER]),
        ({"messages": [USER]}, {}, [USER]),
        ({"from": "human", "value": "1+1="}, {}, [USER]),
        # ShareGPT
        (turns("from", "value"), {}, ANSWERED),
        (json.dumps(turns("role", "value")), {}, ANSWERED),
        # conversations as text
        (json.dumps(CHAT, indent=1), {}, CHAT),
        (f" {CHAT}\n", {}, CHAT),
        (NUMPY, {}, CHAT),
        (f"array({CHAT}, dtype=object)", {}, CHAT),
        (json.dumps({"messages": CHAT}), {}, CHAT),
        (f"{{'prompt': array({NUMPY},\n      dtype=object)}}", {}, CHAT),
        (repr(USER), {}, [USER]),
        # other texts stay texts
        *((text, {}, text) for text in ('[{"name": "x", "content": "y"}]', "[1, 2", '{"role": "user"}', "A [INST]?")),
    ],
)
def test_a_row_becomes_a_prompt(prompt: Any, options: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "2", "n": 7}] * 2
    example = Jsonl(path=write(tmp_path / "rows.jsonl", rows), **options).examples("train")[0]
    assert (example["prompt"], example["answer"], example["n"]) == (wanted, "2", 7)
    assert text_of(example, "row 1") == wanted
    if isinstance(prompt, str):
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["prompt", "answer", "n"], *[[prompt, "2", "7"]] * 2])
        if "{n" not in str(options):
            assert Jsonl(path=str(tmp_path / "rows.csv"), **options).examples("train")[0]["prompt"] == wanted


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (VERL, "prompt", "reward_model.ground_truth"),
        (GYM, "responses_create_params.input", "verifier.expected"),
        ({"prompt": CHAT, "a.b": "2"}, "prompt", "a.b"),
    ],
)
def test_columns_within_objects(tmp_path: Path, row: Any, prompt: str, answer: str) -> None:
    other = json.loads(json.dumps(row).replace("1+1=", "2+0="))
    options = {"prompt_column": prompt, "answer_column": answer, "eval_size": 1}
    task = Jsonl(path=write(tmp_path / "rows.jsonl", [row, other]), **options)
    (example,) = [one for one in every(task) if one["prompt"] == CHAT]
    assert (example["answer"], example[answer]) == ("2", "2")


def test_values_within_objects_fill_templates_and_are_columns_of_rewards(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [VERL] * 4)
    task = Jsonl(path=path, prompt_template="{extra_info.index}: {data_source}", answer_column=None)
    example = task.examples("train")[0]
    assert (example["prompt"], example["reward_model.ground_truth"]) == ("7: add", "2")
    assert "answer" not in example


TEMPLATE = {"prompt_template": "Q: {prompt}"}


@pytest.mark.parametrize(
    ("row", "options", "key"),
    [
        *(({"prompt": one}, {}, "task.prompt_column") for one in (" ", 5, [], ["hi"])),
        ({"prompt": None}, {}, "task"),
        ({"prompt": None}, TEMPLATE, "task"),
        ({"prompt": math.nan}, TEMPLATE, "task"),
        ({"prompt": "hi"}, {"prompt_template": "{prompt:.2f}"}, "task.prompt_template"),
        ({"prompt": [USER]}, {"prefix": "x"}, "task.prefix"),
        ({"prompt": [{"role": "user", "content": [*PARTS, IMAGE]}]}, {}, "task"),
        ({"prompt": [CHAT[0], {"role": "user", "content": " "}]}, {}, "task"),
        ({"prompt": [CHAT[0], {"role": "user", "content": []}]}, {}, "task"),
        ({"prompt": [{"role": "wizard", "content": "a"}]}, {}, "task"),
        ({"prompt": [{"role": "user"}]}, {}, "task"),
        ({"prompt": "a\ud800"}, {}, "task"),
        ({"prompt": json.dumps(CHAT)[:-5]}, {}, "task.prompt_column"),
        ({"prompt": f"{json.dumps(CHAT)} Go on."}, {}, "task.prompt_column"),
        ({"prompt": "\n".join(map(json.dumps, CHAT))}, {}, "task.prompt_column"),
        ({"prompt": "p", "answer": None}, {}, "task.answer_column"),
        ({"prompt": "p", "answer": math.nan}, {}, "task.answer_column"),
        ({"prompt": "p", "answer": [1, {"x": -math.inf}]}, {}, "task.answer_column"),
        ({"prompt": "p", "loss_multiplier": -1}, {}, "task"),
        ({"prompt": "p", "loss_multiplier": "much"}, {}, "task"),
    ],
)
def test_an_unusable_row_names_its_number(row: Any, options: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "good", "answer": 0}, *[{"answer": 0, **row}] * 2])
    with pytest.raises(ConfigError, match=r"row \d of .*rows\.jsonl") as refused:
        read(Jsonl(path=path, eval_size=1, **options))
    assert refused.value.key == key


@pytest.mark.parametrize("first", [{**VERL, "reward_model": None}, {**VERL, "reward_model": {"ground_truth": None}}])
def test_the_first_row_may_lack_a_value_within_an_object(tmp_path: Path, first: Any) -> None:
    path = write(tmp_path / "rows.jsonl", [first, *[{**VERL, "prompt": [*CHAT, USER]}] * 3])
    options = {"prompt_template": "{reward_model.ground_truth}", "answer_column": None, "eval_size": 1}
    with pytest.raises(ConfigError, match="row 1 ") as refused:
        every(Jsonl(path=path, **options))
    assert refused.value.key == "task"


ROWS = [{"question": f"{i}+1?", "reply": str(i + 1), "level": i} for i in range(10)]
NAMED = {"prompt_column": "question", "answer_column": "reply"}


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({**NAMED, "prompt_column": "qestion"}, "task.prompt_column", 'did you mean "question"'),
        ({**NAMED, "answer_column": "gold"}, "task.answer_column", "choose one of the columns of .*question, reply"),
        ({**NAMED, "answer_column": "reward_model.ground_trth"}, "task.answer_column", "choose one"),
        ({**NAMED, "prompt_column": "level"}, "task.prompt_column", "row 1 "),
        ({"prompt_template": "{quest}", "answer_column": None}, "task.prompt_template", 'did you mean "question"'),
        ({"prompt_template": "{}", "answer_column": None}, "task.prompt_template", "choose one"),
        ({"prompt_template": "{question"}, "task.prompt_template", "double the braces"),
        ({**NAMED, "eval_split": "train"}, "task.eval_split", None),
        ({**NAMED, "eval_split": "test"}, "task.eval_split", None),
        ({**NAMED, "split": None}, "task.split", None),
        ({"processor": "absent.py:process"}, "task.processor", None),
    ],
)
def test_a_wrong_key_is_refused(options: dict[str, Any], key: str, said: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        every(Jsonl(path=write(tmp_path / "data.jsonl", ROWS), **options))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("empty.jsonl", ""),
        ("one.jsonl", '{"prompt": "a", "answer": "b"}\n'),
        ("text.txt", "a\n"),
        ("missing.jsonl", None),
    ],
)
def test_unusable_files_are_refused(name: str, written: str | None, tmp_path: Path, cache_folder: Path) -> None:
    if written is not None:
        (tmp_path / name).write_text(written)
    for path in (str(tmp_path / name), "nobody/nothing"):
        with pytest.raises(ConfigError) as refused:
            Jsonl(path=path).examples("train")
        assert (refused.value.key, refused.value.value) == ("task.path", path)


def test_held_out_examples_are_not_used_for_training(tmp_path: Path) -> None:
    path, other = write(tmp_path / "data.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:2])
    train, held_out, again = (
        [one["level"] for one in Jsonl(path=path, eval_size=3, **NAMED).examples(split)]
        for split in ("train", "eval", "eval")
    )
    assert sorted(train + held_out) == list(range(10))
    assert (len(held_out), again) == (2, held_out)  # at most a fifth
    task = Jsonl(path=path, eval_path=other, **NAMED)
    assert (len(task.examples("train")), len(task.examples("eval"))) == (10, 2)
    assert len(Jsonl(path=path, split=None, **NAMED).examples("eval")) == len(ROWS)
    examples = Jsonl(path=path, **NAMED).examples("train")
    assert list(examples) == [examples[i] for i in range(len(examples))]


QUESTIONS = [{"q": f"{i}"} for i in range(20)]


@pytest.mark.parametrize(
    ("rows", "most", "held_out"),
    [
        (QUESTIONS[:2], 128, 1),
        (QUESTIONS, 128, 4),
        (QUESTIONS, 3, 3),
        ([{"q": str(i % 10)} for i in range(100)], 128, 20),
        ([{"q": "same"}] * 10, 128, 2),
        ([{"q": [{"role": "user", "content": str(i)}]} for i in range(5)], 1, 1),
    ],
)
def test_whole_questions_are_held_out_at_most_a_fifth(rows: list[dict[str, Any]], most: int, held_out: int) -> None:
    train, evaluate = hold_out(rows, ["q"], most)
    assert len(evaluate) == held_out
    assert sorted(train + evaluate) == list(range(len(rows)))
    sides = [{json.dumps(rows[i]) for i in side} for side in (train, evaluate)]
    assert not sides[0] & sides[1] or len({json.dumps(row) for row in rows}) == 1
    backwards = hold_out(rows[::-1], ["q"], most)[1]
    assert {json.dumps(rows[::-1][i]) for i in backwards} == sides[1]


def test_the_processor_makes_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for processor in (f"{tmp_path}/mine.py:process", "mine:process"):
        made = Jsonl(path=write(tmp_path / "d.jsonl", [{"id": n} for n in range(5)]), processor=processor)
        made.check_ready()
        assert sorted(one["answer"] for one in every(made)) == list(range(5))
        assert all(one["prompt"][0]["content"] == f"{one['answer']}" for one in every(made))
    for wrong in (f"{tmp_path}/mine.py:proces", "mine:absent", "mine"):
        with pytest.raises(ConfigError) as refused:
            Jsonl(path=str(tmp_path / "d.jsonl"), processor=wrong).examples("train")
        assert refused.value.key == "task.processor"
    for row in (7, 8, 9):
        failing = Jsonl(path=write(tmp_path / "d.jsonl", [{"id": row}] * 2), processor=f"{tmp_path}/mine.py:process")
        with pytest.raises(ConfigError, match=r"row [12] of ") as refused:
            every(failing)
        assert refused.value.key == "task.processor"


@pytest.mark.parametrize(
    ("answer", "found", "solution"),
    [("2 x 600 = <<2*600=1200>>1200\n#### 1,200", "1200", "2 x 600"), ("a #### b\n#### -3.5 ", "-3.5", "a #### b")],
)
def test_gsm8k_is_read_from_a_folder(tmp_path: Path, answer: str, found: str, solution: str) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [{"question": "How many?", "answer": answer}])
    (one,) = Gsm8k(path=str(tmp_path)).examples("eval")
    assert one["answer"] == found
    assert one["solution"].startswith(solution)
    assert one["prompt"][0]["content"].startswith("How many?")
    assert "\\boxed{}" in one["prompt"][0]["content"]


def test_gsm8k_of_a_single_file_is_split_and_needs_final_answers(tmp_path: Path) -> None:
    rows = [{"question": f"Question {i}?", "answer": f"so\n#### {i}"} for i in range(10)]
    task = Gsm8k(path=write(tmp_path / "all.jsonl", rows))
    train, held_out = ({one["question"] for one in task.examples(split)} for split in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (8, 2, set())
    for answer in ("none", "#### "):
        with pytest.raises(ConfigError, match=r"row \d of .* has no final #### NUMBER"):
            every(Gsm8k(path=write(tmp_path / "all.jsonl", [{"question": "q", "answer": answer}] * 2)))


def test_rows_of_programs_have_tests(tmp_path: Path) -> None:
    rows = [{"prompt": f"Write f{i}.", "tests": [f"assert f{i}() == {i}"], "answer": ""} for i in range(4)]
    example = CodeProblems(path=write(tmp_path / "own.jsonl", rows)).examples("train")[0]
    assert (example["tests"][0][:8], example["prompt"][0]["role"]) == ("assert f", "user")
    with pytest.raises(ConfigError, match=r"row \d of .*own.jsonl has no tests"):
        every(CodeProblems(path=write(tmp_path / "own.jsonl", [{**row, "tests": []} for row in rows])))


def test_the_yaml_of_the_page_is_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"`(mine/task/sums.yaml)`.*?\n\n((?:    .*\n)+)", PAGE.read_text())
    assert found
    file = tmp_path / found[1]
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(found[2]))
    write(tmp_path / "sums.jsonl", [{"a": a, "b": b, "sum": a + b} for a in range(10, 14) for b in range(10, 15)])
    monkeypatch.chdir(tmp_path)
    assert run_here("data", "--config-dir", "mine", "task=[sums,arithmetic]", "--json", "--rows", "20") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [(one["task"], one["examples"]) for one in splits[:2]] == [("sums", 16), ("sums", 4)]
    assert splits[0]["prompts"][0]["text"] == "<bos><user>10+10=<end><assistant>"
    assert splits[0]["prompts"][0]["columns"]["answer"] == 20


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


def test_columns_of_mbpp_are_converted(tmp_path: Path) -> None:
    path = write(tmp_path / "mbpp.jsonl", MBPP)
    task: Any = build_run(compose(["task=mbpp", f"task.path={path}", "task.eval_split=null"])).task
    example = next(one for one in task.examples("train") if one["task_id"] == 3)
    assert example["tests"] == ["assert add(1) == 4"]
    assert example["answer"] == MBPP[2]["code"]
    (message,) = example["prompt"]
    assert "Add 3." in message["content"]
    assert message["content"].endswith("\nassert add(1) == 4")


def test_columns_of_humaneval_are_converted(tmp_path: Path) -> None:
    path = write(tmp_path / "he.jsonl", HUMAN_EVAL)
    task: Any = build_run(compose(["task=humaneval", f"task.path={path}"])).task
    assert len(task.examples("eval")) == len(HUMAN_EVAL)
    with pytest.raises(ConfigError, match=r"task.split=null: the task is for `grpocli eval`"):
        task.examples("train")
    example = task.examples("eval")[0]
    assert example["before"] in example["prompt"][0]["content"]
    assert (example["tests"], example["entry_point"]) == (HUMAN_EVAL[0]["test"], "add")


@pytest.mark.processes
@pytest.mark.parametrize(("task", "rows"), [("mbpp", MBPP), ("humaneval", HUMAN_EVAL)])
def test_reference_answers_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, rows)
    given = [f"task={task}", f"task.path={path}", "task.split=null", "task.eval_split=test", "reward=[code]"]
    assert main(given) == 0
    assert "100.00%" in capsys.readouterr().out
    wrong = {"test_list": ["assert add(1) == 0"], "test": "def check(f):\n    assert f(1) == 0"}
    write(path, [{**row, **{name: text for name, text in wrong.items() if name in row}} for row in rows])
    assert main(given) == 1
    assert "scores 0 (AssertionError)" in capsys.readouterr().out


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "d.jsonl", [{"prompt": f"Q{i % 10}", "answer": f"A{i % 10}"} for i in range(20)])


def questions(example: dict[str, Any]) -> list[str]:
    """The questions in a plain-text prompt."""
    return [part.split("A")[0] for part in example["prompt"].split("\n\n")]


def test_shots_are_used_neither_for_training_nor_for_evaluation(file: str) -> None:
    task = Jsonl(path=file, shots=3, eval_size=2)
    train, held_out = task.examples("train"), task.examples("eval")
    *shown, _ = questions(train[0])
    assert len(set(shown)) == 3
    assert all(questions(one)[:-1] == shown for one in (*train, *held_out))
    assert all(len(questions(one)) == 4 for one in held_out)
    assert not set(shown) & {questions(one)[-1] for one in held_out}
    assert {questions(one)[-1] for one in (*train, *held_out)} == {f"Q{i}" for i in range(10)} - set(shown)


def test_the_seed_chooses_the_shots(file: str) -> None:
    chosen = [questions(Jsonl(path=file, shots=3, shot_seed=seed).examples("train")[0])[:-1] for seed in (0, 1, 0)]
    assert chosen[0] == chosen[2] != chosen[1]
    run: Any = build_run(compose(["task=jsonl", f"task.path={file}", "task.shots=3", "seed=1"]))
    assert questions(run.task.examples("train")[0])[:-1] == chosen[1]


def test_shots_may_be_plain_text(file: str) -> None:
    task = Jsonl(path=file, shots=2, prompt_template="Q: {prompt}\nA:", shot_template=" {answer}", prefix="> ")
    first, second, asked = str(task.examples("train")[0]["prompt"]).split("\n\n")
    assert asked.startswith("> Q: Q")
    for shot in (first, second):
        number = shot[-1]
        assert shot == f"> Q: Q{number}\nA: A{number}"


def test_conversations_have_one_system_message(tmp_path: Path) -> None:
    old = {"role": "system", "content": "Old."}
    rows = [{"prompt": [old, {"role": "user", "content": f"Q{i}"}], "answer": f"A{i}"} for i in range(6)]
    task = Jsonl(path=write(tmp_path / "c.jsonl", rows), shots=2, system_prompt="New.")
    prompt = task.examples("train")[0]["prompt"]
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 2, "user"]
    assert prompt[0]["content"] == "New."
    assert prompt[2]["content"] == prompt[1]["content"].replace("Q", "A")
    rows = [{"question": f"{i} + 1?", "answer": f"One more than {i}.\n#### {i + 1}"} for i in range(6)]
    _, said, _ = Gsm8k(path=write(tmp_path / "g.jsonl", rows), shots=1).examples("train")[0]["prompt"]
    number = int(said["content"].split("than ")[1].split(".")[0])
    assert said["content"] == f"One more than {number}.\nThe answer is \\boxed{{{number + 1}}}."


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"shots": -1}, "task.shots"),
        ({"shots": 10}, "task.shots"),
        ({"shots": 1, "shot_template": "{anser}"}, "task.shot_template"),
        ({"shots": 1, "shot_template": "{answer"}, "task.shot_template"),
        ({"shots": 1, "shot_template": "{answer:d}"}, "task.shot_template"),
    ],
)
def test_unusable_shots_are_refused(file: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Jsonl(path=file, eval_size=2, **settings).examples("train")
    assert refused.value.key == key
