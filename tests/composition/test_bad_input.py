"""Every mistake of a user gives a one-sentence error with the key and exit code 2, before anything slow starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from grpocli.cli import main

BAD = [
    ("train.setps=3", 'there is no key train.setps; did you mean "train.steps"?'),
    ("lr=3", 'there is no key lr; did you mean "optim.lr"?'),
    ("run.dir=runs/mine", 'there is no key run.dir; did you mean "hydra.run.dir"?'),
    ("algoritm=grpo", 'there is no key algoritm; did you mean "algorithm"?'),
    ("+nonsense=1", "there is no key nonsense"),
    ("+train.nonsense=1", "there is no key train.nonsense"),
    ("algorithm=gpro", "algorithm=gpro: choose one of cispo, dapo, dgpo, dppo, drgrpo, gmpo, grpo, gspo, luspo, "),
    ("reward=[maths]", 'did you mean "math"?'),
    ("task=gsm9k", 'did you mean "gsm8k"?'),
    ("engine=vlm", 'did you mean "vllm"?'),
    ("model=null", "model=null: cannot be read; a choice is GROUP=NAME"),
    ("reward=[[number,math]]", "reward=[[number,math]]: cannot be read; a choice"),
    ("reward=number,format", "reward=number,format: several rewards stand in brackets: 'reward=[number,format]'"),
    ("reward=[number", "reward=[number: cannot be read; write KEY=VALUE or GROUP=[A,B], with every bracket"),
    ("task.nope=1,2", "there is no key task.nope"),
    ("task.system_prompt=Be_nice,_please", "task.system_prompt belongs to task="),
    (
        "task=[arithmetic,calculator] task.order=file",
        "there is no key task.order for several tasks; set task.arithmetic.order or task.calculator.order",
    ),
    ("task=[arithmetic,calculator] task.path=a", "task.path belongs to task="),
    ("model=tiny model.path=a/b", "model.path belongs to model=hf"),
    (
        "model.chat_template_arguments.enable_thinking=false",
        "chat_template_arguments belongs to model=hf; now it is tiny",
    ),
    ("reward.format.weight=0.2", "since format is not one of the rewards; add it: reward=[...,format]"),
    ("reward.exact_match.wieght=2", 'did you mean "reward.exact_match.weight"?'),
    ("algorithm/kl=k4", "algorithm/kl=k4: choose one of k1, k2, "),
    (
        "eval.stop_at=accuracy",
        "eval.stop_at=accuracy: is a section, not a key; set its keys: eval.stop_at.metric, eval.stop_at.threshold",
    ),
    ("train=5", "train=5: is a section, not a key; set its keys: train.steps, train.data_epochs, train.epochs ..."),
    ("reward.exact_match=2", "reward.exact_match=2: must be a part, not a value; set its keys: reward.exact_match.KEY"),
    ("task=[arithmetic,calculator] task.arithmetic=3", "task.arithmetic=3: must be a part, not a value"),
    ("train.steps=many", "train.steps=many: must be of type integer"),
    ("algorithm.kl=k1", "algorithm.kl=k1: is not a part; choose one with algorithm/kl=k1"),
    ("recipe=nope", "recipe=nope: choose one of colab-t4"),
    ("optim.lr=inf", "optim.lr=inf: must be a finite number"),
    ("optim.lr=-1", "optim.lr=-1.0: must be a finite number of 0 or more"),
    ("rollout.group_size=1", "rollout.group_size=1: a group is compared with itself: it needs at least 2"),
    ("rollout.group_size=99999999999", "rollout.prompts_per_step=32: a step of more than 10,000,000 completions fits"),
    ("rollout.temperature=0", "rollout.temperature=0.0: must be above 0"),
    ("rollout.repetition_penalty=0", "rollout.repetition_penalty=0.0: must be above 0 and finite"),
    ("rollout.repetition_penalty=inf", "rollout.repetition_penalty=inf: must be above 0 and finite"),
    ("rollout.stop=yes", "rollout.stop=yes: "),
    ("rollout.stop=[a,'']", "a stop string must not be empty"),
    ("rollout.regex='a(b'", "rollout.regex=a(b: does not compile: missing ), unterminated subpattern at position 1"),
    ("rollout.json_schema=[1]", "rollout.json_schema=[1]: must be a JSON schema: an object"),
    ("rollout.json_schema={type:object} rollout.regex=a", "choose this or rollout.regex, not both"),
    ("engine=transformers rollout.regex=a", "rollout.regex=a: engine=transformers cannot constrain completions"),
    ("engine=auto rollout.json_schema={type:object}", "engine=transformers cannot constrain completions"),
    ("engine=vllm rollout.regex=a", "rollout.regex=a: samples from a part of the policy's distribution: choose algo"),
    (
        "engine=vllm engine.vllm_args.max_num_seqs=4 rollout.group_size=8",
        "engine.vllm_args.max_num_seqs=4: must be at least rollout.group_size=8",
    ),
    (
        "engine=vllm engine.vllm_args.max-num-seqs=4 eval.samples=9",
        "engine.vllm_args.max_num_seqs=4: must be at least eval.samples=9",
    ),
    (
        "engine=vllm hardware.processes=2 engine.base_url=http://127.0.0.1:9 engine.reconnect_timeout=3600",
        "hardware.timeout=1800: must be above the 3600 s that the run may wait (engine.reconnect",
    ),
    (
        "engine=vllm hardware.processes=2 engine.max_restarts=3",
        "hardware.timeout=1800: must be above the 1860 s that the run may wait (engine.start_timeo",
    ),
    (
        "hardware.processes=2 algorithm=opd algorithm.kl.base_url=http://127.0.0.1:1 algorithm.kl.timeout=1800",
        "hardware.timeout=1800: must be above the 1800 s that the run may wait (algorithm.kl.timeout)",
    ),
    (
        "engine=transformers hardware.parallel=zero3",
        "hardware.parallel=zero3: engine=transformers cannot sample from sharded weights",
    ),
    ("engine=vllm hardware.parallel=zero3 model.lora.rank=4", "hardware.parallel=zero3: LoRA's updates cannot"),
    ("engine=vllm hardware.parallel=zero3 algorithm.kl.sync_every=2", "a sharded reference cannot follow the policy"),
    ("engine=vllm hardware.parallel=fsdp2 model.lora.rank=4", "hardware.parallel=fsdp2: engine=vllm is sent LoRA's"),
    ("engine=vllm hardware.parallel=zero3 model.compile=true", "model.compile=true: DeepSpeed's hooks"),
    ("model.lora.rank=4 model.quantization=nf4 model.compile=true", "model.compile=true: torch cannot compile layers"),
    ("engine=vllm engine.vllm_args.scheduling_policy=fcfs", "grpocli sets this itself"),
    ("train.minibatches=1000", "train.minibatches=1000: must be at most rollout.prompts_per_step"),
    ("train.micro_batch_tokens=8", "train.micro_batch_tokens=8: must be at least"),
    (
        "rollout.max_completion_tokens=16384",
        "a micro-batch holds whole completions; raise it, or let 4 processes share each row: hardware.processe",
    ),
    (
        "rollout.max_completion_tokens=32000 hardware.context_parallel=2",
        " / hardware.context_parallel = 16016: a process has this part of a row; raise it, or let 4 processes",
    ),
    (
        "rollout.max_completion_tokens=16384 hardware.processes=6",
        "raise it, or let 3 processes share each row: hardware.context_parallel=3",
    ),
    (
        "rollout.max_completion_tokens=16384 hardware=multinode hardware.devices_per_node=2 engine=vllm",
        "let 4 processes share each row: hardware.context_parallel=4 on more nodes (hardware.train_nodes)",
    ),
    ("hardware.context_parallel=0", "hardware.context_parallel=0: must be between 1 and 1024"),
    (
        "hardware.context_parallel=2 hardware.processes=3",
        "hardware.context_parallel=2: must divide the number of trainer processes, 3: set hardware.processes=2, or a",
    ),
    (
        "hardware.context_parallel=2 hardware.parallel=zero2",
        "works with hardware.parallel=ddp or fsdp2, not with zero2",
    ),
    ("hardware.context_parallel=2 train.packed=false", "hardware.context_parallel=2: splits packed rows: set train.pa"),
    ("hardware.context_parallel=2 rollout.repetition_penalty=2", "needs packed rows, and a repetition penalty needs"),
    ("eval.stop_at.metric=accuracy", "eval.stop_at.metric=accuracy: needs eval.stop_at.threshold"),
    ("eval.stop_at.threshold=0.9", "eval.stop_at.threshold=0.9: needs eval.stop_at.metric, such as accuracy"),
    ("eval.stop_at.metric=accuracy eval.stop_at.threshold=90", "threshold=90.0: must be a share between 0 and 1"),
    (
        "eval.stop_at.metric=acuracy eval.stop_at.threshold=0.9",
        "eval.stop_at.metric=acuracy: choose one of accuracy, accuracy_greedy, pass@2, pass@4, maj@4; did",
    ),
    ("eval.every=5 eval.stop_at.metric=pass@8 eval.stop_at.threshold=0.9", "pass@4, maj@4; did you mean"),
    (
        "eval.stop_at.metric=accuracy eval.stop_at.threshold=0.9",
        "eval.stop_at.metric=accuracy: ends the run after an evaluation, but eval.every=0 leaves none within the run",
    ),
    (
        "eval.every=5 eval.problems=0 eval.stop_at.metric=eval/accuracy eval.stop_at.threshold=0.9",
        "eval.stop_at.metric=eval/accuracy: ends the run after an evaluation, but eval.problems=0 leaves none",
    ),
    (
        "reward=[length_penalty]",
        "reward=[length_penalty]: reward.length_penalty scores a group by its other rewards, so it cannot measure acc",
    ),
    (
        "task=[arithmetic,gsm8k] reward=[exact_match,length_penalty] task.gsm8k.rewards=[length_penalty,exact_match]",
        "task.gsm8k.rewards=[length_penalty, exact_match]: reward.length_penalty scores a group by its other rewards",
    ),
    ("reward=[kimi_length,exact_match]", "cannot measure accuracy; put one of exact_match first"),
    (
        "reward=[exact_match,length_penalty] eval.reward=length_penalty",
        "eval.reward=length_penalty: reward.length_penalty scores a group",
    ),
    (
        "reward=[exact_match,length_penalty] reward.length_penalty.reward=exact",
        'reward.length_penalty.reward=exact: choose one of exact_match; did you mean "exact_match"?',
    ),
    ("eval.reward=fluency", "eval.reward=fluency: choose one of this run's rewards: exact_match"),
    (
        "algorithm.question_weight.reward=style",
        "algorithm.question_weight.reward=style: choose one of this run's rewards",
    ),
    ("algorithm=dapo algorithm.keep.surplus=keep", "algorithm.keep.surplus=keep: choose one of discard, carry"),
    ("algorithm/tokens=top_entropy algorithm.tokens.quantile=0", "algorithm.tokens.quantile=0.0: must be above 0"),
    (
        "algorithm/entropy=bonus algorithm.entropy.coefficient=-1",
        "algorithm.entropy.coefficient=-1.0: must be a finite",
    ),
    ("algorithm.kl.beta=inf", "algorithm.kl.beta=inf: must be a finite number of 0 or more"),
    (
        "algorithm=opd algorithm.kl.model=tiny-teacher algorithm.kl.beta=0",
        "algorithm.kl.beta=0: nothing trains, as algorithm/advantage=none: give a beta above 0",
    ),
    (
        "algorithm=opd algorithm.kl.model=tiny-teacher algorithm.aggregate.informative_only=true",
        "algorithm.aggregate.informative_only=true: nothing trains, as algorithm/advantage=none leaves no group",
    ),
    (
        "algorithm=opd algorithm.kl.model=tiny-teacher algorithm/tokens=top_entropy",
        "algorithm/tokens=top_entropy: selects tokens of the policy gradient, which algorithm/advantage=none",
    ),
    (
        "algorithm=opd algorithm.kl.model=tiny-teacher reward=none task.order=difficulty",
        "task.order=difficulty: needs the pass rates of problems, and no reward scores them",
    ),
    (
        "recipe=opd-small reward=none eval.every=1 eval.stop_at.metric=accuracy eval.stop_at.threshold=0.5",
        "eval.stop_at.metric=accuracy: ends the run at an accuracy, and reward=none measures none: choose a reward",
    ),
    ("algorithm/correction=importance algorithm.correction.max=nan", "algorithm.correction.max=nan: must be above 0"),
    ("algorithm/correction=token_truncate algorithm.correction.max=0", "algorithm.correction.max=0.0: must be above 0"),
    ("algorithm/correction=token_mask algorithm.correction.max=0.5", "algorithm.correction.max=0.5: must be 1 or more"),
    (
        "algorithm/correction=sequence_mask algorithm.correction.min=1.5",
        "algorithm.correction.min=1.5: must be between 0 and 1, the ratio of a token that agrees",
    ),
    (
        "algorithm/correction=importance algorithm.correction.min=inf algorithm.correction.max=inf",
        "algorithm.correction.min=inf: must be a finite number",
    ),
    (
        "algorithm/correction=importance algorithm.correction.drop=token algorithm.correction.low=1.5",
        "algorithm.correction.low=1.5: must be between 0 and 1, the ratio of a token that agrees",
    ),
    ("algorithm.advantage.eps=inf", "algorithm.advantage.eps=inf: must be a finite number of 0 or more"),
    ("algorithm=dgpo algorithm.question_weight.temperature=1e-320", "must be above 0 (at least 1e-6) and finite"),
    ("rollout.temperature=inf", "rollout.temperature=inf: must be above 0 (at least 0.001) and finite"),
    (
        "algorithm.tokens.quantile=0.3",
        "algorithm.tokens.quantile belongs to algorithm/tokens=top_entropy; now it is all",
    ),
    (
        "algorithm=dapo algorithm.kl.beta=0.1",
        "kl.beta belongs to algorithm/kl=k1, k2, k3 or reverse; now it is none",
    ),
    ("algorithm=dapo algorithm.keep.reward=style", "algorithm.keep.reward=style: choose one of this run's rewards"),
    ("recipe=dapo-small algorithm/keep=all", "dapo-qwen2.5-32b sets algorithm.keep.reward, which the choice of"),
    ("algorithm=maxrl reward.exact_match.wrong=-1", "reward.exact_match.wrong=-1.0: algorithm/advantage=max_rl needs"),
    (
        "algorithm=maxrl reward=[exact_match,overlong]",
        "reward=[overlong]: algorithm/advantage=max_rl needs scores",
    ),
    (
        "algorithm=maxrl reward=[exact_match,length_penalty]",
        "reward=[length_penalty]: algorithm/advantage=max_rl needs scores of 0 or more, and this one is negative",
    ),
    ("algorithm=dgpo reward.exact_match.wrong=-1", "leave reward.exact_match.right=1 and reward.exact_match.wrong=0"),
    (
        "algorithm=dgpo task=[arithmetic,gsm8k] reward=[format,math] task.gsm8k.rewards=[math] reward.math.wrong=-1",
        "leave reward.math.right=1 and reward.math.wrong=0",
    ),
    ("task=jsonl", "task.path: has no value; set task.path=..."),
    ("model=hf", "model.path: has no value; set model.path=..."),
    ("reward=[python]", "reward.python.function: has no value"),
    ("reward=[math,", "write KEY=VALUE or GROUP=[A,B], with every bracket"),
    ("train.steps = 5", "train.steps: cannot be read; write KEY=VALUE or GROUP=[A,B], with every bracket and quote"),
    ("reward=[exact_match, number]", "reward=[exact_match,: cannot be read; write KEY=VALUE"),
    ("task=jsonl task.path=my other sums.jsonl seed=1", "other: cannot be read; write KEY=VALUE"),
    ("task.prompt_template={a}", "needs quotes inside the shell's; write 'task.prompt_template=\"{a}\"'"),
    ("seed=[", "write KEY=VALUE"),
    ("resume=/nonexistent", "resume=/nonexistent: there is no such folder; "),
]


@pytest.mark.parametrize(("override", "sentence"), table(BAD, fast=12))
def test_a_bad_override_gives_a_one_sentence_error_with_its_key(
    override: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", f"hydra.run.dir={tmp_path}/run", *override.split(" ")])
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert said.out == ""
    assert said.err.startswith("grpocli: error: ")
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train:\n  steps: [1\n", "line 3: expected ',' or ']'"),
        ("train:\n  steps: 1\n  steps: 2\n", "line 3: found duplicate key steps"),
        (f"seed: {'9' * 5000}", "Exceeds the limit (4300 digits)"),
        ("seed: \udcff", "'utf-8' codec can't decode byte 0xff"),
        ("seed: ${nope", "no viable alternative at input '${nope'"),
        ("seed: !!timestamp x", "'NoneType' object has no attribute 'groupdict'"),
    ],
)
def test_a_broken_recipe_is_named(text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe").mkdir()
    file = tmp_path / "recipe" / "mine.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--config-dir", str(tmp_path), "recipe=mine", f"hydra.run.dir={tmp_path}/run"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert said.startswith(f"grpocli: error: {file}: cannot be read: {problem}")
    assert said.endswith("; repair it\n")
    assert said.count("\n") == 1


def test_an_unknown_command_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["trian"])
    assert exit_.value.code == 2
    assert 'did you mean "train"?' in capsys.readouterr().err


def test_the_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        main(["train", "train.steps=many"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["train", "--cfg", "job"],
        ["train", "--help"],
        ["compare", "--help"],
        ["explain", "--help"],
        ["explain", "algorithm=dgpo"],
        ["explain", "vs", "algorithm=dapo", "--markdown"],
    ],
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
