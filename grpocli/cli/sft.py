"""`grpocli sft`: teach a model the answers of a task, for example before reinforcement learning."""

from __future__ import annotations

from grpocli.cli import train
from grpocli.cli.hydra_app import arguments
from grpocli.errors import ConfigError

HELP = """\
grpocli sft: teach a model the answers of a task (supervised training), with the same keys as `grpocli train`

usage: grpocli sft [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]

It is `grpocli train algorithm=sft engine=transformers`: the same tasks, run folder, checkpoints, resume, LoRA and
processes. The engine only samples evaluations.

common keys
  task.target_template      the answer to teach, text with {column} fields; null: the assistant's last turn, or the
                            task's own answer
  train.data_epochs         passes over the data, instead of train.steps
  rollout.prompts_per_step  answers of an update; train.micro_batch_tokens bounds the memory of a forward pass
  rollout.max_prompt_tokens, rollout.max_completion_tokens
                            longer ones are dropped, or cut with rollout.long_prompts=truncate
  optim.lr  model.lora.rank  eval.every  eval.problems  checkpoint.every  seed

examples
  grpocli sft task=gsm8k model=smollm2-135m train.data_epochs=2
  grpocli sft task=jsonl task.path=chats.jsonl task.prompt_column=messages task.answer_column=null reward=none
  grpocli sft resume=runs/DATE/TIME
  grpocli train task=gsm8k model=runs/DATE/TIME/model       reinforcement learning from there

`grpocli train --help` lists the groups and their choices.
"""
CHOICES = ("algorithm=sft", "engine=transformers")


def main(argv: list[str]) -> int:
    """Train with `algorithm=sft`, and `engine=transformers` unless another is chosen. Returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        return 0
    overrides = arguments(argv).overrides
    if any(override.startswith("resume=") for override in overrides):
        return train.main(argv)
    for override in overrides:
        if override.startswith("algorithm=") and override != CHOICES[0]:
            hint = "leave it out, or use `grpocli train`"
            raise ConfigError("`grpocli sft` is algorithm=sft", key="algorithm", value=override[10:], hint=hint)
    given = {override.partition("=")[0] for override in overrides}
    return train.main([*argv, *(choice for choice in CHOICES if choice.partition("=")[0] not in given)])
