"""What is wrong with a command is one sentence, with exit code 2 and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "vs", "algorithm=dapo", "vs"], "vs: compares two configs, not 3"),
        (["explain", "train.steps", "seed=1"], "train.steps: a key cannot stand beside overrides"),
        (["explain", "algorithm=dapo", "--json"], "--json"),
        (["explain", "train.minibatch"], 'there is no key train.minibatch; did you mean "train.minibatches"'),
        (["explain", "weight"], "several keys have this name; choose reward"),
        (["explain", "num_generations"], "it is a name of TRL: grpocli explain --from-trl num_generations"),
        (["explain", "--from-trl=num_generation"], 'did you mean "num_generations"?'),
        (["explain", "--from-trl=train.steps"], "grpocli explain train.steps"),
        (["plan", "model=hf", "model.path=nobody/nothing"], "model.path=nobody/nothing"),
        (["plan", "--memory", "0"], "--memory"),
        (["plan", "--gpu", "H1000"], "--gpu"),
        (["plan", "--save", "60"], "--save"),
        (["plan", "--devices", "1", "engine=vllm", "engine.replicas=2"], "engine.replicas=2"),
        (["plan", "--devices", "4", "engine=vllm", "hardware.context_parallel=2"], "hardware.context_parallel"),
        (["explain", "rollout.overlap"], "there is no key rollout.overlap\n"),
        (["doctor", "rollout.overlap=1"], "there is no key rollout.overlap; `grpocli train --cfg job` shows the keys"),
        (["doctor", "train.stepps=3"], 'there is no key train.stepps; did you mean "train.steps"?'),
        (["doctor", "engine=transformers", "hardware.parallel=zero3"], "=zero3: engine=transformers cannot sample"),
        (["reward-check", "--lst", "5"], "--lst"),
        (["reward-check", "--threshold", "2"], "--threshold"),
        (["reward-check", "reward=[format]"], "reward=[format]: none of them decides whether an answer is right"),
        (["reward-check", "reward=[number]", "reward.number.answer_column=x"], "answer_column=x: the task's examples"),
        (["reward-check", "task.path=nowhere.jsonl", "task=jsonl"], "there is no such file or folder"),
        (["replay", "nowhere"], "there is no such folder"),
        (["replay"], "give the folder of one run"),
        (["replay", "nowhere", "resume=x"], "RUN names the run"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], said: str, grpocli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = grpocli(*words)
    assert (code, out, said in err) == (2, "", True), err
