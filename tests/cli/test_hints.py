"""What a run says once at its start or end about what runs and is often not meant, and advice for what people type."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from cli.running import SMALL

from grpocli.config.parts import nearest, nearest_key
from grpocli.models.tiny import SPECIAL, make_model, make_tokenizer
from grpocli.text import escape_unprintable

ALGORITHMS = ("cispo", "dapo", "dgpo", "dppo", "drgrpo", "gmpo", "grpo", "gspo", "rloo", "sapo")
TYPED = {"gpro": "grpo", "grop": "grpo", "rlo": "rloo", "drgpo": "drgrpo"}
KEYS = ("rollout", "rollout.order", "rollout.group_size", "optim.lr", "train.steps", "algorithm/objective")
THOUGHT = ["model=thinks", "task=jsonl", "task.path=rows.jsonl", "task.format=chat"]
FAKE = ["train", *SMALL[1:], "engine=fake", "train.steps=1", "eval.problems=0"]


@pytest.mark.parametrize("word", TYPED)
def test_the_nearest_name_is_what_people_mean(word: str) -> None:
    assert nearest(word, ALGORITHMS) == f'; did you mean "{TYPED[word]}"?'


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.group_siz", "rollout.group_size"),
        ("rolout.group_siz", "rollout.group_size"),
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("algorithm/objectiv", "algorithm/objective"),
        ("rollout.overlap", ""),  # there is no such key anymore
    ],
)
def test_the_nearest_key_has_a_name_that_is_alike(key: str, meant: str) -> None:
    assert nearest_key(key, KEYS) == (f'; did you mean "{meant}"?' if meant else "")


def test_what_ascii_lacks_is_printed_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    escape_unprintable()
    print("/home/josé", end="")
    assert written.getvalue() == rb"/home/jos\xe9"


@pytest.mark.parametrize(
    ("words", "advice"),
    [(["evaluate"], '"eval"'), (["eval", "runs/x"], "--run runs/x"), (["train", "runs/x"], "resume=runs/x")],
)
def test_a_command_that_does_not_exist_names_the_one_that_does(words: list[str], advice: str, grpocli) -> None:
    assert advice in grpocli(*words, code=2)[2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "hints"),
    [
        ([], []),
        (["model=chat", "task=jsonl", "task.path=rows.jsonl"], ["needs task.format=chat"]),
        (
            [*THOUGHT, "rollout.max_completion_tokens=600", "reward=[exact_match,format]"],
            ["the model is made for 512", "the chat template opens <think>"],
        ),
    ],
    ids=" ".join,
)
def test_a_run_says_once_what_is_often_not_meant(overrides: list[str], hints: list[str], grpocli) -> None:
    row = {"prompt": "1+1=", "answer": "2", "ready": f"{SPECIAL[-1]}1+1="}
    Path("rows.jsonl").write_text("".join(json.dumps(row | {"prompt": f"{i}+1="}) + "\n" for i in range(40)))
    make_model(0).save_pretrained("chat")
    make_tokenizer().save_pretrained("chat")
    thinks = make_tokenizer()
    thinks.chat_template = str(thinks.chat_template) + "<think>\n"
    make_model(0).save_pretrained("thinks")
    thinks.save_pretrained("thinks")
    small = [] if {"model=chat", "model=thinks"} & {*overrides} else ["model.warm_start_steps=20"]
    chosen = [one.replace("model=", "model=./") for one in overrides]
    _, out, err = grpocli(*FAKE, *small, *chosen, code=0)
    known = ["needs task.format=chat", "the model is made for 512", "the chat template opens <think>"]
    assert [hint for hint in known if hint in out + err] == hints
