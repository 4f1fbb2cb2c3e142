"""Teachers of a distillation: which models they are, and the check of their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from composed import built

from grpocli.errors import ConfigError
from grpocli.models.loading import HuggingFace
from grpocli.models.teacher import WARMER, check_tokenizers, teachers_of
from grpocli.models.tiny import Tiny, make_model, make_tokenizer


def folder(path: Path, change: Callable[[dict[str, int]], dict[str, int]] = lambda vocabulary: vocabulary) -> Path:
    """A teacher with the built-in model's tokenizer, after a change of its vocabulary."""
    make_model(1).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    file = path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["vocab"] = change(spec["model"]["vocab"])
    file.write_text(json.dumps(spec))
    return path


def test_each_teacher_is_loaded_once() -> None:
    kl = built("algorithm=opd", "algorithm.kl.model={a: one, b: two, c: one}").kl
    first, second = teachers_of(kl, HuggingFace(path="student", dtype="float32", trust_remote_code=True))
    assert (first.tasks, first.key, second.tasks) == (("a", "c"), "algorithm.kl.model.a", ("b",))
    assert first.part == HuggingFace(path="one", dtype="float32", trust_remote_code=True)
    assert teachers_of(built("algorithm=opd", "algorithm.kl.model=one", "algorithm.kl.beta=0").kl, Tiny()) == []
    kl = built("algorithm=opd", "algorithm.kl.model=tiny-teacher").kl
    (teacher,) = teachers_of(kl, Tiny(digits=3, operation="-", noise=0.3))
    assert teacher.part == Tiny(digits=3, operation="-", **WARMER), "it follows the student's task"


def swapped(vocabulary: dict[str, int]) -> dict[str, int]:
    return vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}


def test_the_first_differing_token_is_named(tmp_path: Path) -> None:
    same, other = folder(tmp_path / "same"), folder(tmp_path / "other", swapped)
    ours = make_tokenizer()
    for path in (same, other):
        kl = built("algorithm=opd", f"algorithm.kl.model={path}").kl
        teachers = teachers_of(kl, Tiny())
        if path == same:
            check_tokenizers(teachers, ours)
            continue
        with pytest.raises(ConfigError, match=rf"token {ours.get_vocab()['a']} is '[ab]'") as error:
            check_tokenizers(teachers, ours)
        assert (error.value.key, error.value.value) == ("algorithm.kl.model", str(other))


def test_a_teacher_without_logits_for_a_token_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    kl = built("algorithm=opd", f"algorithm.kl.model={path}").kl
    with pytest.raises(ConfigError, match="vocab_size is 100, and the policy's tokenizer has the token"):
        check_tokenizers(teachers_of(kl, Tiny()), make_tokenizer())


@pytest.mark.parametrize("path", ["missing/folder/x", "."])
def test_a_missing_teacher_is_an_error_of_its_key(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kl = built("algorithm=opd", f"algorithm.kl.model={{a: {path}}}").kl
    with pytest.raises(ConfigError) as error:
        teachers_of(kl, Tiny())[0].check_ready()
    assert (error.value.key, error.value.value) == ("algorithm.kl.model.a", path)
