"""`grpocli from-trl` reads literals and constants of four calls, and names the rest; rewards get their own file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from composed import refused
from porting.printed import checks, overrides, printed

from grpocli.composition.compose import build_run, compose
from grpocli.composition.overrides import from_command_line
from grpocli.config.user_code import load
from grpocli_tools.porting.from_trl_command import ported

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
LATER = TAIL.replace("\nGRPOTrainer", "\nconfig.learning_rate = 1e-5\nGRPOTrainer")
ITS_OWN = "ds = load_dataset('json', data_files={'train': 'd.jsonl'}, split='train[:9]')\n"
# what the script does: the parts' lines; overrides that are printed; beginnings of "# check:" lines
SCRIPTS: dict[str, tuple[dict[str, str], set[str], tuple[str, ...]]] = {
    "nothing": ({}, {"model.path=a/b", "task.path=c/d", "task.split=train", "train.steps=9", "eval.problems=0"}, ()),
    "a loaded model": (
        {"model": "model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32, device_map='auto')\n"},
        {"model.path=a/b", "model.dtype=float32"},
        (),
    ),
    "an unknown model": ({"model": "model = load_my_model()\n"}, {"model=???"}, ("model=model",)),
    "mapped rows": (
        {"ds": PARTS["ds"] + "ds = ds.map(f)\n"},
        {"task.path=c/d", "task.split=train"},
        ("train_dataset=ds (line",),
    ),
    "epochs": ({"steps": "steps = {}\n"}, {"train.steps=???"}, ("num_train_epochs=3",)),
    "a call": ({"steps": "steps = {'max_steps': made()}\n"}, {"train.steps=???"}, ("num_train_epochs=3", "**steps=")),
    "format first": (
        {"rewards": "def shape(completions, **kw): return [1.0]\nrewards = [shape, correct]\n"},
        {"eval.reward=correct"},
        (),
    ),
    "a setting that is changed later": ({"tail": LATER}, set(), ("learning_rate=config.learning_rate",)),
    "evaluation on the training data": (
        {"ds": ITS_OWN, "tail": TAIL.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds")},
        {"task.path=d.jsonl"},
        ("eval_dataset=d.jsonl",),
    ),
    "a registry": ({"rewards": "rewards = [R[one] for one in NAMES]\n"}, {"reward=???"}, ("reward_funcs=",)),
    "a lambda": (
        {"rewards": "rewards = [correct, lambda **kw: [0]]\n"},
        {"reward=[train_rewards.py:correct]"},
        ("reward_funcs=lambda",),
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_command_is_right_or_names_what_it_leaves_out(what: str, tmp_path: Path) -> None:
    changed, wanted, expected = SCRIPTS[what]
    text = printed(tmp_path / "train.py", "".join([HEAD, *(PARTS | {"tail": TAIL} | changed).values()]))
    assert wanted <= set(overrides(text))
    said = checks(text)
    assert len(said) == len(expected), said
    assert all(one.startswith(check) for one, check in zip(said, expected, strict=True)), said


MAGIC = "%%capture\n!pip install trl \\\n    datasets\nif True:\n    !nvidia-smi\n%cd /content\n"


@pytest.mark.parametrize("name", ["colab.py", "colab.ipynb"])
def test_a_notebook_is_read(name: str, tmp_path: Path) -> None:
    cells = [MAGIC, "%%bash\nls -l", "%%writefile x.py\nGRPOConfig('other')", HEAD, "".join(PARTS.values()), TAIL]
    written = [{"cell_type": "code", "source": one.splitlines(keepends=True)} for one in cells]
    notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": ["# GRPO"]}, *written]})
    script = "".join([MAGIC, *cells[3:]])
    (tmp_path / name).write_text(notebook if name.endswith("ipynb") else script)
    port, functions = ported(tmp_path / name)
    assert (port.value("model.path"), port.value("train.steps"), port.value("task.path")) == ("a/b", 9, "c/d")
    compile(functions, name, "exec")
    assert "def correct(" in functions


SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this script must never run")
def correct(completions, answer, **kw): return [1.0 for c in completions]
data = load_dataset("openai/gsm8k", "main", split="train").map(prompt)
args = GRPOConfig("out", learning_rate=LR(), num_generations=8, per_device_train_batch_size=4,
                  gradient_accumulation_steps=8, steps_per_generation=16, num_iterations=2, max_steps=100, SETTINGS)
GRPOTrainer(model="a/b", reward_funcs=[correct], args=args, train_dataset=data).train()
"""
# settings: overrides that are printed
VARIANTS: dict[str, set[str]] = {
    "beta=0.04": {"algorithm.kl.beta=0.04"},
    "loss_type='dr_grpo', scale_rewards=False": {"algorithm/aggregate=constant", "algorithm/advantage=center"},
    "loss_type='bnpo'": {"algorithm.aggregate.scope=micro_batch"},
    "loss_type='luspo', importance_sampling_level='sequence'": {"algorithm.objective.level=sequence"},
    "loss_type='cispo', epsilon_high=5.0": {"algorithm.objective.high=4.0", "algorithm/aggregate=token_mean"},
    "loss_type='sapo', beta=0.001": {"algorithm/objective=sapo"},
    "loss_type='vespo'": {"algorithm=grpo"},
    "epsilon_high=0.28, delta=1.5, off_policy_mask_threshold=0.5, top_entropy_quantile=0.2, entropy_coef=0.01": {
        "algorithm.objective.high=0.28"
    },
    "use_vllm=True, vllm_gpu_memory_utilization=0.4": {"engine=vllm_colocate"},
    "use_vllm=True, vllm_mode='server', vllm_importance_sampling_mode='token_mask'": {"engine=vllm"},
    "max_completion_length=16384, warmup_ratio=0.1, lr_scheduler_type='cosine', bf16=True": {
        "model.dtype=bfloat16",
        "optim.warmup_steps=10",
    },
    "model_init_kwargs={'dtype': 'float16'}": {"model.dtype=float16"},
}


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_scripts_overrides_compose_and_build(settings: str, tmp_path: Path) -> None:
    text = printed(tmp_path / "train.py", SCRIPT.replace("SETTINGS", settings))
    assert VARIANTS[settings] <= set(overrides(text))
    assert any(one.startswith("learning_rate=LR() (line 7): it is not a literal") for one in checks(text))
    chosen = [one for one in overrides(text) if not one.startswith("hydra.")]
    chosen[chosen.index("reward=[train_rewards.py:correct]")] = "reward=[math]"
    run = build_run(compose(chosen))
    assert (run.rollout.prompts_per_step, run.rollout.group_size) == (8, 8)
    assert (run.train.minibatches, run.train.epochs, run.train.steps) == (2, 2, 25)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with scripts, their rows and configs."""
    (tmp_path / "plain.py").write_text(
        "def short(completions, **kwargs): return [1.0 for text in completions]\n"
        'config = GRPOConfig("out", num_generations=4, num_train_epochs=2, generation_kwargs={"stop": ["\\n\\n"]})\n'
        'rows = load_dataset("json", data_files="rows.jsonl", split="train")\n'
        'GRPOTrainer("a/b", short, config, rows).train()\n'
    )
    (tmp_path / "parsed.py").write_text(
        "from trl.rewards import accuracy_reward\n"
        "script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse()\n"
        "GRPOTrainer(model_args.model_name_or_path, accuracy_reward, training_args,\n"
        "            load_dataset(script_args.dataset_name), peft_config=get_peft_config(model_args))\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(12)))
    (tmp_path / "dapo.yaml").write_text(
        "model_name_or_path: a/b\nattn_implementation: eager\ndataset_name: c/d\ncolumn: problem\nmax_steps: 40\n"
        "gradient_accumulation_steps: 2\nsteps_per_generation: 8\nper_device_train_batch_size: 4\nbeta: 0.1\n"
    )
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 6\nnum_machines: 1\nmixed_precision: fp16\n"
        "deepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n  offload_optimizer_device: none\n"
    )
    return tmp_path


def test_the_command_to_try_first_builds_a_run(folder: Path, grpocli) -> None:
    text = grpocli("from-trl", "plain.py", "--rewards", "own.py")[1]
    assert "train.steps=???" in overrides(text)
    command = text.rpartition("# try the data and rewards first: grpocli train ")[2]
    run = build_run(compose(from_command_line(shlex.split(command))))
    assert (list(run.reward), run.train.steps) == (["short"], 2)
    stop = next(one for one in overrides(text) if one.startswith("rollout.stop="))
    assert list(compose(from_command_line([stop])).rollout.stop) == ["\n\n"]
    assert "train.steps=20" in overrides(grpocli("from-trl", "plain.py", "--prompts", "20")[1])  # 2 epochs, 2 a step


PARSED = ["parsed.py", "--", "--model_name_or_path", "a/b", "--learning_rate", "1e-5", "--use_peft"]


@pytest.mark.parametrize(
    ("words", "wanted", "said"),
    [
        (["parsed.py"], {"model=???"}, "give the arguments after `--`"),
        (
            [*PARSED, "--lora_target_modules", "q,", "v"],
            {"model.path=a/b", "optim.lr=1e-05", "model.lora.rank=16", "model.lora.target_modules=[q,v]"},
            "",
        ),
        (
            ["parsed.py", "--", "--config", "dapo.yaml", "--max_steps", "80"],
            {"model.path=a/b", "model.attention=eager", "task.path=c/d", "train.minibatches=4", "train.steps=20"},
            "# check: column=problem: grpocli does not know this setting",
        ),
        (
            ["plain.py", "--accelerate", "zero3.yaml"],
            {"hardware.processes=6", "hardware.parallel=zero3", "rollout.prompts_per_step=12", "model.dtype=float16"},
            "# no counterpart: offload_param_device=cpu",
        ),
    ],
)
def test_arguments_and_configs_are_read(words, wanted: set[str], said: str, folder: Path, grpocli) -> None:
    _, text, _ = grpocli("from-trl", *words, code=0)
    assert wanted <= set(overrides(text))
    assert said in text
    assert ("after `--`" in text) == (words == ["parsed.py"])


def test_a_recipe_is_written_and_only_files_of_from_trl_are_replaced(folder: Path, grpocli) -> None:
    _, text, _ = grpocli("from-trl", "dapo.yaml", "--out", "recipe/mine.yaml", code=0)
    assert "# grpocli train --config-dir . recipe=mine" in text
    config = compose([f"hydra.searchpath=[file://{folder}]", "recipe=mine", "reward=[math]"])
    assert config.algorithm == compose([*overrides(text), "reward=[math]"]).algorithm
    assert build_run(config).algorithm.kl.beta == 0.1
    assert grpocli("from-trl", "dapo.yaml", "--out", "recipe/mine.yaml")[0] == 2
    assert grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml", "--overwrite", "--prompts", "40")[0] == 0
    assert "steps: 40" in (folder / "recipe" / "mine.yaml").read_text()
    (folder / "recipe" / "mine_rewards.py").write_text("mine = 1\n")
    assert grpocli("from-trl", "plain.py", "--out", "recipe/mine.yaml", "--overwrite")[0] == 2


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (b"x = (\n", ["a.py"], "line 1: "),
        (b"x = 1\n", ["a.py"], "has no GRPOConfig(...) and no GRPOTrainer(...)"),
        (b"\xff\xfe", ["a.py"], "is not UTF-8"),
        (b"- 1\n", ["a.yaml"], "is a list, not a mapping"),
        (b"x = " + b"+".join([b"1"] * 30_000), ["a.py"], "nested too deep"),
        (b"a: 1\n", ["a.yaml"], "has no key of TRL"),
        (b"", ["."], ".: cannot be read: Is a directory"),
        (b"", ["zero3.yaml"], "give the script, and --accelerate zero3.yaml beside it"),
        (b"", ["plain.py", "--accelerate", "dapo.yaml"], "is not a config of accelerate"),
        (b"", ["plain.py", "--rewards", "rows.jsonl"], "exists already"),
        (b"", ["dapo.yaml", "--out", "mine.yaml"], "write --out recipe/mine.yaml"),
        (b"", ["parsed.py", "--", "1e-5"], "must be --NAME"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(content: bytes, words, said: str, folder: Path, grpocli) -> None:
    if content:
        (folder / words[0]).write_bytes(content)
    code, out, err = grpocli("from-trl", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


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


def test_the_functions_of_a_script_run_from_their_file(folder: Path, grpocli) -> None:
    (folder / "train.py").write_text(WHOLE)
    text = grpocli("from-trl", "train.py")[1]
    assert "reward=[train_rewards.py:right,train_rewards.py:short]" in overrides(text)
    assert "--rewards train_rewards.py moves the functions of train.py there" in text
    _, text, _ = grpocli("from-trl", "train.py", "--out", "recipe/mine.yaml", code=0)
    own = folder / "recipe" / "mine_rewards.py"
    assert load(f"{own}:right", "reward")(completions=["2", "3"], gold=["2", "2"]) == [1.0, -1.0]
    assert "\n        An indented line." in own.read_text()
    assert "mine_rewards.py lacks tokenizer (line 12), which a call makes; define it there" in text
    assert not (folder / "MARKER").exists()
    chosen = [one for one in overrides(text) if not one.startswith(("model", "hydra."))]
    run = build_run(compose([*chosen, "model=tiny"]))
    assert list(run.reward) == ["right", "short"]


def test_a_number_that_trains_nothing_is_left_out(tmp_path: Path) -> None:
    for given, shown in (("many", "many"), (".nan", "nan")):
        text = printed(tmp_path / "a.yaml", f"max_steps: {given}\n")
        assert f"# check: max_steps={shown}: it is not a finite number" in text
        assert shown not in "".join(overrides(text))


@pytest.mark.parametrize("key", ["model", "task", "reward", "train.steps"])
def test_a_choice_that_is_left_to_the_reader_stops_the_command(key: str) -> None:
    with refused(key):
        build_run(compose([f"{key}=???"]))
