"""The commands of README and of the page "Your first real run" run, on data and models of the same shape, offline."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from cli.running import finish, run_here, start
from little import SHAPE
from omegaconf import OmegaConf

from grpocli.cli import HELP
from grpocli.composition.compose import build_run
from grpocli_tools.command_line import composed
from grpocli_tools.plan.model_size import PUBLIC
from grpocli_tools.plan.plan import make_plan
from grpocli_tools.plan.resources import DeviceOptions

MISSING = object()
PAGE = Path(__file__).parents[3] / "docs" / "first_run.md"
ROWS = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
CODE = re.compile(r"`([^`]+)`")
README = Path(__file__).parents[3] / "README.md"
INDENTED = re.compile(r"^    (grpocli (?:.*\\\n)*.*)$", re.MULTILINE)
INLINE = re.compile(r"`(grpocli\s[^`]+)`")
COMMANDS_OF_PAGES = [
    shlex.split(found.replace("\\\n", " "), comments=True)[1:]
    for page in (PAGE, README)
    for found in [*INDENTED.findall(page.read_text()), *INLINE.findall(page.read_text())]
]
SMALL = ["train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_completion_tokens=8"]
PLACES = {"runs/DATE/TIME": "runs/first", "RUNS": "runs/first", "RUN": "runs/first", "COMMAND": "train"}
REWARDS = "".join(
    f"def {name}(completions, **kw): return [float(len(text)) for text in completions]\n"
    for name in ("accuracy", "brevity")
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" `"))
def test_a_row_names_a_metric_and_keys_that_exist(row: list[str]) -> None:
    assert row[0].strip() in (PAGE.with_name("metrics.md")).read_text()
    config = composed(["task=gsm8k"], None)
    for words in CODE.findall(row[-1]):
        if "=" in words:
            assert composed([words], None).train.steps > 0
        elif not words.startswith("grpocli "):
            assert OmegaConf.select(config, words, default=MISSING) is not MISSING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: GSM8K, its model, a model and problems of one's own, a run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpocli.models.tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("first")
    sums = [(a, b) for a in range(2, 9) for b in range(2, 9)]
    gsm8k = [{"question": f"{a} + {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>\n#### {a + b}"} for a, b in sums]
    files = {"openai/gsm8k/train.jsonl": gsm8k[:40], "openai/gsm8k/test.jsonl": gsm8k[40:]}
    files["problems.jsonl"] = [{"question": row["question"], "answer": row["answer"][-1]} for row in gsm8k]
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "train.py").write_text("from trl import GRPOConfig\nGRPOConfig(max_steps=3)\n")
    sizes = SHAPE | {"vocab_size": len(make_tokenizer()), "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, eos_token_id=0)
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "my-model"):
        LlamaForCausalLM(config).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not Path("runs/first").exists():
        words = next(words for words in COMMANDS_OF_PAGES if "hydra.run.dir=runs/first" in words)
        assert run_here(*small(words)) == 0


def small(words: Iterable[str]) -> list[str]:
    """A command at a small size, with transformers in the place of vLLM."""
    words = [word.replace(old, new) for word in words for old, new in [("engine=vllm", "engine=transformers")]]
    for old, new in PLACES.items():
        words = [re.sub(rf"\b{old}\b", new, word) for word in words]
    trains = words[0] == "train" and "--help" not in words and not any(word.startswith("resume=") for word in words)
    keys = {word.partition("=")[0] for word in SMALL}
    words = [word for word in words if not trains or word.partition("=")[0] not in keys]
    tiny = [] if any(word.startswith("model=") for word in words) else ["model.warm_start_steps=20"]
    return [*words, *SMALL, *tiny, "eval.problems=2", "eval.samples=1"] if trains else words


@pytest.mark.processes
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", dict.fromkeys(tuple(small(words)) for words in COMMANDS_OF_PAGES), ids=" ".join)
def test_a_command_of_the_pages_runs(words: tuple[str, ...]) -> None:
    chosen = [word for word in words if word != "hydra.run.dir=runs/first"]
    if words[0] == "watch":  # serves until Ctrl-C
        process = start(*chosen, "--port", "0")
        assert any("http://" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] in (0, 1)
    elif words[1:] == ("resume=runs/first",):
        shutil.copytree("runs/first", "runs/copy", dirs_exist_ok=True)
        assert run_here("train", "resume=runs/copy", "train.steps=2") == 0
    else:
        advises = words[0] in ("doctor", "plan")  # 1: this machine is not ready, or too small
        assert run_here(*chosen) in ((0, 1) if advises else (0,))


COMMANDS_OF_HELP = [
    *(shlex.split(found)[1:] for found in re.findall(r"^  (grpocli .*?)(?:  +.*)?$", HELP, re.MULTILINE)),
    *(shlex.split(found)[1:] for found in INLINE.findall((README.parent / "conf" / "train.yaml").read_text())),
]
NO_PLAN = ("resume=", "--cfg", "--help")
"""Commands of `train` that train nothing new, by a word in them."""
SLURM, MACHINES = "recipe=qwen2.5-72b-slurm", "five machines"
"""A run for more than one GPU, and what the text says next to it."""


def runs_of(words: list[str]) -> Iterable[tuple[str, ...]]:
    """The overrides of each run of a command."""
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("hydra.")]
    keys = [word.partition("=") for word in overrides]
    swept = [[f"{key}={one}" for one in (value.split(",") if "-m" in words else [value])] for key, _, value in keys]
    return itertools.product(*swept)


RUNS = dict.fromkeys(
    run
    for words in [*COMMANDS_OF_PAGES, *COMMANDS_OF_HELP]
    if words[0] in ("train", "plan", "doctor") and not any(mark in word for word in words for mark in NO_PLAN)
    for run in runs_of(words)
)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_a_documented_run_fits_one_gpu_of_80_gib(overrides: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "my-model").mkdir()
    own = json.loads(PUBLIC.read_text())["Qwen/Qwen2.5-0.5B-Instruct"]  # the size of ./my-model, which is the reader's
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(own))
    here = [] if SLURM in overrides else ["hardware.device=cuda"]
    plan = make_plan(build_run(composed([*overrides, *here], None)), DeviceOptions(gpu="H100", devices=1))
    assert SLURM not in overrides or MACHINES in HELP
    assert plan.devices[0].memory == 80 * 2**30
    assert plan.fits
    assert not plan.is_tight, "within a tenth of the memory"
