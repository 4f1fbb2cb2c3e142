"""task.streaming: rows are read when drawn, in an order that depends on the seed and the draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks import loading, prompt_source, prompts, table
from grpocli.tasks.prompt_source import PromptSource, StreamedPrompts
from grpocli.tasks.prompts import PromptMaker
from grpocli.tasks.table import Jsonl

N = 30
LETTERS = "abc"


def text(i: int) -> str:
    """Different prompts of equal length, in words of the tokenizer."""
    return " ".join(LETTERS[i // 3**k % 3] for k in range(4))


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": one, "answer": "x"}) + "\n" for one in texts))
    return path


@pytest.fixture(scope="module")
def run() -> Any:
    return build_run(compose([]))


@pytest.fixture
def data(tmp_path: Path, plain_tokenizer, run: Any) -> Any:
    held_out = str(write(tmp_path / "held_out.jsonl", ["c"]))

    def make(path: Path, seed: int = 0, limit: int = 10, long: str = "drop", **settings: Any) -> PromptSource:
        given = {"eval_path": held_out, "streaming": True, "shuffle_buffer": 8, **settings}
        rollout = replace(run.rollout, max_prompt_tokens=limit, long_prompts=long)
        return PromptSource.of(
            replace(run, seed=seed, rollout=rollout, task=Jsonl(path=str(path), **given)), plain_tokenizer
        )

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", [text(i) for i in range(N)])


def texts(data: PromptSource, draws: range) -> list[str]:
    return [str(data.draw(number).text) for number in draws]


def test_streaming_does_not_change_the_prompts_of_an_epoch(data, file: Path) -> None:
    streamed, whole = data(file), data(file, streaming=False)
    epochs = [texts(streamed, range(start, start + N)) for start in (0, N, 2 * N)]
    assert all(sorted(epoch) == sorted(texts(whole, range(N))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != texts(data(file, seed=7), range(N))
    assert streamed.draw(3).token_ids == next(
        prompt.token_ids for d in range(N) if (prompt := whole.draw(d)).text == streamed.draw(3).text
    )


@pytest.mark.parametrize("buffer", [1, 8, 10, 100])
def test_a_draw_does_not_depend_on_earlier_draws(file: Path, plain_tokenizer, buffer: int) -> None:
    def made() -> StreamedPrompts:
        task = Jsonl(path=str(file), eval_path="other", streaming=True, shuffle_buffer=buffer)
        return StreamedPrompts(task, PromptMaker(plain_tokenizer, 10), 3)

    one = made()
    drawn = [str(one.draw(number, "").text) for number in range(3 * N + 5)]
    assert {count for epoch in range(3) for count in Counter(drawn[epoch * N : epoch * N + N]).values()} == {1}
    for first in (0, 11, N - 1, N, 2 * N + 7):
        resumed = made()
        for number in (*range(first, 3 * N + 5), 0, 1):
            assert resumed.draw(number, "").text == drawn[number]


@pytest.mark.processes
def test_every_process_draws_the_same_prompts(data, file: Path) -> None:
    config = [f"task.path={file}", f"task.eval_path={file.parent}/held_out.jsonl", "task.streaming=true"]
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import words
from grpocli.composition.compose import build_run, compose
from grpocli.tasks.prompt_source import PromptSource, StreamedPrompts
data = PromptSource.of(build_run(compose({["task=jsonl", "task.shuffle_buffer=8", *config]!r})), words(None))
print([data.draw(number).text for number in range({2 * N})])
"""
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(texts(data(file), range(2 * N)))


