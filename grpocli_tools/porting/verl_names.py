"""Keys of verl."""

from __future__ import annotations

from dataclasses import replace

from grpocli_tools.porting.equivalent import (
    ALGORITHMS,
    BATCH,
    EPOCHS,
    LENGTH,
    MEMORY,
    MODEL,
    UNSTATED,
    Equivalent,
)
from grpocli_tools.porting.trl_names import ALIASES, TRL

KL = {"true": "algorithm/kl=k3", "false": "algorithm/kl=none"}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL_LOSSES = {
    "vanilla": "algorithm/objective=clip",
    "gspo": "algorithm/objective=clip algorithm.objective.level=sequence",
    "sapo": "algorithm/objective=sapo",
    "cispo": "algorithm/objective=cispo",
    "geo_mean": "algorithm/objective=geometric",
    "dppo_tv": "algorithm/objective=dppo",
    "dppo_kl": "algorithm/objective=dppo algorithm.objective.divergence=kl",
    "dro": "algorithm/objective=mirror",
}
VERL_DTYPE = Equivalent(
    "model.dtype={}",
    "one dtype for the trainer, its reference and vLLM",
    values={"bf16": "model.dtype=bfloat16", "fp16": "model.dtype=float16", "half": "model.dtype=float16"},
)
VERL = {
    f"{ACTOR}.clip_ratio": TRL["epsilon"],
    f"{ACTOR}.clip_ratio_c": Equivalent("algorithm.objective.dual={}"),
    f"{ACTOR}.clip_ratio_high": TRL["epsilon_high"],
    f"{ACTOR}.clip_ratio_low": Equivalent("algorithm.objective.low={}"),
    f"{ACTOR}.dtype": VERL_DTYPE,
    f"{ACTOR}.entropy_coeff": Equivalent("algorithm/entropy=bonus algorithm.entropy.coefficient={}"),
    f"{ACTOR}.grad_clip": TRL["max_grad_norm"],
    f"{ACTOR}.kl_loss_coef": TRL["beta"],
    f"{ACTOR}.kl_loss_type": Equivalent("algorithm/kl=k3"),
    f"{ACTOR}.policy_loss.loss_mode": Equivalent(VERL_LOSSES["vanilla"], values=VERL_LOSSES),
    f"{ACTOR}.policy_loss.dro_beta": Equivalent("algorithm/objective=mirror algorithm.objective.tau={}"),
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
    f"{ACTOR}.ulysses_sequence_parallel_size": Equivalent("hardware.context_parallel={}"),
    f"{ACTOR}.use_kl_loss": Equivalent("algorithm/kl=k3", values=KL),
    "actor_rollout_ref.model.enable_gradient_checkpointing": TRL["gradient_checkpointing"],
    "actor_rollout_ref.model.lora_alpha": TRL["lora_alpha"],
    "actor_rollout_ref.model.lora_rank": TRL["lora_r"],
    "actor_rollout_ref.model.path": MODEL,
    f"{ROLLOUT}.dtype": VERL_DTYPE,
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
    "data.max_prompt_length": ALIASES["max_prompt_length"],
    "data.max_response_length": LENGTH,
    "data.prompt_key": Equivalent("task.prompt_column={}"),
    "data.train_batch_size": BATCH,
    "data.train_files": Equivalent("task=jsonl task.path={}"),
    "data.val_files": Equivalent("task.eval_path={}"),
    "trainer.default_local_dir": TRL["output_dir"],
    "trainer.experiment_name": TRL["run_name"],
    "trainer.logger": Equivalent("", "tracker=NAME: wandb, tensorboard, mlflow ..."),
    "trainer.n_gpus_per_node": ALIASES["num_processes"],
    "trainer.nnodes": Equivalent("hardware=multinode hardware.train_nodes={}"),
    "trainer.project_name": Equivalent("tracker=wandb tracker.project={}"),
    "trainer.resume_mode": TRL["resume_from_checkpoint"],
    "trainer.save_freq": TRL["save_steps"],
    "trainer.test_freq": TRL["eval_steps"],
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": TRL["max_steps"],
}
VERL = {name: replace(equivalent, default=UNSTATED, why="") for name, equivalent in VERL.items()}
