"""Keys and choices of TRL, transformers and verl, with the equivalent overrides of grpocli.

`{}` in an override is replaced by the typed value. A test composes every override of the tables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Equivalent:
    """The equivalent in grpocli.

    overrides: `{}` is replaced by the value; empty if there is nothing to set. note: a remark after the overrides.
    values: {value in lower case: overrides for it}.
    """

    overrides: str = ""
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def sentence(self, value: str) -> str:
        """The advice for a value, such as `write optim.lr=1e-6`."""
        overrides = self.values.get(value.strip("'\"").lower(), self.overrides)
        written = " ".join(shlex.quote(one.format(value)) for one in overrides.split())
        return "; ".join(filter(None, [f"write {written}" if written else "", self.note]))

    def examples(self) -> Iterator[str]:
        """All overrides that may be advised."""
        yield from filter(None, [self.overrides, *self.values.values()])


BATCH = Equivalent(
    "rollout.prompts_per_step={}",
    "the prompts of a step on all devices, each with rollout.group_size completions",
)
MEMORY = Equivalent(
    "", "nothing to set: train.micro_batch_tokens bounds the memory, and batches are split and summed by it"
)
EPOCHS = Equivalent(
    "", "train.steps=N counts steps of rollout.prompts_per_step prompts (train.epochs is passes over a step)"
)
LENGTH = Equivalent("rollout.max_completion_tokens={}")
MODEL = Equivalent("model={}")
HUB = Equivalent("", "the final model is a Hugging Face folder, RUN/model: upload it with `hf upload NAME RUN/model`")
ALGORITHMS = {
    "bnpo": "algorithm=grpo algorithm/aggregate=token_mean algorithm.aggregate.scope=micro_batch",
    "cispo": "algorithm=grpo algorithm/objective=cispo",
    "dapo": "algorithm=dapo",
    "dr_grpo": "algorithm=drgrpo",
    "grpo": "algorithm=grpo",
    "gspo": "algorithm=grpo algorithm/kl=none algorithm.objective.level=sequence algorithm.objective.low=3e-4 "
    "algorithm.objective.high=4e-4",
    "rloo": "algorithm=grpo algorithm/advantage=leave_one_out",
    "reinforce_plus_plus": "algorithm=grpo algorithm/advantage=batch_std",
    "sapo": "algorithm=grpo algorithm/objective=sapo",
}
ADVANTAGES = {
    "true": "algorithm/advantage=std",
    "group": "algorithm/advantage=std",
    "batch": "algorithm/advantage=batch_std",
    "false": "algorithm/advantage=center",
    "none": "algorithm/advantage=center",
}
ENGINES = {"true": "engine=vllm", "false": "engine=transformers"}
KL = {"true": "algorithm/kl=k3", "false": "algorithm/kl=none"}
NO_CRITIC = Equivalent(
    "algorithm=grpo", "there is no value model: the group is the baseline, under PPO's clipped objective"
)

TRL = {
    "adam_beta1": Equivalent("optim.betas=[{},0.999]"),
    "adam_beta2": Equivalent("optim.betas=[0.9,{}]"),
    "adam_epsilon": Equivalent("optim.eps={}"),
    "attn_implementation": Equivalent("model.attn_implementation={}"),
    "batch_size": BATCH,
    "beta": Equivalent("algorithm.kl.beta={}", "algorithm=dapo, drgrpo and dgpo also need algorithm/kl=k3"),
    "bf16": Equivalent("model.dtype=bfloat16", values={"false": "model.dtype=float32"}),
    "chat_template_path": Equivalent("model=hf model.chat_template={}"),
    "dataset": Equivalent("task=hub task.path={}", "task=jsonl for a file"),
    "dataset_config": Equivalent("task.name={}"),
    "dataset_name": Equivalent("task=hub task.path={}", "task=jsonl for a file"),
    "dataset_path": Equivalent("task=jsonl task.path={}"),
    "dataset_train_split": Equivalent("task.split={}"),
    "deepspeed": Equivalent("hardware.parallel=zero2", "or zero3"),
    "delta": Equivalent("algorithm.objective.delta={}"),
    "dtype": Equivalent("model.dtype={}"),
    "epochs": EPOCHS,
    "epsilon": Equivalent("algorithm.objective.low={} algorithm.objective.high={}"),
    "epsilon_high": Equivalent("algorithm.objective.high={}"),
    "eval_steps": Equivalent("eval.every={}"),
    "eval_strategy": Equivalent("", "eval.every=N evaluates every N steps, besides before and after the run"),
    "fp16": Equivalent("model.dtype=bfloat16", "there is no training in float16"),
    "fsdp": Equivalent("hardware.parallel=fsdp2"),
    "generation_batch_size": BATCH,
    "gradient_accumulation_steps": MEMORY,
    "gradient_checkpointing": Equivalent("train.gradient_checkpointing={}"),
    "group_size": Equivalent("rollout.group_size={}"),
    "hub_model_id": HUB,
    "importance_sampling_level": Equivalent("algorithm.objective.level={}"),
    "learning_rate": Equivalent("optim.lr={}"),
    "log_completions": Equivalent(
        "", "nothing to set: every completion is in RUN/rollouts, and `grpocli rollouts RUN` shows them"
    ),
    "logging_steps": Equivalent("", "nothing to set: every step is in RUN/metrics.jsonl and goes to the tracker"),
    "lora_alpha": Equivalent("model.lora.alpha={}"),
    "lora_r": Equivalent("model.lora.rank={}"),
    "lora_rank": Equivalent("model.lora.rank={}"),
    "lora_target_modules": Equivalent("model.lora.target_modules={}"),
    "loss_type": Equivalent("algorithm={}", values=ALGORITHMS),
    "lr_scheduler_type": Equivalent("optim.schedule={}", "constant, linear or cosine, after optim.warmup_steps"),
    "mask_truncated_completions": Equivalent("algorithm.keep.mask_truncated={}"),
    "max_completion_length": LENGTH,
    "max_grad_norm": Equivalent("optim.max_grad_norm={}"),
    "max_new_tokens": LENGTH,
    "max_prompt_length": Equivalent("rollout.max_prompt_tokens={}"),
    "max_steps": Equivalent("train.steps={}"),
    "max_tokens": LENGTH,
    "min_p": Equivalent("rollout.min_p={}"),
    "model_id": MODEL,
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "model_path": MODEL,
    "model_revision": Equivalent("model.revision={}"),
    "num_epochs": EPOCHS,
    "num_generations": Equivalent("rollout.group_size={}"),
    "num_iterations": Equivalent("train.epochs={}"),
    "num_processes": Equivalent("hardware.processes={}"),
    "num_train_epochs": EPOCHS,
    "output_dir": Equivalent("hydra.run.dir={}"),
    "per_device_eval_batch_size": MEMORY,
    "per_device_train_batch_size": Equivalent(
        "", "rollout.prompts_per_step=N is the prompts of a step on all devices; train.micro_batch_tokens bounds memory"
    ),
    "pretrained_model_name_or_path": MODEL,
    "push_to_hub": HUB,
    "ref_model_mixup_alpha": Equivalent("algorithm.kl.sync_alpha={}"),
    "ref_model_sync_steps": Equivalent("algorithm.kl.sync_every={}"),
    "repetition_penalty": Equivalent("rollout.repetition_penalty={}"),
    "report_to": Equivalent("tracker={}"),
    "resume_from_checkpoint": Equivalent("", "resume=RUN continues from the newest checkpoint of a run's folder"),
    "reward_funcs": Equivalent("", "reward=[FILE.py:NAME] uses your functions, reward=[math,format] built-in rewards"),
    "reward_weights": Equivalent("", "reward.NAME.weight=VALUE, for each"),
    "run_name": Equivalent("hydra.run.dir=runs/{}"),
    "save_steps": Equivalent("checkpoint.every={}"),
    "save_strategy": Equivalent("", "checkpoint.every=N saves every N steps"),
    "save_total_limit": Equivalent("checkpoint.keep={}"),
    "scale_rewards": Equivalent("algorithm/advantage=std", values=ADVANTAGES),
    "steps_per_generation": Equivalent("train.minibatches={}"),
    "stop_strings": Equivalent("rollout.stop={}"),
    "system_prompt": Equivalent("task.system_prompt={}"),
    "temperature": Equivalent("rollout.temperature={}"),
    "top_entropy_quantile": Equivalent("algorithm/tokens=top_entropy algorithm.tokens.quantile={}"),
    "top_k": Equivalent("rollout.top_k={}"),
    "top_p": Equivalent("rollout.top_p={}"),
    "torch_dtype": Equivalent("model.dtype={}"),
    "train_batch_size": BATCH,
    "train_file": Equivalent("task=jsonl task.path={}"),
    "trust_remote_code": Equivalent("model.trust_remote_code={}"),
    "use_peft": Equivalent("model.lora.rank=16"),
    "use_vllm": Equivalent("engine=vllm", values=ENGINES),
    "vllm_gpu_memory_utilization": Equivalent("engine=vllm engine.gpu_memory_utilization={}"),
    "vllm_importance_sampling_cap": Equivalent("algorithm/correction=token_truncate algorithm.correction.max={}"),
    "vllm_importance_sampling_correction": Equivalent(
        "algorithm/correction=token_truncate", values={"false": "algorithm/correction=none"}
    ),
    "vllm_mode": Equivalent("engine=vllm", values={"colocate": "engine=vllm_colocate"}),
    "vllm_server_base_url": Equivalent("engine=vllm engine.base_url={}"),
    "vllm_tensor_parallel_size": Equivalent("engine=vllm engine.tensor_parallel={}"),
    "warmup_ratio": Equivalent(
        "", "optim.warmup_steps=N counts updates: train.steps x train.minibatches x train.epochs"
    ),
    "warmup_steps": Equivalent("optim.warmup_steps={}"),
    "weight_decay": Equivalent("optim.weight_decay={}"),
}

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = {
    f"{ACTOR}.clip_ratio": TRL["epsilon"],
    f"{ACTOR}.clip_ratio_c": Equivalent("algorithm.objective.dual={}"),
    f"{ACTOR}.clip_ratio_high": TRL["epsilon_high"],
    f"{ACTOR}.clip_ratio_low": Equivalent("algorithm.objective.low={}"),
    f"{ACTOR}.entropy_coeff": Equivalent("algorithm/entropy=bonus algorithm.entropy.coefficient={}"),
    f"{ACTOR}.grad_clip": TRL["max_grad_norm"],
    f"{ACTOR}.kl_loss_coef": TRL["beta"],
    f"{ACTOR}.kl_loss_type": Equivalent("algorithm/kl=k3"),
    f"{ACTOR}.loss_agg_mode": Equivalent(
        "algorithm/aggregate=token_mean",
        values={
            "seq-mean-token-mean": "algorithm/aggregate=sequence_mean",
            "seq-mean-token-sum-norm": "algorithm/aggregate=constant",
        },
    ),
    f"{ACTOR}.optim.clip_grad": TRL["max_grad_norm"],
    f"{ACTOR}.optim.lr": TRL["learning_rate"],
    f"{ACTOR}.optim.lr_warmup_steps": TRL["warmup_steps"],
    f"{ACTOR}.optim.weight_decay": TRL["weight_decay"],
    f"{ACTOR}.ppo_epochs": TRL["num_iterations"],
    f"{ACTOR}.ppo_max_token_len_per_gpu": Equivalent("train.micro_batch_tokens={}"),
    f"{ACTOR}.ppo_micro_batch_size": MEMORY,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": MEMORY,
    f"{ACTOR}.ppo_mini_batch_size": Equivalent("", "train.minibatches=N divides a step into N updates"),
    f"{ACTOR}.use_kl_loss": Equivalent("algorithm/kl=k3", values=KL),
    "actor_rollout_ref.model.enable_gradient_checkpointing": TRL["gradient_checkpointing"],
    "actor_rollout_ref.model.lora_alpha": TRL["lora_alpha"],
    "actor_rollout_ref.model.lora_rank": TRL["lora_rank"],
    "actor_rollout_ref.model.path": MODEL,
    f"{ROLLOUT}.gpu_memory_utilization": TRL["vllm_gpu_memory_utilization"],
    f"{ROLLOUT}.n": TRL["num_generations"],
    f"{ROLLOUT}.name": Equivalent("engine={}", values={"hf": "engine=transformers", "sglang": "engine=vllm"}),
    f"{ROLLOUT}.temperature": TRL["temperature"],
    f"{ROLLOUT}.tensor_model_parallel_size": TRL["vllm_tensor_parallel_size"],
    f"{ROLLOUT}.top_k": TRL["top_k"],
    f"{ROLLOUT}.top_p": TRL["top_p"],
    "algorithm.adv_estimator": Equivalent("algorithm={}", values=ALGORITHMS | {"gae": "algorithm=grpo"}),
    "algorithm.kl_ctrl.kl_coef": TRL["beta"],
    "algorithm.norm_adv_by_std_in_grpo": TRL["scale_rewards"],
    "custom_reward_function.path": TRL["reward_funcs"],
    "data.max_prompt_length": TRL["max_prompt_length"],
    "data.max_response_length": LENGTH,
    "data.prompt_key": Equivalent("task.prompt_column={}"),
    "data.train_batch_size": BATCH,
    "data.train_files": Equivalent("task=jsonl task.path={}"),
    "data.val_files": Equivalent("task.eval_path={}"),
    "trainer.default_local_dir": TRL["output_dir"],
    "trainer.experiment_name": TRL["run_name"],
    "trainer.logger": Equivalent("", "tracker=NAME: wandb, tensorboard, mlflow ..."),
    "trainer.n_gpus_per_node": TRL["num_processes"],
    "trainer.nnodes": Equivalent("hardware=multinode hardware.train_nodes={}"),
    "trainer.project_name": Equivalent("tracker=wandb tracker.project={}"),
    "trainer.resume_mode": TRL["resume_from_checkpoint"],
    "trainer.save_freq": TRL["save_steps"],
    "trainer.test_freq": TRL["eval_steps"],
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": TRL["max_steps"],
}
KEYS = TRL | VERL

CHOICES = {
    **{("algorithm", name): Equivalent(overrides) for name, overrides in ALGORITHMS.items()},
    ("algorithm", "ppo"): NO_CRITIC,
    ("algorithm", "gae"): NO_CRITIC,
    ("algorithm", "reinforce"): Equivalent(ALGORITHMS["rloo"], "REINFORCE with the rest of the group as the baseline"),
    ("algorithm", "reinforce++"): Equivalent(ALGORITHMS["reinforce_plus_plus"]),
    ("engine", "hf"): Equivalent("engine=transformers"),
    ("engine", "huggingface"): Equivalent("engine=transformers"),
    ("engine", "sglang"): Equivalent("engine=vllm"),
    ("hardware", "cpu"): Equivalent("hardware.device=cpu"),
    ("hardware", "cuda"): Equivalent("hardware.device=cuda"),
    ("hardware", "gpu"): Equivalent("hardware.device=cuda"),
    ("optim", "adam"): Equivalent("optim=adamw"),
    ("optim", "adamw_torch"): Equivalent("optim=adamw"),
    ("optim", "adamw_torch_fused"): Equivalent("optim=adamw"),
    ("reward", "accuracy"): Equivalent("reward=[math]"),
    ("reward", "accuracy_reward"): Equivalent("reward=[math]"),
    ("reward", "think_format_reward"): Equivalent("reward=[format]"),
    ("reward", "soft_overlong_punishment"): Equivalent("reward=[math,overlong]"),
}


def key_advice(key: str, value: str) -> str | None:
    """The advice for a key of another trainer; None for an unknown key."""
    here = KEYS.get(key)
    return here.sentence(value) if here else None


def choice_advice(group: str, choice: str) -> str | None:
    """The advice for a choice of another trainer; None for an unknown choice."""
    here = CHOICES.get((group, choice.lower().replace("-", "_")))
    return here.sentence(choice) if here else None
