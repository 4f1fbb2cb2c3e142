"""A config that cannot work is refused with the key, before anything heavy is imported or a folder is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from composed import refused
from tables import table

from grpocli.composition.checks import check_composed, check_devices, check_files
from grpocli.composition.compose import build_run, compose
from grpocli.composition.overrides import from_command_line
from grpocli.composition.resume import Resume
from grpocli.errors import ConfigError
from grpocli.rollout.vllm.engine_parts import Vllm

BAD = [
    # choices and keys
    ("algorithm=gpro", "algorithm"),
    ("reward=[[number,math]]", "reward=[[number,math]]"),
    ("task.system_prompt=Be_nice,_please", "task.system_prompt"),
    ("task=[arithmetic,calculator] task.arithmetic=3", "task.arithmetic"),
    ("train.steps=many", "train.steps"),
    ("train.steps = 5", "train.steps"),
    ("task.prompt_template={a}", "task.prompt_template={a}"),
    ("resume=/nonexistent", "resume=/nonexistent"),
    ("task=jsonl", "task.path"),
    # a part alone
    ("rollout.temperature=0", "rollout.temperature"),
    ('rollout.stop=[a,""]', "rollout.stop"),
    ("eval.stop_at.metric=accuracy", "eval.stop_at.metric"),
    # sampling and training
    ("rollout.group_size=1", "rollout.group_size"),
    ("algorithm=sft rollout.group_size=8", "rollout.group_size"),
    ("train.minibatches=1000", "train.minibatches"),
    ("train.micro_batch_tokens=8", "train.micro_batch_tokens"),
    ("engine=vllm rollout.max_staleness=1 algorithm=dapo algorithm.keep.surplus=carry", "rollout.max_staleness"),
    ("engine=transformers rollout.regex=a", "rollout.regex"),
    ("optim.schedule=cosin", "optim.schedule"),
    # engine and hardware
    ("engine=vllm rollout.temperature=2.5", "rollout.temperature"),
    ("engine=vllm hardware.processes=2 engine.max_restarts=3", "hardware.timeout"),
    ("engine=transformers hardware.parallel=zero3", "hardware.parallel"),
    ("engine=vllm hardware.parallel=zero3 model.lora.rank=4", "hardware.parallel"),
    ("model.quantization=nf4", "model.quantization"),
    ("optim=adamw_8bit hardware.parallel=fsdp2", "optim"),
    ("hardware.context_parallel=2 hardware.processes=3", "hardware.context_parallel"),
    ("hardware.processes=200 rollout.prompts_per_step=4", "rollout.prompts_per_step"),
    ("hardware=multinode engine=transformers", "hardware.rollout_nodes"),
    ("hardware=multinode engine=vllm", "hardware.devices_per_node"),
    # rewards, tasks and evaluation
    ("reward=[]", "reward"),
    ("eval.reward=fluency", "eval.reward"),
    ("task=[arithmetic,calculator] task.arithmetic.rewards=[nope]", "task.arithmetic.rewards"),
    ("reward=[kimi_length,exact_match]", "reward"),
    ("reward=[exact_match,length_penalty] reward.length_penalty.reward=exact", "reward.length_penalty.reward"),
    ("reward=[environment]", "reward"),
    ("algorithm=dgpo reward.exact_match.wrong=-1", "reward.exact_match"),
    ("algorithm=sft task=calculator task.environment.name=a:b reward=none", "task.environment.name"),
    ("task.order=difficulty", "task.difficulty_column"),
    ("eval.every=5 eval.stop_at.metric=pass@8 eval.stop_at.threshold=0.9", "eval.stop_at.metric"),
    # distillation
    ("algorithm=opd algorithm.kl.model=tiny-teacher algorithm.kl.beta=0", "algorithm/advantage"),
    ("algorithm=opd algorithm.kl.model={gsm8k:tiny-teacher}", "algorithm.kl.model"),
    ("algorithm=opd", "algorithm/advantage"),
    ("algorithm=opd algorithm.kl.model=tiny-teacher algorithm/keep=dynamic", "algorithm/advantage"),
    ("algorithm=opd algorithm.kl.model=x algorithm.kl.sync_every=2", "algorithm.kl.sync_every"),
    ("engine=fake rollout.max_staleness=1", "rollout.max_staleness"),
    ("task.tools=[calculater]", "task.tools"),
    # parts of an algorithm, and parts that do not fit together
    ("algorithm.objective.dual=0.5", "algorithm.objective.dual"),
    ("algorithm.objective.level=tokens", "algorithm.objective.level"),
    ("algorithm=dapo algorithm.keep.reward=style", "algorithm.keep.reward"),
    ("rollout.order=random", "rollout.order"),
    ("engine=vllm hardware.parallel=zero3 algorithm.kl.sync_every=2", "hardware.parallel"),
    ("hardware.context_parallel=2 rollout.repetition_penalty=2", "hardware.context_parallel"),
    ("reward=[exact_match,tools]", "reward"),
    ("rollout.group_size=99999999999", "rollout.prompts_per_step"),
]
UNKNOWN = [
    ("train.setps=3", '"train.steps"'),
    ("lr=3", '"optim.lr"'),
    ("run.dir=runs/mine", '"hydra.run.dir"'),
    ("algoritm=grpo", '"algorithm"'),
    ("+train.nonsense=1", "train.nonsense"),
    ("reward.exact_match.wieght=2", '"reward.exact_match.weight"'),
    ("reward.format.weight=0.2", "belongs to reward=[format]"),
    ("task=[arithmetic,calculator] task.path=a", "belongs to task=code or"),
    ("algorithm=dapo algorithm.kl.beta=0.1", "belongs to algorithm/kl=k1 or k2 or k3 or reverse"),
    ("engine=vllm engine.vllm_args.scheduling_policy=fcfs", "grpocli sets this itself"),
    ("recipe=dapo-small algorithm/keep=all", "algorithm.keep.reward"),
]


def checked(override: str) -> None:
    """What `grpocli train` checks before it makes a folder."""
    given = from_command_line(override.split(" "))
    Resume.requested(given)
    check_files(build_run(compose(given)), training=True)


@pytest.mark.parametrize(("override", "key"), table(BAD, fast=12))
def test_a_bad_value_is_refused_with_its_key(override: str, key: str) -> None:
    with refused(key):
        checked(override)


@pytest.mark.parametrize(("override", "said"), table(UNKNOWN, fast=3))
def test_an_unknown_key_gets_the_nearest_name_or_its_choice(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(override)
    assert said in str(refused.value)


def test_a_bad_config_is_one_line_with_exit_code_2_and_no_folder(grpocli, tmp_path: Path) -> None:
    _, out, err = grpocli("train", f"hydra.run.dir={tmp_path}/run", "train.minibatches=1000", code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("grpocli: error: train.minibatches=1000: must be at most rollout.prompts_per_step")
    assert not (tmp_path / "run").exists()


def test_what_a_config_leaves_open_is_checked_with_the_devices() -> None:
    run = build_run(compose(["hardware=multinode", "hardware.rollout_nodes=0", "engine=auto"]))
    with refused("hardware.rollout_nodes"):
        check_devices(run, Vllm(), 8)
    run = build_run(compose(["train.data_epochs=1", "rollout.prompts_per_step=1"]))
    check_composed(run)
    with refused("rollout.prompts_per_step"):
        check_devices(run, run.engine, 1000)


@pytest.mark.parametrize("text", ["train:\n  steps: [1\n", "seed: \udcff", "seed: ${nope", "seed: 1\nseed: 2\n"])
def test_a_broken_recipe_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    file = tmp_path / "recipe" / "mine.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with refused(str(file)):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine"])


FUNCTION = "reward=[python] reward.python.function="
MISSING = {
    FUNCTION + "missing.py:f": "reward.python.function",
    FUNCTION + "rewards.py:acuracy": "reward.python.function",
    FUNCTION + "broken.py:accuracy": "reward.python.function",
    FUNCTION + "no_such_module:f": "reward.python.function",
    "task=calculator task.environment.name=rewards.py:Bord": "task.environment.name",
    "task=jsonl task.path=rows.jsonl task.processor=rewards.py:convert": "task.processor",
    "task=jsonl task.path=nothing.jsonl": "task.path",
    "task=[arithmetic,jsonl] task.jsonl.path=nothing.jsonl": "task.jsonl.path",
    "model=hf model.path=./nowhere": "model.path",
    "model=hf model.path=./empty": "model.path",
    "reward=[model] reward.model.path=./nowhere": "reward.model.path",
    "engine=vllm": "",
    "engine=vllm_colocate": "",
    "hardware.parallel=zero3 engine=vllm": "hardware.parallel",
    "tracker=wandb": "tracker",
    "task=reasoning_gym task.name=chain_sum reward=[reasoning_gym]": "task",
    "model.lora.rank=4": "model.lora.rank",
    "callbacks=[cb.py:Log]": "callbacks",
    "task=calculator task.environment.env=[NOPE_KEY]": "task.environment.env",
    "--config-dir nowhere": "--config-dir",
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
        said[line] = error.key
heavy = {"torch", "transformers", "vllm", "datasets", "accelerate", "pyarrow"} & set(sys.modules)
print(json.dumps([said, sorted(heavy)]))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "import torch  # must not be imported to answer\nprint('imported')\ndef accuracy(completions, **kwargs): ...\n"
        "class Board: ...\nother = accuracy\n"
    )
    (tmp_path / "broken.py").write_text("import torch\n\ndef accuracy(completions:\n    return []\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    (tmp_path / "empty").mkdir()
    return tmp_path


def answers(command: str, lines: list[str]) -> dict[str, str]:
    """The key of a command's error for each list of overrides, all in one process without heavy imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, heavy = json.loads(done.stdout)  # no other output: the user's code has not run
    assert heavy == []
    return dict(said)


@pytest.mark.processes
def test_missing_things_are_reported_before_heavy_imports(here: Path) -> None:
    assert answers("train", list(MISSING)) == MISSING
    assert sorted(path.name for path in here.iterdir()) == ["broken.py", "empty", "rewards.py", "rows.jsonl"]


@pytest.mark.survival
@pytest.mark.processes
def test_other_commands_check_too(here: Path) -> None:
    lines = [line for line in MISSING if "missing.py" in line or line.startswith("task=jsonl")]
    for command in ("eval", "reward-check"):
        assert answers(command, lines) == {line: MISSING[line] for line in lines}
    assert answers("vllm-serve", ["port=0"]) == {"port=0": ""}


@pytest.mark.processes
@pytest.mark.parametrize(
    "argv",
    [["--help"], ["train", "--cfg", "job"], ["train", "--help"], ["compare", "--help"], ["explain", "algorithm=dgpo"]],
)
def test_quick_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from grpocli.cli import run; "
        f"code = 0\ntry: run({argv!r})\nexcept SystemExit as e: code = e.code or 0\n"
        "heavy = {'torch', 'transformers', 'vllm', 'datasets', 'accelerate', 'pyarrow', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
