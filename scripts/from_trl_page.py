"""Write docs/from-trl.md: `python scripts/from_trl_page.py DOCS`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpocli.composition.compose import register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli.files import write_atomic
from grpocli_tools.explain.explain_command import default_there
from grpocli_tools.explain.keys import ReferenceIndex
from grpocli_tools.explain.render import table
from grpocli_tools.porting.foreign_names import (
    EARLIER,
    GRPO_CONFIG,
    LORA_CONFIG,
    MODEL_CONFIG,
    NEMO_RL,
    TRAINER,
    TRAINING_ARGUMENTS,
    Equivalent,
)

FROM_TRL = """\
# From TRL and NeMo RL

`make docs` writes this page from the tables `*.yaml` in `grpocli_tools/porting/`. `grpocli explain --from-trl NAME`
prints one row.
`grpocli from-trl FILE` prints the command for a script or a YAML of TRL. Every setting is an
override, or is named with the reason. A script is never run. Its calls of `GRPOConfig`, `LoraConfig`, `GRPOTrainer`
and `load_dataset` are read, where their arguments are literals or constants of the script; every other argument is one
`# check:` line. A model, dataset, reward or number of steps that is not read is `???` in the command, which then stops
with this key. Set what else the script does to its model, tokenizer and rows yourself, `.map(...)` as `task.processor`.
A notebook (.ipynb, or its cells as a script) is read as a script, without lines for the shell.

Importing a script would start its training, so `--rewards rewards.py` (or `--out recipe/NAME.yaml`, with a recipe)
writes its reward functions, and the functions, constants and imports that they need, into a separate file. Arguments
after `--` are those of the script's command line, `--config` as TrlParser reads it among them:

    grpocli from-trl gspo.py --rewards rewards.py --processes 8 -- --model_name_or_path Qwen/Qwen3-0.6B --beta 0.0
    grpocli from-trl dapo.py --rewards rewards.py --accelerate zero3.yaml -- --config dapo.yaml

With several rewards, `eval.reward` is the first whose name says that it scores answers; check it.

The last line of the output is a command that scores two steps of scripted completions with the ported rewards, without
the model. Defaults of TRL are those of version 1.16; a test compares them with an installed TRL.

## Batches and steps

TRL counts completions in micro-batches, grpocli counts prompts of a step. With P = per_device_train_batch_size,
A = gradient_accumulation_steps, N processes, S = steps_per_generation (A if it is not given), G = num_generations:

| here | from TRL's values | example: P=8, A=4, N=2, G=8, max_steps=500 |
| --- | --- | --- |
| `rollout.prompts_per_step` | P x N x max(S, A) / G | 8 x 2 x 4 / 8 = 8 prompts, 64 completions |
| `rollout.group_size` | G | 8 |
| `train.minibatches` | S / A, at least 1 | 1 |
| `train.epochs` | num_iterations | 1 |
| `train.steps` | max_steps / (train.minibatches x train.epochs) | 500 |
| `checkpoint.every`, `eval.every` | save_steps, eval_steps / (train.minibatches x train.epochs) | 500 |

A step of TRL is an optimizer update; a step here is one round of sampling with all of its updates. TRL's epochs are
passes over the dataset: train.steps = num_train_epochs x prompts / rollout.prompts_per_step. Reward functions have the
same signature in both: keyword arguments for the prompts, completions and columns, and a list of numbers.

TRL's default loss is `loss_type=dapo` without a KL term, which is
`algorithm=grpo algorithm/aggregate=token_mean algorithm/kl=none` here. `algorithm=dapo` is the whole of the paper: also
dynamic sampling, clip-higher and the punishment of long completions.
"""
DIFFERENT = """\
## What stays different

- **The first update.** TRL's warm-up begins with the rate 0, and grpocli's with 1 / (warmup_steps + 1) of `optim.lr`.
- **Truncated sampling.** With `rollout.top_p`, `top_k`, `min_p` or `repetition_penalty`, the loss has the log-probs of
  the distribution that was sampled from. TRL's loss has those of the whole distribution.
- **KL.** A token's KL estimate is at most 10 here.
- **Long prompts.** Prompts over `rollout.max_prompt_tokens` are dropped. `rollout.long_prompts=truncate` cuts them from
  the left, as TRL's former `max_prompt_length` did.
- **Evaluation** measures accuracy: the share of completions whose first reward (or `eval.reward`) is 1 or more. TRL
  averages rewards and losses over `eval_dataset`. Training problems are refused as evaluation problems.
