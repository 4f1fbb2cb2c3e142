"""Missing files, packages and servers are reported before torch, a model or a server is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpocli.config.user_code import check_exists
from grpocli.errors import ConfigError

REWARDS = """\
import torch  # must not be imported to answer
print("imported")

def accuracy(completions, **kwargs): ...

class Board: ...

other = accuracy
"""
BROKEN = "import torch\n\ndef accuracy(completions:\n    return []\n"

FUNCTION = "reward=[python] reward.python.function="
CASES = {
    FUNCTION + "missing.py:f": "missing.py: there is no such file",
    FUNCTION + "reward.py:accuracy": 'reward.py: there is no such file; did you mean "rewards.py"?',
    FUNCTION + "rewards.py:acuracy": 'rewards.py has no function or class acuracy; did you mean "accuracy"?',
    FUNCTION + "broken.py:accuracy": "raised SyntaxError: '(' was never closed (broken.py:3: def ",
    FUNCTION + "no_such_module:f": "No module named 'no_such_module'",
    "task=calculator task.environment.name=rewards.py:Bord": 'has no function or class Bord; did you mean "Board"?',
    "task=jsonl task.path=rows.jsonl task.processor=rewards.py:convert": "rewards.py has no function or class convert",
    "task=jsonl task.path=nothing.jsonl": "task.path=nothing.jsonl: there is no such file or folder",
    "task=jsonl task.path=rows.jsonl task.eval_path=./held": "task.eval_path=./held: there is no such file or folder",
    "task=[arithmetic,jsonl] task.jsonl.path=nothing.jsonl": "task.jsonl.path=nothing.jsonl: there is no such file",
    "model=hf model.path=./nowhere": "model.path=./nowhere: there is no such folder",
    "model=hf model.path=./empty": "/empty: the folder has no config.json",
    "reward=[model] reward.model.path=./nowhere": "reward.model.path=./nowhere: there is no such folder",
    "engine=vllm": "engine=vllm: vLLM is not installed; in a clone of grpocli, pip install '.[vllm]'",
    "engine=vllm_colocate": "engine=vllm_colocate: vLLM is not installed",
    "engine=vllm engine.base_url=http://127.0.0.1:9": "http://127.0.0.1:9: no vLLM server answers there",
    "hardware.parallel=zero2": "hardware.parallel=zero2: needs DeepSpeed, which is not installed",
    "tracker=wandb": "tracker=wandb: it is not installed: pip install wandb",
    "task=reasoning_gym task.name=chain_sum reward=[reasoning_gym]": "needs the library reasoning-gym",
    "model.lora.rank=4": "model.lora.rank=4: needs peft, which is not installed",
    "task=calculator task.tools=calculator": "task.tools=calculator: must be a list; write task.tools=[calculator]",
    "callbacks=cb.py:Log": "cb.py:Log]",
    'task.environment.stop="</s>"': "must be a list; write 'task.environment.stop=[\"</s>\"]'",
    "task=calculator task.environment.env=[NOPE_KEY]": "[NOPE_KEY]: this environment variable is not set: export it",
    "--config-dir nowhere": "--config-dir=nowhere: there is no such folder",
}

PROGRAM = """\
import importlib.util, json, sys
absent = {"vllm", "deepspeed", "wandb", "reasoning_gym", "peft"}
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in absent else found(name, package)
from grpocli.cli import run
from grpocli.errors import ConfigError
said = {}
for line in json.loads(sys.argv[1]):
    try:
        run([*sys.argv[2:], *line.split()])
    except ConfigError as error:
        said[line] = str(error)
heavy = {"torch", "transformers", "vllm", "datasets", "accelerate", "pyarrow"} & set(sys.modules)
print(json.dumps([said, sorted(heavy)]))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    (tmp_path / "empty").mkdir()
    return tmp_path


def answers(command: str, lines: list[str]) -> dict[str, str]:
    """The error of a command for each list of overrides, all in one process without heavy imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, heavy = json.loads(done.stdout)  # no other output: the user's code has not run
    assert heavy == []
    return dict(said)


@pytest.mark.processes
def test_missing_things_are_reported_before_heavy_imports(here: Path) -> None:
    said = answers("train", list(CASES))
    for line, sentence in CASES.items():
        assert sentence in said.get(line, "nothing"), line
    assert sorted(path.name for path in here.iterdir()) == ["broken.py", "empty", "rewards.py", "rows.jsonl"]


@pytest.mark.survival
@pytest.mark.processes
def test_other_commands_check_too(here: Path) -> None:
    for command in ("eval", "reward-check"):
        reward, *_ = lines = [line for line in CASES if "missing.py" in line or line.startswith("task=jsonl")]
        said = answers(command, lines)
        assert "there is no such file" in said[reward]
        assert list(said) == lines
    assert "vLLM is not installed" in answers("vllm-serve", ["port=0"])["port=0"]


@pytest.mark.parametrize("name", ["accuracy", "Board", "other", "torch"])
def test_every_way_to_define_a_name_is_found(here: Path, name: str) -> None:
    check_exists(f"rewards.py:{name}", "key")
    check_exists(f"rewards:{name}", "key")


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals()['hid' + 'den'] = print",
        "if True:\n    def hidden(): ...",
        "try:\n    import x as hidden\nexcept ImportError:\n    hidden = None",
        "for hidden in ():\n    pass",
        "(hidden, other) = 1, 2",
        "def f():\n    global hidden\n    hidden = 1\nf()",
    ],
)
def test_a_name_that_an_import_may_define_is_accepted(here: Path, source: str) -> None:
    (here / "strange.py").write_text(source)
    check_exists("strange.py:hidden", "key")
    (here / "plain.py").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"key=plain\.py:hidden: plain\.py has no function or class hidden"):
        check_exists("plain.py:hidden", "key")
