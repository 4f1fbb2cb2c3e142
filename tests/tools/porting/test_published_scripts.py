"""Scripts as people publish them: the printed command trains what the script trains, or names what it leaves out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli_tools.porting.from_trl_command import ported, shell_script

HEAD = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
NAME = "a/b"
def correct(completions, answer, **kw): return [1.0]
model = NAME
rewards = [correct]
steps = {"max_steps": 9}
tokenizer = AutoTokenizer.from_pretrained(NAME)
ds = load_dataset("c/d", split="train")
"""
TAIL = """
GRPOTrainer(model=model, reward_funcs=rewards, args=GRPOConfig("out", **steps), train_dataset=ds,
            processing_class=tokenizer).train()
"""
LOAD = "AutoModelForCausalLM.from_pretrained(NAME, dtype='float32')"
FORMAT = "def format_reward(completions, **kw): return [1.0]\n"
LENGTH = "def reward_len(completions, **kw): return [1.0]\n"
CLASSES = """
class Base:
    def __call__(self, completions, **kw): return [self.of(c) for c in completions]
class Short(Base):
    def of(self, c): return -len(c)
class Judging(Base):
    def __init__(self, key="answer"): self.key = key
rewards = [Short(), Judging()]
steps = {"max_steps": 9, "reward_weights": [1, 2]}
"""
FRAME = """
import pandas as pd
df = pd.read_csv("x.csv")
df = df[df.level > 3].drop_duplicates()
ds = Dataset.from_pandas(df)
"""
# what the script does: its lines; overrides that are printed; beginnings of "# check:" lines
SCRIPTS: dict[str, tuple[str, set[str], tuple[str, ...]]] = {
    "nothing": ("", {"model.path=a/b", "task.path=c/d", "train.steps=9", "eval.problems=0"}, ()),
    # models
    "to": (f"model = {LOAD}.to('cuda')", {"model.path=a/b", "model.dtype=float32"}, ()),
    "cuda, train": (f"model = {LOAD}.cuda().train()", {"model.path=a/b"}, ()),
    "moved later": (f"model = {LOAD}\nmodel = model.to('cuda')", {"model.path=a/b"}, ()),
    "by name": (
        "model = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=NAME)",
        {"model.path=a/b"},
        (),
    ),
    "a function's": (
        f"def load(name):\n    return {LOAD.replace('NAME', 'name')}, 1\nmodel, _ = load('e/f')",
        {"model.path=e/f"},
        ("the tokenizer is that of a/b",),
    ),
    "a condition's": (
        f"if BIG:\n    model = {LOAD}\nelse:\n    model = AutoModelForCausalLM.from_pretrained('e/f')",
        {"model.path=e/f"},
        ("the tokenizer is that of a/b", "model depends on a condition"),
    ),
    "unknown": ("model = load_my_model()", {"model=???"}, ("model=model",)),
    "an attribute": ("class C: name = 'a/b'\nmodel = C.name", {"model=???"}, ("model=model",)),
    "of TRL's parser": (
        "m = ModelConfig(model_name_or_path=NAME, use_peft=True, lora_r=8)\nmodel = m.model_name_or_path",
        {"model.path=a/b", "model.lora.rank=8"},
        (),
    ),
    # tokenizers
    "template": ("tokenizer.chat_template = 'x'", {"model.path=a/b"}, ("chat_template=tokenizer.chat_template = 'x'",)),
    "eos": ("tokenizer.eos_token = '<|im_end|>'", set(), ("eos_token=",)),
    "added": (
        "tokenizer.add_tokens(['<a>'])\ntokenizer.add_special_tokens({})",
        set(),
        ("add_tokens=", "add_special_tokens="),
    ),
    "resize": (f"model = {LOAD}\nmodel.resize_token_embeddings(len(tokenizer))", set(), ("resize_token_embeddings=",)),
    "argument": ("tokenizer = AutoTokenizer.from_pretrained(NAME, eos_token='</s>')", set(), ("eos_token=",)),
    "unsloth's": ("tokenizer = get_chat_template(tokenizer, chat_template='x')", set(), ("get_chat_template=",)),
    "chat format": (
        f"model, tokenizer = setup_chat_format({LOAD}, tokenizer)",
        {"model=???"},
        ("model=model", "setup_chat_format="),
    ),
    "another's": ("tokenizer = AutoTokenizer.from_pretrained('e/f')", set(), ("the tokenizer is that of e/f",)),
    "other attribute": ("tokenizer.add_bos_token = False", set(), ("add_bos_token=",)),
    "padding": ("tokenizer.pad_token = tokenizer.eos_token\ntokenizer.padding_side = 'left'", set(), ()),
    # data
    "filter": ("ds = ds.filter(lambda r: r['x'])", {"task.path=c/d"}, ("train_dataset.filter=",)),
    "shuffle": ("ds = ds.shuffle(seed=1)", {"task.path=c/d"}, ()),
    "shuffle, select": (
        "ds = ds.shuffle().select(range(9))",
        set(),
        ("train_dataset.shuffle=", "train_dataset.select="),
    ),
    "batched": ("ds = ds.map(f, batched=True)", set(), ("train_dataset.map=",)),
    "in a loop": (
        "ds = load_dataset('c/d')\nfor s in ds:\n    ds[s] = ds[s].filter(f)\nds = ds['train']",
        {"task.split=train"},
        ("train_dataset.filter=",),
    ),
    "in place": ("ds.set_transform(f)", set(), ("train_dataset.set_transform=",)),
    "a function of it": (
        "def prepare(d): return d.filter(f)\nds = prepare(ds)",
        {"task.path=c/d"},
        ("train_dataset.filter=",),
    ),
    "two": (
        "a = load_dataset('c/d').map(f)\nds = concatenate_datasets([a, ds])",
        {"task=???", "model.path=a/b"},
        ("train_dataset=concatenate_datasets", "train_dataset.map="),
    ),
    "a list": ("ds = Dataset.from_list([])", {"task=???"}, ("train_dataset=",)),
    "a name that is not read": ("ds = load_dataset(PATH)", {"task=???"}, ("train_dataset=",)),
    "in two": (
        "parts = ds.train_test_split(0.1)\nds = parts['train']",
        {"task.split=train"},
        ("train_dataset.train_test_split=",),
    ),
    "two at once": (
        "parts = ds.train_test_split(0.1)\nds, rest = parts['train'], parts['test']",
        {"task.path=c/d", "task.split=train"},
        ("train_dataset.train_test_split=",),
    ),
    "pandas": (
        FRAME,
        {"task=???"},
        ("train_dataset=Dataset.from_pandas(df)", "train_dataset.drop_duplicates="),
    ),
    "pandas beside it": (
        "import pandas\nlog = pandas.DataFrame()\nlog = log[log.x > 1].sample(9)",
        {"task.path=c/d"},
        (),
    ),
    # steps
    "epochs": ("steps = {}", {"train.steps=???"}, ("num_train_epochs=3",)),
    "steps that are not read": ("steps = {'max_steps': made()}", {"train.steps=???"}, ("max_steps=made()",)),
    "steps that are changed": ("N = 9\nN += 1\nsteps = {'max_steps': N}", {"train.steps=???"}, ("max_steps=N",)),
    "a sum, or": ("N = None\nsteps = {'max_steps': (N or 8) + 1}", {"train.steps=9"}, ()),
    # rewards
    "format first": (f"{FORMAT}rewards = [format_reward, correct]", {"eval.reward=correct"}, ()),
    "length first": (f"{LENGTH}rewards = [reward_len, correct]", {"eval.reward=correct"}, ()),
    "short names": ("def fmt(**kw): ...\ndef acc(**kw): ...\nrewards = [fmt, acc]", {"eval.reward=acc"}, ()),
    "format alone": (f"{FORMAT}rewards = format_reward", set(), ("eval.reward=format_reward",)),
    "no name says": ("def a(**kw): ...\ndef b(**kw): ...\nrewards = [a, b]", {"eval.reward=a"}, ("eval.reward=a",)),
    "a column says": (
        "def a(completions, **kw): ...\ndef b(completions, truth, **kw): ...\nrewards = [a, b]",
        {"eval.reward=b"},
        (),
    ),
    "an argument says": (
        "def a(completions, **kw): ...\ndef b(completions, **kw): return kw['gold_label']\nrewards = [a, b]",
        {"eval.reward=b"},
        (),
    ),
    "two columns": (
        "def a(completions, truth, **kw): ...\ndef b(completions, target, **kw): ...\nrewards = [a, b]",
        {"eval.reward=a"},
        ("eval.reward=a",),
    ),
    "shape with a column": (
        "def tags(completions, answer, **kw): ...\ndef b(completions, answer, **kw): ...\nrewards = [tags, b]",
        {"eval.reward=b"},
        (),
    ),
    "classes": (
        CLASSES,
        {"eval.reward=judging_19", "reward.judging_19.weight=2"},
        (),
    ),
    "made in place": (
        "import functools\nrewards = [functools.partial(correct, a=1), functools.partial(correct), lambda **kw: [0]]",
        {"reward=[train_rewards.py:partial_13_11,train_rewards.py:partial_13_44,train_rewards.py:lambda_13_72]"},
        ("eval.reward=partial_13_11",),
    ),
    "state": (
        "def correct(completions, **kw): return kw.get('trainer_state')",
        set(),
        ("correct reads trainer_state",),
    ),
    "state's entry": (
        "def correct(completions, **kw): return kw['trainer_state']",
        set(),
        ("correct reads trainer_state",),
    ),
    "none": ("rewards = load_rewards", {"reward=???"}, ("reward_funcs=",)),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_command_is_right_or_names_what_it_leaves_out(what: str, tmp_path: Path) -> None:
    lines, wanted, checks = SCRIPTS[what]
    (tmp_path / "train.py").write_text(f"{HEAD}{lines}{TAIL}")
    text = shell_script(ported(tmp_path / "train.py")[0])
    chosen = shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)
    assert wanted <= set(chosen)
    said = [line.removeprefix("# check: ") for line in text.splitlines() if line.startswith("# check: ")]
    said = [one for one in said if not one.startswith(("train_rewards.py", "this assumes", "prompts over"))]
    assert len(said) == len(checks), said
    assert all(any(one.startswith(check) for one in said) for check in checks), said


def test_evaluation_on_the_training_data_is_named(tmp_path: Path) -> None:
    loaded = "ds = load_dataset('json', data_files={'train': 'd.jsonl'}, split='train[:9]')\n"
    tail = TAIL.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds.select(range(3))")
    (tmp_path / "train.py").write_text(f"{HEAD}{loaded}{tail}")
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
    cells = [MAGIC, "%%bash\nls -l", "%%writefile x.py\nGRPOConfig('other')", HEAD, TAIL]
    written = [{"cell_type": "code", "source": one.splitlines(keepends=True)} for one in cells]
    notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": ["# GRPO"]}, *written]})
    (tmp_path / name).write_text(notebook if name.endswith("ipynb") else f"{MAGIC}{HEAD}{TAIL}")
    port, functions = ported(tmp_path / name)
    assert (port.value("model.path"), port.value("train.steps"), port.value("task.path")) == ("a/b", 9, "c/d")
    compile(functions, name, "exec")
    assert "def correct(" in functions


@pytest.mark.parametrize("key", ["model", "task", "reward", "train.steps"])
def test_a_choice_that_is_left_to_the_reader_stops_the_command(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_run(compose([f"{key}=???"]))
    assert raised.value.key == key
