"""Digests of a run's inputs: what counts as a change, and what a resume says about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from composed import refused

from grpocli.composition.resume import FIXED
from grpocli.launch.inputs import BLOCK, changed_inputs, digest, inputs_of


def append(path: Path, more: bytes = b'{"prompt": "a"}\n') -> None:
    path.write_bytes(path.read_bytes() + more)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A config whose inputs are in `tmp_path`: models, data in a file and a folder, code with a helper or a package."""
    for name in ("base", "teacher"):
        (tmp_path / name).mkdir()
        for file in ("model-1.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
            (tmp_path / name / file).write_bytes(os.urandom(3 * BLOCK))
    (tmp_path / "folder" / "train").mkdir(parents=True)
    for file in ("d.jsonl", "folder/eval.jsonl", "folder/train/data.arrow", "t.jinja", "folder/notes.txt"):
        (tmp_path / file).write_text("text\n" * 9)
    (tmp_path / "mine.py").write_text("import helper\ndef f(): ...\nclass Adv: ...\n")
    for file in ("helper.py", "other.py"):
        (tmp_path / file).write_text("SIGN = 1\n")
    code = f"{tmp_path}/mine.py"
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "r.py").write_text(
        "from pkg.h import SIGN\nfrom .sub import s\nfrom . import t\ndef f(): ...\n"
    )
    for file in ("h.py", "t.py", "sub/s.py", "u.py"):
        (tmp_path / "pkg" / file).write_text("import pkg.r\n")
    monkeypatch.chdir(tmp_path)
    return {
        "seed": 0,
        "model": {"path": str(tmp_path / "base"), "chat_template": str(tmp_path / "t.jinja")},
        "task": {"a": {"path": str(tmp_path / "d.jsonl")}, "b": {"path": str(tmp_path / "folder"), "split": "folder"}},
        "reward": {
            "f": {"_target_": "reward/python", "function": f"{code}:f"},
            "g": {"_target_": "reward/python", "function": "pkg.r:f"},
            "p": {"_target_": "reward/python", "function": f"{tmp_path}/pkg/r.py:f"},
        },
        "algorithm": {"advantage": {"_target_": f"{code}:Adv"}, "kl": {"model": str(tmp_path / "teacher")}},
        "callbacks": ["installed.package:Callback"],
        "name": code,
        "rollout": {"stop": ["~~~", code, f"{code}:f", "x" * 5000, "\n\0"]},
        "tracker": {"folder": str(tmp_path / "folder")},
    }


CHANGES: dict[str, tuple[str, Callable[[Path], None], set[str]]] = {
    "a byte of the weights": ("base/model-1.safetensors", flip, {"model"}),
    "the model's config": ("base/config.json", append, {"model"}),
    "the model's tokens": ("base/tokenizer.json", flip, {"model"}),
    "the model's template": ("base/tokenizer_config.json", append, {"model.chat_template"}),
    "the run's template": ("t.jinja", append, {"model.chat_template"}),
    "the model's page": ("base/README.md", append, set()),
    "a teacher": ("teacher/model-1.safetensors", flip, {"algorithm.kl.model"}),
    "a row appended": ("d.jsonl", append, {"task.a.path"}),
    "a row changed": ("d.jsonl", flip, {"task.a.path"}),
    "a file of a folder": ("folder/train/data.arrow", flip, {"task.b.path"}),
    "a note beside the data": ("folder/notes.txt", append, set()),
    "code": ("mine.py", append, {"reward.f.function", "algorithm.advantage"}),
    "code that it imports": ("helper.py", append, {"reward.f.function", "algorithm.advantage"}),
    "code that it does not import": ("other.py", append, set()),
    "its package": ("pkg/__init__.py", append, {"reward.g.function", "reward.p.function"}),
    "a module of its package": ("pkg/h.py", append, {"reward.g.function", "reward.p.function"}),
    "a module beside it": ("pkg/t.py", append, {"reward.g.function", "reward.p.function"}),
    "a folder that is no package": ("pkg/sub/s.py", append, {"reward.g.function", "reward.p.function"}),
    "another module of its package": ("pkg/u.py", append, set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_input_is_noticed(change: str, config: dict[str, object], tmp_path: Path) -> None:
    before = inputs_of(config, str(tmp_path / "base"), None)
    assert before.keys() == {
        *("model", "model.chat_template", "task.a.path", "task.b.path"),
        *("reward.f.function", "reward.g.function", "reward.p.function", "algorithm.advantage", "algorithm.kl.model"),
    }
    file, how, expected = CHANGES[change]
    how(tmp_path / file)
    after = inputs_of(config, str(tmp_path / "base"), None)
    assert {key for key in before if before[key] != after[key]} == expected


def test_a_moved_input_is_the_same(tmp_path: Path) -> None:
    before, after = (tmp_path / name for name in ("before.jsonl", "after.jsonl"))
    before.write_text("row\n")
    found = [inputs_of({"task": {"path": str(before)}}, "me/model", "commit1")]
    before.rename(after)
    found.append(inputs_of({"task": {"path": str(after)}}, "me/model", "commit1"))
    assert found[0] == found[1]
    assert found[0]["model"] == "commit commit1"


def test_a_digest_of_large_files_is_quick(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        with file.open("wb") as large:
            large.truncate(1 << 40)  # sparse
    began = time.monotonic()
    first = digest(files)
    assert time.monotonic() - began < 5
    with files[1].open("r+b") as large:
        large.write(b"x")
    assert digest(files) != first


@pytest.mark.parametrize(
    ("before", "changed", "allowed", "expected"),
    [
        ({"model": "weights 2"}, {}, True, ["the weights of model have changed since the last start"]),
        ({"model": "weights 2"}, {}, False, "model"),
        ({"model": "weights 1"}, {"model.path": ("/a", "/b")}, False, []),
        ({"algorithm.kl.model": "weights 2"}, {"algorithm.kl": ("k3", "reverse")}, False, []),
        ({"task.path": "content 2"}, {}, False, ["the content of task.path has changed since the last start"]),
        ({"task.path": "content 2"}, {"task.path": ("a", "b")}, False, []),
        ({}, {}, False, []),
    ],
)
def test_weights_refuse_and_others_are_told(
    before: dict[str, str], changed: dict[str, tuple[object, object]], allowed: bool, expected: list[str] | str
) -> None:
    kinds = {"model": "weights", "algorithm.kl.model": "weights", "task.path": "content", "reward.f": "code"}
    now = {key: f"{kind} 1" for key, kind in kinds.items()}
    if isinstance(expected, list):
        assert changed_inputs(before, now, changed, allowed) == expected
        return
    with refused(expected):
        changed_inputs(before, now, changed, allowed)


def test_the_page_lists_every_key_that_a_resume_cannot_change() -> None:
    page = Path(__file__).parents[2] / "docs" / "command_line.md"
    never = next(line for line in page.read_text().splitlines() if line.startswith("| never |"))
    assert [key for key in FIXED if f"`{key}`" not in never] == []