- **Arguments of rewards.** `trainer_state`, `log_metric`, `log_extra` and `environments` are not passed.
- **The end.** The model is in RUN/model, and a run never overwrites another: `resume=RUN` replaces
  `trainer.train(resume_from_checkpoint=...)`.
"""
PORTED = """\
## A script, line by line

| the script | the command |
| --- | --- |
| `load_dataset("openai/gsm8k", "main", split="train")` | `task=hub task.path=openai/gsm8k task.name=main` |
| `.map(to_prompt)` | write `task.processor=rewards.py:to_prompt`: it returns the whole row, not only what is new |
| `reward_funcs=[correct, short]` | `'reward=[rewards.py:correct,rewards.py:short]'` |
| `reward_weights=[1.0, 0.2]` | `reward.short.weight=0.2` |
| `model="Qwen/Qwen2.5-1.5B-Instruct"` | `model=hf model.path=Qwen/Qwen2.5-1.5B-Instruct` |
| `LoraConfig(r=16, lora_alpha=32)` | `model.lora.rank=16 model.lora.alpha=32` |
| `loss_type="dapo"`, `beta=0.0`, TRL's defaults | `algorithm=grpo algorithm/aggregate=token_mean algorithm/kl=none` |
| `per_device_train_batch_size=8, gradient_accumulation_steps=4` on 2 GPUs | `rollout.prompts_per_step=8` |
| `num_generations=8` | `rollout.group_size=8` |
| `max_completion_length=512`, TRL's default | `rollout.max_completion_tokens=512` |
| `learning_rate=1e-5, lr_scheduler_type="linear"`, the latter TRL's default | `optim.lr=1e-5 optim.schedule=linear` |
| `warmup_steps=10` | `optim.warmup_steps=10`; TRL's first update has the rate 0, the first one here 1/11 of it |
| `max_steps=500` | `train.steps=500` |
| `gradient_checkpointing=True`, TRL's default | `train.gradient_checkpointing=true` |
| `seed=42`, TRL's default | `seed=42` |
| `use_vllm=True` (colocated) | `engine=vllm_colocate` |
| `trainer.train()` | `grpocli train` with all of these |
"""
SECTIONS = {
    "GRPOConfig": GRPO_CONFIG,
    "TrainingArguments": TRAINING_ARGUMENTS,
    "ModelConfig and ScriptArguments": MODEL_CONFIG,
    "GRPOTrainer": TRAINER,
    "LoraConfig": LORA_CONFIG,
    "Earlier names": EARLIER,
    "NeMo RL": NEMO_RL,
}


def _anchor(name: str) -> str:
    return name.lower().replace(".", "").replace(" ", "-")


def from_trl_page(reference: ReferenceIndex) -> str:
    """docs/from-trl.md: every foreign name with its equivalent and both defaults."""
    pieces = [FROM_TRL, PORTED, DIFFERENT]
    for title, names in SECTIONS.items():
        pieces.append(f"## {title}\n\n" + "\n".join(_foreign_table(names, reference)))
    contents = [piece.split("\n")[0].removeprefix("## ") for piece in pieces[1:]]
    links = "\n".join(f"- [{name}](#{_anchor(name.replace(',', ''))})" for name in ["Batches and steps", *contents])
    head, _, rest = FROM_TRL.partition("## ")
    return "\n".join(piece.rstrip() + "\n" for piece in [head, links, f"## {rest}", *pieces[1:]])


def _foreign_table(names: Mapping[str, Equivalent], reference: ReferenceIndex) -> Iterator[str]:
    rows = []
    for name, one in names.items():
        defaults = {key: reference.default_of(key) for key in one.keys}
        ours = ", ".join(f"`{key}={default}`" for key, default in defaults.items() if default is not None)
        values = "; ".join(f"{value}: `{overrides}`" for value, overrides in one.values.items() if overrides)
        written = f"`{one.here.replace('{}', 'VALUE')}`" if one.here else "-"
        stated = f"`{default_there(one)}`" if default_there(one) else ""
        rows.append([f"`{name}`", stated, written, ours, "; ".join(filter(None, [one.remark, values, one.why]))])
    yield from table(["name", "default there", "here", "default here", "remark"], rows)


def main(argv: list[str]) -> int:
    """Write the page into a folder."""
    register_parts()
    reference = ReferenceIndex(Path(conf_dir()))
    write_atomic(Path(argv[0]) / "from-trl.md", from_trl_page(reference))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