def test_a_resume_does_not_tokenise_skipped_rows(data, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, done, tokenize = data(file), list[Any](), prompts.tokenize
    monkeypatch.setattr(prompts, "tokenize", lambda *given: done.append(given) or tokenize(*given))
    made.draw(21)
    assert len(done) == 1


@pytest.mark.parametrize(("long", "drawn"), [("drop", {"b"}), ("truncate", {"b", "a a a a"})])
def test_long_prompts_are_replaced(data, tmp_path: Path, long: str, drawn: set[str]) -> None:
    file = write(tmp_path / "long.jsonl", ["a a a a", "b"] * 8)
    made = data(file, limit=2, long=long)
    prompts = [made.draw(number) for number in range(40)]
    assert {prompt.text for prompt in prompts} == drawn
    assert max(len(prompt.token_ids) for prompt in prompts) == 2
    again = data(file, limit=2, long=long)
    assert [again.draw(number) for number in range(39, -1, -1)] == prompts[::-1]


def test_only_long_prompts_are_refused(data, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_source, "TRIES", 50)
    with pytest.raises(ConfigError) as refused:
        data(file, limit=2)
    assert refused.value.key == "rollout.max_prompt_tokens"


def test_the_first_different_examples_are_held_out(data, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", ["a", "a", "b", "c c", "a", "c c", "b b"])
    made = data(file, eval_path=None, eval_size=2)
    assert [problem.text for problem in made.problems()] == ["a", "b"]
    assert set(texts(made, range(40))) == {"c c", "b b"}
    with pytest.raises(ConfigError, match=r"task\.eval_size=9: .* has 4 different examples; lower it"):
        data(file, eval_path=None, eval_size=9)


def test_evaluation_problems_are_skipped(data, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", ["a", "c", "b"])
    assert set(texts(data(file), range(12))) == {"a", "b"}
    assert set(texts(data(file, allow_overlap=True), range(12))) == {"a", "b", "c"}


def test_streamed_tasks_may_be_part_of_a_mixture(tmp_path: Path, file: Path, plain_tokenizer) -> None:
    other, held_out = write(tmp_path / "o.jsonl", ["c c", "c"]), write(tmp_path / "h.jsonl", [text(3)])
    config = [
        *("task=mixture", "+task@task.one=jsonl", "+task@task.two=jsonl", "task.one.streaming=true"),
        *(f"task.one.path={file}", f"task.one.eval_path={write(tmp_path / 'g.jsonl', ['b'])}"),
        *(f"task.two.path={other}", f"task.two.eval_path={held_out}", "task.one.shuffle_buffer=8"),
    ]
    made, again = (PromptSource.of(build_run(compose(config)), plain_tokenizer) for _ in range(2))
    drawn = [made.draw(number) for number in range(4 * N)]
    assert {prompt.task: len({p.text for p in drawn if p.task == prompt.task}) for prompt in drawn} == {
        "one": N - 1,  # except the evaluation problems of two
        "two": 2,
    }
    assert [again.draw(number) for number in range(41, 50)] == drawn[41:50]


def test_a_broken_line_names_its_number(data, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "HEAD", 8)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:20], '{"prompt": "a\n', *lines[20:]]))
    made = data(file)
    for _ in range(2):  # an error is not taken for the end of the file
        with pytest.raises(ConfigError, match="line 21 is not JSON") as refused:
            texts(made, range(N))
        assert refused.value.key == "task.path"


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"answer": "x"}, "task"),
        ({"prompt": "a"}, "task.answer_column"),
        ({"prompt": [{"role": "wizard", "content": "a"}], "answer": ""}, "task"),
    ],
)
def test_an_unusable_row_is_refused_when_it_is_drawn(data, tmp_path: Path, row: dict[str, Any], key: str) -> None:
    file = write(tmp_path / "d.jsonl", [text(i) for i in range(12)])
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"row 13 of .*d\.jsonl") as refused:
        texts(data(file), range(13))
    assert refused.value.key == key


def test_a_stream_is_not_read_completely(data, tmp_path: Path) -> None:
    file = write(tmp_path / "endless.jsonl", [text(i) for i in range(200)])
    with file.open("a") as more:
        more.write("{ this is no JSON\n" * 100_000)
    made = data(file)
    assert len(texts(made, range(8))) == 8


def test_a_split_of_the_hub_is_streamed(data, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(path: str, name: str | None, split: str, key: str, streaming: bool) -> Any:
        import datasets

        asked.append((path, split, streaming))
        found = {"train": ["a", "b"], "test": ["c c"]}[split]
        return datasets.Dataset.from_dict({"prompt": found, "answer": ["x"] * len(found)}).to_iterable_dataset()

    monkeypatch.setattr(loading, "_from_hub", hub)
    made = data(Path("someone/data"), eval_path=None, eval_split="test")
    assert set(texts(made, range(6))) == {"a", "b"}
    assert [problem.text for problem in made.problems()] == ["c c"]
    assert set(asked) == {("someone/data", "train", True), ("someone/data", "test", True)}
