"""The reward and dataset functions of a script that trains when it is imported work from their own file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.config.user_code import load

Command = Callable[..., tuple[int, str, str]]
SCRIPT = '''
from __future__ import annotations
import re
from functools import partial
from datasets import load_dataset
try:
    import nowhere
except ImportError:
    nowhere = None
from trl import GRPOConfig, GRPOTrainer
open("MARKER", "w")
SYSTEM = """Answer
  in digits."""
POINTS = {"right": 1.0}
POINTS["wrong"] = -1.0
tokenizer = AutoTokenizer.from_pretrained("a/b")

def digits(text):
    return re.findall(r"\\d+", text)

def load_rows(split="train"):
    rows = load_dataset("json", data_files="DATA", split=split)
    return rows.map(lambda row: {"prompt": SYSTEM + row["q"], "wanted": digits(row["a"])[0]})

def scaled(completions, scale, **kwargs):
    return [scale * len(c) for c in completions]

if __name__ == "__main__":
    BONUS = 0.5

    # the answer is right
    def right(completions, gold, **kwargs):
        """Points.

            An indented line.
        """
        return [POINTS["right" if g in digits(c) else "wrong"] + BONUS for c, g in zip(completions, gold)]

    def short(completions, **kwargs):
        return [1.0 / (1 + len(tokenizer.encode(c))) for c in completions]

    data = load_rows().rename_column("wanted", "gold").remove_columns(["q", "a"]).shuffle(seed=1)
    GRPOTrainer("a/b", [right, partial(scaled, scale=2.0), short], GRPOConfig("out", max_steps=3), data).train()
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "1+1?", "a": "It is 2"}) + "\n" + '{"q": "2+2?", "a": "4"}\n')
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("DATA", "rows.jsonl"))
    return file


def test_the_functions_of_a_script_run_from_their_file(script: Path, tmp_path: Path, grpocli: Command) -> None:
    code, text, _ = grpocli("from-trl", str(script), "--rewards", "own.py")
    assert code == 0
    assert not (tmp_path / "MARKER").exists()
    row = load(f"{tmp_path}/own.py:to_example", "task.processor")({"q": "1+1?", "a": "It is 2"})
    assert row == {"prompt": "Answer\n  in digits.1+1?", "gold": "2"}
    right = load(f"{tmp_path}/own.py:right", "reward")
    assert right(completions=["2", "3"], gold=["2", "2"]) == [1.5, -0.5]
    assert "# the answer is right" not in right.__doc__
    assert "            An indented line." in (tmp_path / "own.py").read_text()
    assert (
        "# check: own.py lacks what could not be moved: tokenizer (line 16) is made with from_pretrained(...)" in text
    )
    assert "# nothing to set: train_dataset.shuffle=" in text
    made = next(word for word in text.split("own.py:") if word.startswith("partial_"))
    scaled = load(f"{tmp_path}/own.py:{made.partition(',')[0]}", "reward")
    assert scaled(completions=["ab"]) == [4.0]


def test_the_printed_command_builds_a_run(script: Path, tmp_path: Path, grpocli: Command) -> None:
    code, text, _ = grpocli("from-trl", str(script), "--out", "recipe/mine.yaml")
    assert code == 0
    assert (tmp_path / "recipe" / "mine_rewards.py").is_file()
    chosen = shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)
    chosen = [one for one in chosen if not one.startswith(("model", "hydra."))]
    run = build_run(compose([*chosen, "model=tiny"]))
    assert run.task.processor.endswith("mine_rewards.py:to_example")
    assert next(iter(run.reward)) == "right"
    assert not (tmp_path / "MARKER").exists()


def test_the_command_without_the_file_never_imports_the_script(script: Path, tmp_path: Path, grpocli: Command) -> None:
    code, text, _ = grpocli("from-trl", str(script))
    assert code == 0
    assert "reward=[train_rewards.py:right" in text
    assert "train.py:right" not in text
    assert "--rewards train_rewards.py moves the functions of train.py there" in text


def test_an_existing_file_stays(script: Path, tmp_path: Path, grpocli: Command) -> None:
    (tmp_path / "own.py").write_text("mine = 1\n")
    code, out, err = grpocli("from-trl", str(script), "--rewards", "own.py")
    assert (code, out) == (2, "")
    assert "exists already" in err
    assert (tmp_path / "own.py").read_text() == "mine = 1\n"


def test_steps_that_one_row_cannot_repeat_are_named(script: Path, grpocli: Command) -> None:
    script.write_text(
        "from trl.rewards import accuracy_reward\n"
        "data = load_dataset('c/d').filter(lambda row: row['ok']).map(f, batched=True)\n"
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(), data)\n"
    )
    code, text, _ = grpocli("from-trl", str(script))
    assert code == 0
    assert "# check: train_dataset.filter=" in text
    assert "write task.processor=FILE.py:NAME, a function that returns the whole row with `prompt`" in text


def test_a_model_that_is_wrapped_over_several_lines_is_read(script: Path, grpocli: Command) -> None:
    script.write_text(
        "model, tokenizer = FastLanguageModel.from_pretrained(\n    model_name='a/b', load_in_4bit=True)\n"
        "model = FastLanguageModel.get_peft_model(\n    model,\n    r=4,\n    use_gradient_checkpointing='unsloth')\n"
        "GRPOTrainer(model, accuracy_reward, GRPOConfig('out'), load_dataset('c/d'))\n"
    )
    code, text, _ = grpocli("from-trl", str(script))
    assert code == 0
    assert "model.path=a/b" in text
    assert "model.lora.rank=4" in text
    assert "model.quantization=nf4" in text


def test_a_scripts_own_arguments(script: Path, grpocli: Command) -> None:
    script.write_text(
        "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "GRPOTrainer(model_args.model_name_or_path, accuracy_reward, training_args, load_dataset('c/d'))\n"
    )
    words = ["--model_name_or_path", "a/b", "--learning_rate", "1e-5", "--use_peft", "--lora_target_modules", "q,", "v"]
    code, text, _ = grpocli("from-trl", str(script), "--", *words)
    assert code == 0
    assert "model.path=a/b" in text
    assert "optim.lr=1e-05" in text
    assert "'model.lora.target_modules=[q,v]'" in text
    assert "from its command line" not in text
    code, text, _ = grpocli("from-trl", str(script))
    assert "give the arguments after `--`" in text
    code, _, err = grpocli("from-trl", str(script), "--", "1e-5")
    assert code == 2
    assert "must be --NAME" in err
