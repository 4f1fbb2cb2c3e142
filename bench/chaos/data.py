"""Hostile data and recipes: one error names the file and line, in bounded time and memory."""

from __future__ import annotations

import json
import random as random_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.trial import Kind, require, spread
from chaos.workspace import Workspace

ROWS = 12
MEMORY_GB = 24  # limit of the address space; torch reserves much of it
GOOD = b'{"prompt": "1+1=", "answer": "2"}'
DEEP = 200_000
BAD_ROWS: dict[str, bytes] = {
    "deep lists": b'{"prompt": "x", "answer": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"prompt": "x", "answer": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "an integer of 5,000 digits": b'{"prompt": "x", "answer": ' + b"7" * 5000 + b"}",
    "an integer of 5,000,000 digits": b'{"prompt": "x", "answer": ' + b"7" * 5_000_000 + b"}",
    "a lone surrogate in the prompt": b'{"prompt": "a\\ud800", "answer": "2"}',
    "an answer that is NaN": b'{"prompt": "x", "answer": NaN}',
    "an answer that is Infinity": b'{"prompt": "x", "answer": -Infinity}',
    "a number too large for a float": b'{"prompt": "x", "answer": 1e999}',
    "bad UTF-8": b'{"prompt": "\xff\xfe\x80", "answer": "2"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf", "answer": "2"}',
    "a NUL byte": b'{"prompt": "x", \x00"answer": "2"}',
    "a list": b'["x", "2"]',
    "a number": b"17",
    "null": b"null",
    "cut off": b'{"prompt": "x", "ans',
    "two objects": GOOD + GOOD,
    "single quotes": b"{'prompt': 'x', 'answer': '2'}",
    "a prompt that is a number": b'{"prompt": 17, "answer": "2"}',
    "a prompt that is null": b'{"prompt": null, "answer": "2"}',
    "a prompt of wrong messages": b'{"prompt": [{"role": 1}], "answer": "2"}',
    "no prompt": b'{"answer": "2"}',
    "an escape sequence in a name": b'{"prompt": "x", "\\u001b]0;owned\\u0007": 1, "answer": NaN}',
}
WHOLE_FILES: dict[str, bytes] = {
    "UTF-16": (GOOD.decode() + "\n").encode("utf-16") * 2,
    "compressed": bytes.fromhex("1f8b0800") + bytes(range(256)),
    "noise": random_module.Random(0).randbytes(4096),
    "zeros": bytes(4096),
    "one long line": b'{"prompt": "' + b"x" * 30_000_000,
    "an array that does not end": b"[" + b",\n".join([GOOD] * 9),
}
RECIPES: dict[str, str] = {
    "a tag of Python's": "train: !!python/object/apply:os.system ['touch owned']\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "a control character": "seed: \x1b]0;owned\x07\n",
    "bad UTF-8": "seed: \udcff\n",
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of `BAD_ROWS` at a line of the file."""

    row: str
    line: int
    attacks = 1

    def __str__(self) -> str:
        return f"jsonl, line {self.line}: {self.row}"

    def execute(self, workspace: Workspace) -> None:
        rows = [b'{"prompt": "%d+1=", "answer": "2"}' % number for number in range(ROWS)]
        rows[self.line - 1] = BAD_ROWS[self.row]
        sentence = train_refuses(workspace, b"\n".join(rows) + b"\n")
        named = re.search(rf"\b(line|row|example|problem) {self.line}\b", sentence)
        require(named is not None, f"the error does not name line {self.line}: {sentence}")


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file with a content of `WHOLE_FILES`."""

    content: str
    attacks = 1

    def __str__(self) -> str:
        return f"jsonl: {self.content}"

    def execute(self, workspace: Workspace) -> None:
        train_refuses(workspace, WHOLE_FILES[self.content])


@dataclass(frozen=True, slots=True)
class BadRecipe:
    """A recipe with a text of `RECIPES`."""

    text: str
    attacks = 1

    def __str__(self) -> str:
        return f"recipe: {self.text}"

    def execute(self, workspace: Workspace) -> None:
        folder = workspace.folder / "conf" / "recipe"
        folder.mkdir(parents=True)
        text = "# @package _global_\n" + RECIPES[self.text]
        (folder / "hostile.yaml").write_bytes(text.encode(errors="surrogateescape"))
        options = ["--config-dir", str(folder.parent), "recipe=hostile", "train.steps=1"]
        workspace.run("train", *options, memory_gb=MEMORY_GB).check(2, "hostile")
        require(not (workspace.folder / "owned").exists(), "it executed the recipe")


@dataclass(frozen=True, slots=True)
class Escapes:
    """Terminal escapes in the text that `command` prints."""

    command: str
    attacks = 1

    def __str__(self) -> str:
        return f"terminal escapes: {self.command}"

    def execute(self, workspace: Workspace) -> None:
        evil = "\x1b]0;owned\x07\x1b[2J\x9b31mSEEN"
        if self.command == "train":
            rows = [json.dumps({"prompt": f"{evil}{i}+1=", "answer": f"{evil}2"}) for i in range(ROWS)]
            (workspace.folder / "data.jsonl").write_text("\n".join(rows) + "\n")
            workspace.run("train", *_training(workspace)).check(0)
            return
        run = workspace.copy(workspace.finished())
        if self.command == "compare":
            path = run / "config.yaml"
            path.write_text(path.read_text().replace("operation: +", f"operation: {json.dumps(evil)}"))
            lines = (run / "metrics.jsonl").read_text().splitlines()
            name = json.dumps(f"reward{evil}")
            (run / "metrics.jsonl").write_text("".join(f"{{{name}: 1, {line[1:]}\n" for line in lines))
            ended = workspace.run("compare", str(workspace.finished()), str(run))
        else:
            for path in (run / "rollouts").glob("*.parquet"):
                write_texts(path, {"prompt": evil, "completion": evil})
            ended = workspace.run("rollouts", str(run))
        ended.check(0)
        require("SEEN" in ended.text, f"it does not print the text{ended.tail}")


def write_texts(path: Path, texts: Mapping[str, str]) -> None:
    """Overwrite columns of a rollout file with a text."""
    from pyarrow import array, parquet

    table = parquet.read_table(path)
    for name, text in texts.items():
        table = table.set_column(table.schema.get_field_index(name), name, array([text] * len(table)))
    parquet.write_table(table, path)


def _training(workspace: Workspace) -> list[str]:
    """Overrides of a short run. It has its own evaluation data, so that every hostile row is in the training data."""
    (workspace.folder / "eval.jsonl").write_text('{"prompt": "5+5=", "answer": "10"}\n')
    return [
        *("model.warm_start_steps=20", f"rollout.prompts_per_step={ROWS}", "rollout.group_size=2", "eval.problems=0"),
        *("train.steps=1", "reward=[format]", "reward.format.pattern='.*[02468]'", "task=jsonl"),
        *(f"task.path={workspace.folder}/data.jsonl", f"task.eval_path={workspace.folder}/eval.jsonl"),
        f"hydra.run.dir={workspace.folder}/run",
    ]


def train_refuses(workspace: Workspace, content: bytes) -> str:
    """The error of a run that refuses this data."""
    (workspace.folder / "data.jsonl").write_bytes(content)
    ended = workspace.run("train", *_training(workspace), memory_gb=MEMORY_GB)
    ended.check(2, "data.jsonl")
    require(not (workspace.folder / "run" / "metrics.jsonl").exists(), "it trained")
    return ended.sentence


def draw(random: Random, count: int) -> Sequence[BadRow | BadFile | BadRecipe | Escapes]:
    all_: list[BadRow | BadFile | BadRecipe | Escapes] = [
        *(BadRow(row, 0) for row in BAD_ROWS),
        *map(BadFile, WHOLE_FILES),
        *map(BadRecipe, RECIPES),
        *map(Escapes, ("train", "compare", "rollouts")),
    ]
    trials = spread(random, all_, count)
    return [BadRow(one.row, random.randint(1, ROWS)) if isinstance(one, BadRow) else one for one in trials]


KIND = Kind("data", 45, draw)
