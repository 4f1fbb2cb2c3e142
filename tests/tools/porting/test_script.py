"""Scripts: literals and constants of four calls are read, the rest is named; rewards work from their own file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.config.user_code import load
from grpocli.errors import ConfigError
from grpocli_tools.porting.from_trl_command import ported, shell_script

Command = Callable[..., tuple[int, str, str]]
HEAD = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
NAME = "a/b"
def correct(completions, answer, **kw): return [1.0]
"""
PARTS = {
    "model": "model = NAME\n",
    "rewards": "rewards = [correct]\n",
    "steps": 'steps = {"max_steps": 9}\n',
    "ds": 'ds = load_dataset("c/d", split="train")\n',
}
TAIL = """
config = GRPOConfig("out", **steps)
GRPOTrainer(model=model, reward_funcs=rewards, args=config, train_dataset=ds, processing_class=TOKENIZER).train()
"""
# what the script does: the parts' lines; overrides that are printed; beginnings of "# check:" lines
SCRIPTS: dict[str, tuple[dict[str, str], set[str], tuple[str, ...]]] = {
    "nothing": ({}, {"model.path=a/b", "task.path=c/d", "task.split=train", "train.steps=9", "eval.problems=0"}, ()),
    "a loaded model": (
        {"model": "model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32, device_map='auto')\n"},
        {"model.path=a/b", "model.dtype=float32"},
        (),
    ),
    "an unknown model": ({"model": "model = load_my_model()\n"}, {"model=???"}, ("model=model",)),
    "a name that is bound twice": ({"model": "model = NAME\nmodel = wrap(model)\n"}, {"model=???"}, ("model=model",)),
    "mapped rows": (
        {"ds": PARTS["ds"] + "ds = ds.map(f)\n"},
        {"task.path=c/d", "task.split=train"},
        ("train_dataset=ds (line",),
    ),
    "two datasets": (
        {"ds": "ds = concatenate_datasets([load_dataset('c/d'), load_dataset('e/f')])\n"},
        {"task=???"},
        ("train_dataset=ds",),
    ),
    "a dataset that is not read": ({"ds": "ds = load_dataset(PATH)\n"}, {"task=???"}, ("train_dataset=ds",)),
    "epochs": ({"steps": "steps = {}\n"}, {"train.steps=???"}, ("num_train_epochs=3",)),
    "a call": ({"steps": "steps = {'max_steps': made()}\n"}, {"train.steps=???"}, ("**steps=", "num_train_epochs=3")),
    "a changed dictionary": (
        {"steps": "steps = {'max_steps': 9}\nsteps['max_steps'] = 10\n"},
        {"train.steps=???"},
        ("**steps=", "num_train_epochs=3"),
    ),
    "format first": (
        {"rewards": "def shape(completions, **kw): return [1.0]\nrewards = [shape, correct]\n"},
        {"eval.reward=correct"},
        (),
    ),
    "no name says": ({"rewards": "def a(**kw): ...\nrewards = [a]\n"}, set(), ("eval.reward=a",)),
    "a registry": ({"rewards": "rewards = [R[one] for one in NAMES]\n"}, {"reward=???"}, ("reward_funcs=",)),
    "a lambda": (
        {"rewards": "rewards = [correct, lambda **kw: [0]]\n"},
        {"reward=[train_rewards.py:correct]"},
        ("reward_funcs=lambda",),
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_command_is_right_or_names_what_it_leaves_out(what: str, tmp_path: Path) -> None:
    changed, wanted, checks = SCRIPTS[what]
    (tmp_path / "train.py").write_text("".join([HEAD, *(PARTS | changed).values(), TAIL]))
    text = shell_script(ported(tmp_path / "train.py")[0])
    chosen = shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)
    assert wanted <= set(chosen)
    said = [line.removeprefix("# check: ") for line in text.splitlines() if line.startswith("# check: ")]
    said = [one for one in said if not one.startswith(("train_rewards.py", "this assumes", "prompts over", "only the"))]
    assert all(any(one.startswith(check) for one in said) for check in checks), said
    assert len(said) == len(checks), said


def test_a_setting_that_is_changed_later_is_named(tmp_path: Path) -> None:
    changed = TAIL.replace("\nGRPOTrainer", "\nconfig.learning_rate = 1e-5\nGRPOTrainer")
    (tmp_path / "train.py").write_text("".join([HEAD, *PARTS.values(), changed]))
    text = shell_script(ported(tmp_path / "train.py")[0])
    line = next(line for line in text.splitlines() if "optim.lr=" in line)
    assert line.endswith("# TRL's default, since learning_rate is not read")
    assert "# check: learning_rate=config.learning_rate (line" in text


def test_evaluation_on_the_training_data_is_named(tmp_path: Path) -> None:
    parts = PARTS | {"ds": "ds = load_dataset('json', data_files={'train': 'd.jsonl'}, split='train[:9]')\n"}
    tail = TAIL.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds")
    (tmp_path / "train.py").write_text("".join([HEAD, *parts.values(), tail]))
    port, _ = ported(tmp_path / "train.py")
    assert port.value("task.path") == "d.jsonl"
    assert "task.eval_split" not in shell_script(port)
    assert "# check: eval_dataset=d.jsonl: it is the training data" in shell_script(port)


MAGIC = """%%capture
!pip install trl \\
    datasets
if True:
    !nvidia-smi
%cd /content
"""


@pytest.mark.parametrize("name", ["colab.py", "colab.ipynb"])
def test_a_notebook_is_read(name: str, tmp_path: Path) -> None:
    body = "".join(PARTS.values())
    cells = [MAGIC, "%%bash\nls -l", "%%writefile x.py\nGRPOConfig('other')", HEAD, body, TAIL]
    written = [{"cell_type": "code", "source": one.splitlines(keepends=True)} for one in cells]
    notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": ["# GRPO"]}, *written]})
    (tmp_path / name).write_text(notebook if name.endswith("ipynb") else f"{MAGIC}{HEAD}{body}{TAIL}")
    port, functions = ported(tmp_path / name)
    assert (port.value("model.path"), port.value("train.steps"), port.value("task.path")) == ("a/b", 9, "c/d")
    compile(functions, name, "exec")
    assert "def correct(" in functions


@pytest.mark.parametrize("key", ["model", "task", "reward", "train.steps"])
def test_a_choice_that_is_left_to_the_reader_stops_the_command(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_run(compose([f"{key}=???"]))
    assert raised.value.key == key


WHOLE = '''
from __future__ import annotations
import re
try:
    import nowhere
except ImportError:
    nowhere = None
from trl import GRPOConfig, GRPOTrainer
open("MARKER", "w")
POINTS = {"right": 1.0, "wrong": -1.0}
DIGITS = re.compile(r"\\d+")
tokenizer = AutoTokenizer.from_pretrained("a/b")

def digits(text):
    return DIGITS.findall(text)

# the answer is right
def right(completions, gold, **kwargs):
    """Points.

        An indented line.
    """
    return [POINTS["right" if g in digits(c) else "wrong"] for c, g in zip(completions, gold)]

def short(completions, **kwargs):
    return [1.0 / (1 + len(tokenizer.encode(c))) for c in completions]

GRPOTrainer("a/b", [right, short], GRPOConfig("out", max_steps=3), load_dataset("c/d")).train()
'''


def test_the_functions_of_a_script_run_from_their_file(
    tmp_path: Path, grpocli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WHOLE)
    code, text, _ = grpocli("from-trl", "train.py")
    assert code == 0
    assert "reward=[train_rewards.py:right,train_rewards.py:short]" in text
    assert "--rewards train_rewards.py moves the functions of train.py there" in text
    code, text, _ = grpocli("from-trl", "train.py", "--out", "recipe/mine.yaml")
    assert code == 0
    own = tmp_path / "recipe" / "mine_rewards.py"
    assert load(f"{own}:right", "reward")(completions=["2", "3"], gold=["2", "2"]) == [1.0, -1.0]
    assert "            An indented line." not in own.read_text()
    assert "        An indented line." in own.read_text()
    assert "mine_rewards.py lacks tokenizer (line 12), which a call makes; define it there" in text
    assert not (tmp_path / "MARKER").exists()
    chosen = shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)
    run = build_run(compose([*(one for one in chosen if not one.startswith(("model", "hydra."))), "model=tiny"]))
    assert list(run.reward) == ["right", "short"]
    code, out, err = grpocli("from-trl", "train.py", "--rewards", str(own))
    assert (code, out) == (2, "")
    assert "exists already" in err
