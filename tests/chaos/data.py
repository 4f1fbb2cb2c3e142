"""Hostile data and recipes: one sentence that names the file and the line, in bounded time and memory."""

from __future__ import annotations

import json
import random as random_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.place import Place
from chaos.trial import Kind, dealt, demand

PROMISE = "one sentence with file and line, in bounded time and memory; escapes never reach the terminal"
ROWS = 12
MEMORY_GB = 24  # of addresses: of a process that has imported torch
GOOD = b'{"prompt": "1+1=", "answer": "2"}'
DEEP = 200_000
BAD_ROWS: dict[str, bytes] = {
    "deep lists": b'{"prompt": "x", "answer": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"prompt": "x", "answer": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "an integer of 5,000 digits": b'{"prompt": "x", "answer": ' + b"7" * 5000 + b"}",
    "an integer of 5,000,000 digits": b'{"prompt": "x", "answer": ' + b"7" * 5_000_000 + b"}",
    "a lone surrogate in the prompt": b'{"prompt": "a\\ud800", "answer": "2"}',
    "a lone surrogate in the answer": b'{"prompt": "x", "answer": "\\udfff"}',
    "a lone surrogate in a name": b'{"prompt": "x", "answer": "2", "\\ud800": 1}',
    "a key twice": b'{"prompt": "x", "answer": "2", "answer": "3"}',
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
    "a title in its name": b'{"prompt": "x", "\\u001b]0;owned\\u0007": 1, "answer": NaN}',
}
WHOLE_FILES: dict[str, bytes] = {
    "UTF-16": (GOOD.decode() + "\n").encode("utf-16") * 2,
    "compressed": bytes.fromhex("1f8b0800") + bytes(range(256)),
    "noise": random_module.Random(0).randbytes(4096),
    "zeros": bytes(4096),
    "one long line": b'{"prompt": "' + b"x" * 30_000_000,
    "an array that does not end": b"[" + b",\n".join([GOOD] * 9),
}
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
RECIPES: dict[str, str] = {
    "an alias bomb": BOMB,
    "deep lists": "rollout: " + "[" * 20_000 + "]" * 20_000 + "\n",
    "a tag of Python's": "train: !!python/object/apply:os.system ['touch owned']\n",
    "an alias to itself": "train: &t [*t]\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "a control character": "seed: \x1b]0;owned\x07\n",
    "bad UTF-8": "seed: \udcff\n",
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """row: of `BAD_ROWS`, as the line of that number."""

    row: str
    line: int
    attacks = 1

    def __str__(self) -> str:
        return f"jsonl, line {self.line}: {self.row}"

    def hold(self, place: Place) -> None:
        rows = [b'{"prompt": "%d+1=", "answer": "2"}' % number for number in range(ROWS)]
        rows[self.line - 1] = BAD_ROWS[self.row]
        said = train_refuses(place, b"\n".join(rows) + b"\n")
        named = re.search(rf"\b(line|row|example|problem) {self.line}\b", said)
        demand(named is not None, f"its sentence does not name line {self.line}: {said}")


@dataclass(frozen=True, slots=True)
class BadFile:
    """content: of `WHOLE_FILES`."""

    content: str
    attacks = 1

    def __str__(self) -> str:
        return f"jsonl: {self.content}"

    def hold(self, place: Place) -> None:
        train_refuses(place, WHOLE_FILES[self.content])


@dataclass(frozen=True, slots=True)
class BadRecipe:
    """text: of `RECIPES`."""

    text: str
    attacks = 1

    def __str__(self) -> str:
        return f"recipe: {self.text}"

    def hold(self, place: Place) -> None:
        folder = place.folder / "conf" / "recipe"
        folder.mkdir(parents=True)
        text = "# @package _global_\n" + RECIPES[self.text]
        (folder / "hostile.yaml").write_bytes(text.encode(errors="surrogateescape"))
        options = ["--config-dir", str(folder.parent), "recipe=hostile", "train.steps=1"]
        place.run("train", *options, memory_gb=MEMORY_GB).check(2, "hostile")
        demand(not (place.folder / "owned").exists(), "it ran what the recipe says")


@dataclass(frozen=True, slots=True)
class Escapes:
    """Sequences that a terminal obeys, in text that is not ours, as `command` prints it."""

    command: str
    attacks = 1

    def __str__(self) -> str:
        return f"terminal escapes: {self.command}"

    def hold(self, place: Place) -> None:
        evil = "\x1b]0;owned\x07\x1b[2J\x9b31mSEEN"
        if self.command == "train":
            rows = [json.dumps({"prompt": f"{evil}{i}+1=", "answer": f"{evil}2"}) for i in range(ROWS)]
            (place.folder / "data.jsonl").write_text("\n".join(rows) + "\n")
            place.run("train", *_training(place)).check(0)
            return
        run = place.copy(place.finished())
        if self.command == "compare":
            path = run / "config.yaml"
            path.write_text(path.read_text().replace("operation: +", f"operation: {json.dumps(evil)}"))
            lines = (run / "metrics.jsonl").read_text().splitlines()
            name = json.dumps(f"reward{evil}")
            (run / "metrics.jsonl").write_text("".join(f"{{{name}: 1, {line[1:]}\n" for line in lines))
            ended = place.run("compare", str(place.finished()), str(run))
        else:
            for path in (run / "rollouts").glob("*.parquet"):
                write_texts(path, {"prompt": evil, "completion": evil})
            ended = place.run("rollouts", str(run))
        ended.check(0)
        demand("SEEN" in ended.text, f"it does not print the text{ended.tail}")


def write_texts(path: Path, texts: Mapping[str, str]) -> None:
    """Put a text into every row of columns of a rollout file."""
    from pyarrow import array, parquet

    table = parquet.read_table(path)
    for name, text in texts.items():
        table = table.set_column(table.schema.get_field_index(name), name, array([text] * len(table)))
    parquet.write_table(table, path)


def _training(place: Place) -> list[str]:
    """Rows to evaluate on are given, so that none of the hostile ones is kept for that and never read."""
    (place.folder / "eval.jsonl").write_text('{"prompt": "5+5=", "answer": "10"}\n')
    return [
        *("model.warm_start_steps=20", f"rollout.prompts_per_step={ROWS}", "rollout.group_size=2", "eval.problems=0"),
        *("train.steps=1", "reward=[format]", "reward.format.pattern='.*[02468]'", "task=jsonl"),
        *(f"task.path={place.folder}/data.jsonl", f"task.eval_path={place.folder}/eval.jsonl"),
        f"hydra.run.dir={place.folder}/run",
    ]


def train_refuses(place: Place, content: bytes) -> str:
    """The sentence in which a run does so."""
    (place.folder / "data.jsonl").write_bytes(content)
    ended = place.run("train", *_training(place), memory_gb=MEMORY_GB)
    ended.check(2, "data.jsonl")
    demand(not (place.folder / "run" / "metrics.jsonl").exists(), "it trained")
    return ended.sentence


def draw(random: Random, count: int) -> Sequence[BadRow | BadFile | BadRecipe | Escapes]:
    all_: list[BadRow | BadFile | BadRecipe | Escapes] = [
        *(BadRow(row, 0) for row in BAD_ROWS),
        *map(BadFile, WHOLE_FILES),
        *map(BadRecipe, RECIPES),
        *map(Escapes, ("train", "compare", "rollouts")),
    ]
    trials = dealt(random, all_, count)
    return [BadRow(one.row, random.randint(1, ROWS)) if isinstance(one, BadRow) else one for one in trials]


KIND = Kind("data", PROMISE, 45, draw)
