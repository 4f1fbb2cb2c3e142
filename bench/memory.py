"""Peak memory of trainer processes compared with `grpocli plan`: `python bench/memory.py [CASE ...]`.

Runs short trainings on this machine's CPU, with the built-in model and with random weights, and prints Markdown rows.
The measured memory is the largest resident size of a trainer process, with checkpoint and final model, minus that of
the built-in model with tiny batches (the libraries): once if malloc returns freed memory, once with glibc's default,
which keeps much of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))
GIB = 2**30
MODELS = {  # Llamas
    "30M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    },
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}
SHORT = [
    "hardware.device=cpu",
    "eval.problems=0",
    "checkpoint.every=0",
    "train.steps=2",
    "task=arithmetic",
    "rollout.max_prompt_tokens=10",
]
BATCH = [  # an arithmetic prompt has 10 tokens
    "rollout.prompts_per_step=8",
    "rollout.group_size=8",
    "rollout.max_completion_tokens=54",
]
LEAST = ["rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_tokens=40"]
CASES = {
    "built in": [
        "tiny",
        "rollout.prompts_per_step=128",
        "rollout.group_size=16",
        "rollout.max_completion_tokens=3",  # it ends its answers then, and plans are for the longest
        "train.micro_batch_tokens=65536",
    ],
    "30M, float32": ["30M", "model.dtype=float32", "train.micro_batch_tokens=2048"],
    "30M, bfloat16": ["30M", "model.dtype=bfloat16", "train.micro_batch_tokens=2048"],
    "30M, checkpointing": [
        "30M",
        "model.dtype=float32",
        "train.micro_batch_tokens=2048",
        "train.gradient_checkpointing=true",
    ],
    "30M, LoRA": ["30M", "model.dtype=float32", "train.micro_batch_tokens=2048", "model.lora.rank=8"],
    "30M, no reference": ["30M", "model.dtype=float32", "train.micro_batch_tokens=2048", "algorithm=drgrpo"],
    "30M, generation": [
        "30M",
        "model.dtype=float32",
        "train.micro_batch_tokens=256",
        "rollout.prompts_per_step=16",
        "rollout.max_completion_tokens=246",
        "train.steps=1",
        "train.gradient_checkpointing=true",
    ],
    "30M, two processes": ["30M", "model.dtype=float32", "train.micro_batch_tokens=2048", "hardware.processes=2"],
    "135M, bfloat16": ["135M", "model.dtype=bfloat16", "train.micro_batch_tokens=2048"],
    "135M, float32": ["135M", "model.dtype=float32", "train.micro_batch_tokens=2048"],
    "135M, checkpointing": [
        "135M",
        "model.dtype=bfloat16",
        "train.micro_batch_tokens=2048",
        "train.gradient_checkpointing=true",
    ],
    "135M, LoRA": ["135M", "model.dtype=bfloat16", "train.micro_batch_tokens=2048", "model.lora.rank=16"],
}


def make_model(name: str, folder: Path) -> list[str]:
    """The overrides that choose a model; made now unless it is the built-in one."""
    if name == "tiny":
        return []
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpocli.models.tiny import make_tokenizer

    if not folder.is_dir():
        tied = LlamaConfig(**MODELS[name], tie_word_embeddings=True, eos_token_id=3, bos_token_id=2, pad_token_id=0)
        LlamaForCausalLM(tied).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return ["model=hf", f"model.path={folder}"]


def peak(overrides: list[str], gives_back: bool = True, folder: Path | None = None) -> int:
    """Bytes of the largest process of a run. gives_back: malloc returns freed memory to the system at once.

    folder: the run is kept in its folder `run`.
    """
    env = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "262144"} if gives_back else {})}
    with tempfile.TemporaryDirectory() as temporary:
        run = subprocess.Popen(
            [GRPOCLI, "train", *overrides, f"hydra.run.dir={folder or temporary}/run"],
            stdout=subprocess.DEVNULL,
            env=env,
        )
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode != 0:
        raise SystemExit(f"grpocli train {' '.join(overrides)}: exit code {run.returncode}")
    return used.ru_maxrss * 1024


def planned(overrides: list[str]) -> float:
    """Planned bytes of one trainer process, without its libraries."""
    answer = subprocess.run([GRPOCLI, "plan", "--json", *overrides], capture_output=True, text=True, check=False)
    if answer.returncode not in (0, 1):
        raise SystemExit(answer.stderr)
    found = json.loads(answer.stdout)
    items = [item for item in found["devices"][0]["items"] if item["name"] != "libraries"]
    whole: float = max(sum(item[phase] for item in items) for phase in ("update", "generation"))
    return float(whole / found["trainers"])


def quoted(names: Iterable[str]) -> str:
    """Names with spaces as arguments of a command."""
    return ", ".join(map(shlex.quote, names))


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("cases", nargs="*", metavar="CASE", choices=CASES, help=f"of {quoted(CASES)}")
    chosen = cli.parse_args().cases or list(CASES)
    libraries = {gives_back: peak([*SHORT, *LEAST], gives_back) for gives_back in (True, False)}
    print(f"libraries: {libraries[True] / GIB:.2f} GiB, with glibc's default {libraries[False] / GIB:.2f} GiB\n")
    print(
        "| run | planned, GiB | measured, GiB | planned / measured | with glibc's default, GiB |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            model, *given = CASES[name]
            overrides = [*SHORT, *BATCH, *given, *make_model(model, Path(folder) / model)]
            expected = planned(overrides) / GIB
            exact, default = ((peak(overrides, kind) - libraries[kind]) / GIB for kind in (True, False))
            print(f"| {name} | {expected:.2f} | {exact:.2f} | {expected / exact:.2f} | {default:.2f} |", flush=True)


if __name__ == "__main__":
    main()
