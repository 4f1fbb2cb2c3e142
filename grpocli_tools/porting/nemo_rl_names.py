"""Keys of NeMo RL."""

from __future__ import annotations

from dataclasses import replace

from grpocli_tools.porting.equivalent import (
    BATCH,
    EPOCHS,
    LENGTH,
    MEMORY,
    MODEL,
    ORDERS,
    SHOWN,
    UNSTATED,
    Equivalent,
    default,
    missing,
    nothing,
)

NO_MEGATRON = "training is with torch, not with Megatron: hardware.parallel=fsdp2 shards it"
NEMO_RL = {
    "grpo.num_prompts_per_step": default(32, BATCH, "16 here"),
    "grpo.num_generations_per_prompt": default(16, "rollout.group_size={}", "8 here, as in TRL"),
    "grpo.max_rollout_turns": default(1, "task.environment.turns={}", "it has an effect only with an environment"),
    "grpo.max_num_epochs": default(1, EPOCHS),
    "grpo.max_num_steps": default(1_000_000, "train.steps={}", "60 here; there is no second limit by epochs"),
    "grpo.normalize_rewards": default(
        True, Equivalent("algorithm/advantage=std", values={"false": "algorithm/advantage=center"})
    ),
    "grpo.use_leave_one_out_baseline": Equivalent(
        "algorithm/advantage=leave_one_out",
        "with normalize_rewards NeMo RL also divides by the others' deviation: algorithm.advantage.scale=others",
        {"false": "algorithm/advantage=std"},
        default=True,
        why="the GRPO paper's mean is over the whole group",
    ),
    "grpo.advantage_clip_low": default(None, "algorithm.advantage_min={}"),
    "grpo.advantage_clip_high": default(None, "algorithm.advantage_max={}"),
    "grpo.val_period": default(10, "eval.every={}", "0 here: before and after the run"),
    "grpo.val_at_start": nothing(False, "every run with eval.problems above 0 begins with an evaluation"),
    "grpo.val_num_generations_per_prompt": default(1, "eval.samples={}", "4 here"),
    "grpo.stop_at_validation_metric": Equivalent(
        "eval.stop_at.metric={}",
        "pass_k is pass@K, K=eval.samples; needs eval.stop_at.threshold and eval.every",
        {"pass_k": "eval.stop_at.metric=pass@4"},
        default=None,
    ),
    "grpo.stop_at_validation_threshold": default(None, "eval.stop_at.threshold={}"),
    "grpo.overlong_filtering": default(False, "algorithm.keep.mask_truncated={}"),
    "grpo.max_val_samples": default(256, "eval.problems={}", "256 on a GPU, 32 on a CPU"),
    "grpo.val_batch_size": default(256, MEMORY),
    "grpo.seed": default(42, "seed={}", "0 here"),
    "grpo.async_grpo.enabled": Equivalent("", "rollout.max_staleness above 0 samples ahead", default=False),
    "grpo.async_grpo.max_trajectory_age_steps": default(
        1, "rollout.max_staleness={}", "0 here; NeMo RL's number has no effect unless async_grpo is enabled"
    ),
    "grpo.use_dynamic_sampling": Equivalent("algorithm/keep=dynamic", values={"false": "algorithm/keep=all"}),
    "grpo.dynamic_sampling_max_gen_batches": Equivalent("algorithm/keep=dynamic algorithm.keep.max_rounds={}"),
    "grpo.reward_shaping.enabled": Equivalent("", "reward=[...,overlong] is DAPO's punishment of long completions"),
    "loss_fn.reference_policy_kl_penalty": default(
        0.01, "algorithm.kl.beta={}", "0.04 is the GRPO paper's; 0 is algorithm/kl=none"
    ),
    "loss_fn.ratio_clip_min": default(0.2, "algorithm.objective.low={}"),
    "loss_fn.ratio_clip_max": default(0.2, "algorithm.objective.high={}"),
    "loss_fn.ratio_clip_c": default(None, "algorithm.objective.dual={}"),
    "loss_fn.use_on_policy_kl_approximation": Equivalent(
        "algorithm.kl.on_policy=true",
        "since June 2026 NeMo RL's KL has the ratio's gradient with either value; true also weighs it by π/μ, "
        "which is ours with algorithm/correction=sampler",
        default=False,
    ),
    "loss_fn.use_importance_sampling_correction": Equivalent(
        "algorithm/correction=token_truncate algorithm.correction.max=1e9",
        "NeMo RL's weight has no bound unless truncated_importance_sampling_ratio is set",
        {"false": "algorithm/correction=none"},
        default=False,
    ),
    "loss_fn.truncated_importance_sampling_ratio": Equivalent(
        "algorithm/correction=token_truncate algorithm.correction.max={}"
    ),
    "loss_fn.sequence_level_importance_ratios": Equivalent(
        "algorithm.objective.level=sequence", values={"false": "algorithm.objective.level=token"}, default=False
    ),
    "loss_fn.token_level_loss": Equivalent(
        "algorithm/aggregate=token_mean",
        values={"false": "algorithm/aggregate=sequence_mean"},
        default=True,
        why="algorithm=grpo averages each completion first, as the GRPO paper does; algorithm=dapo has the token mean",
    ),
    "policy.model_name": default("Qwen/Qwen2.5-1.5B", MODEL, "the default model here is a tiny built-in one"),
    "policy.tokenizer.name": nothing("${policy.model_name}", "the tokenizer is the model's"),
    "policy.train_global_batch_size": Equivalent(
        "", "train.minibatches=N updates a pass: completions of a step / train_global_batch_size", default=512
    ),
    "policy.train_micro_batch_size": default(4, MEMORY),
    "policy.generation_batch_size": nothing(32, "engine.max_rows bounds engine=transformers"),
    "policy.logprob_batch_size": default(4, MEMORY),
    "policy.logprob_chunk_size": nothing(None, "log-probs are always computed in chunks"),
    "policy.max_total_sequence_length": Equivalent(
        "", "rollout.max_prompt_tokens + rollout.max_completion_tokens", default=512, why="512 + 256 here"
    ),
    "policy.precision": default("bfloat16", "model.dtype={}", "auto here: the faster dtype of this machine"),
    "policy.max_grad_norm": default(1.0, "optim.max_grad_norm={}"),
    "policy.optimizer.name": Equivalent("optim=adamw", default="torch.optim.AdamW"),
    "policy.optimizer.kwargs.lr": default(5e-6, "optim.lr={}", "1e-6 here, as in the GRPO paper and TRL"),
    "policy.optimizer.kwargs.weight_decay": default(0.01, "optim.weight_decay={}", "0 here, as in TRL"),
    "policy.optimizer.kwargs.betas": default([0.9, 0.999], "optim.betas={}"),
    "policy.optimizer.kwargs.eps": default(1e-8, "optim.eps={}"),
    "policy.scheduler": Equivalent("", "optim.warmup_steps=N and optim.schedule=NAME", default=UNSTATED),
    "policy.generation.backend": Equivalent(
        "engine={}",
        values={"hf": "engine=transformers", "sglang": "engine=vllm"},
        default="vllm",
        why="engine=auto takes vLLM where it is installed with a GPU, except for short runs",
    ),
    "policy.generation.max_new_tokens": default("${policy.max_total_sequence_length}", LENGTH, "256 here"),
    "policy.generation.temperature": default(1.0, "rollout.temperature={}"),
    "policy.generation.top_p": default(1.0, "rollout.top_p={}"),
    "policy.generation.top_k": Equivalent("rollout.top_k={}", values={"none": "rollout.top_k=0"}, default=None),
    "policy.generation.stop_strings": Equivalent("rollout.stop={}", values={"none": "rollout.stop=[]"}, default=None),
    "policy.generation.stop_token_ids": missing(None, "completions end at the model's own end tokens or rollout.stop"),
    "policy.generation.vllm_cfg.tensor_parallel_size": default(1, "engine=vllm engine.tensor_parallel={}"),
    "policy.generation.vllm_cfg.pipeline_parallel_size": missing(1, "a server splits layers, not stages"),
    "policy.generation.vllm_cfg.expert_parallel_size": Equivalent(
        "", "engine.vllm_args.enable_expert_parallel=true", default=1
    ),
    "policy.generation.vllm_cfg.gpu_memory_utilization": default(
        0.6, "engine=vllm engine.gpu_memory_utilization={}", "null: 0.9 of a server's own GPUs, 0.4 of shared ones"
    ),
    "policy.generation.vllm_cfg.max_model_len": default(
        "${policy.max_total_sequence_length}", "engine=vllm engine.max_model_len={}", "as many as the run needs"
    ),
    "policy.generation.vllm_cfg.enforce_eager": default(
        False, "engine=vllm engine.enforce_eager={}", "null here: no compilation on a CPU only"
    ),
    "policy.generation.vllm_cfg.async_engine": nothing(False, "the server is vLLM's, which is asynchronous"),
    "policy.generation.vllm_cfg.precision": nothing("${policy.precision}", "the server has the dtype of the trainer"),
    "policy.generation.vllm_cfg.use_deep_gemm": missing(False, "vLLM chooses its own kernels"),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": missing(0, "weights are not quantized to 8 bit"),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": missing(0, "weights are not quantized to 8 bit"),
    "policy.generation.colocated.resources.gpus_per_node": Equivalent(
        "", "the GPUs that training leaves, hardware.processes=N, are the servers'", default=None
    ),
    "policy.generation.colocated.resources.num_nodes": Equivalent(
        "", "hardware=multinode: nodes beyond hardware.train_nodes sample", default=None
    ),
    "policy.generation.vllm_kwargs": Equivalent("", "each entry is engine.vllm_args.NAME=VALUE", default=UNSTATED),
    "policy.generation.colocated.enabled": default(
        True,
        Equivalent("engine=vllm_colocate", values={"false": "engine=vllm"}),
        "a separate server shares the trainer's GPU or has its own",
    ),
    "policy.dtensor_cfg.enabled": Equivalent(
        "hardware.parallel=fsdp2",
        values={"false": "hardware.parallel=ddp"},
        default=True,
        why="ddp here: nothing is sharded unless the memory needs it",
    ),
    "policy.dtensor_cfg.activation_checkpointing": default(False, "train.gradient_checkpointing={}"),
    "policy.dtensor_cfg.cpu_offload": missing(False, "weights stay on the GPU; hardware.parallel=fsdp2 shards them"),
    "policy.dtensor_cfg.sequence_parallel": missing(
        False, "it goes with tensor parallelism; hardware.context_parallel splits sequences"
    ),
    "policy.dtensor_cfg.tensor_parallel_size": missing(1, "training shards with fsdp2, not by tensors"),
    "policy.dtensor_cfg.context_parallel_size": default(1, "hardware.context_parallel={}"),
    "policy.dtensor_cfg._v2": nothing(True, "hardware.parallel=fsdp2 is torch's own"),
    "policy.dtensor_cfg.custom_parallel_plan": missing(None, "training shards with fsdp2, not by tensors"),
    "policy.megatron_cfg": missing(UNSTATED, NO_MEGATRON),
    "policy.make_sequence_length_divisible_by": nothing(
        "${policy.dtensor_cfg.tensor_parallel_size}", "hardware.context_parallel fills up what it splits"
    ),
    "policy.optimizer.kwargs.foreach": nothing(False, "optim=adamw is fused where the device has it"),
    "policy.optimizer.kwargs.fused": nothing(False, "optim=adamw is fused where the device has it"),
    "policy.dynamic_batching.enabled": nothing(False, "micro-batches are filled up to train.micro_batch_tokens"),
    "policy.dynamic_batching.train_mb_tokens": nothing(
        "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
        "micro-batches are filled up to train.micro_batch_tokens",
    ),
    "policy.dynamic_batching.logprob_mb_tokens": replace(
        MEMORY, default="${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}"
    ),
    "policy.dynamic_batching.sequence_length_round": nothing(64, "rows are not padded to a multiple"),
    "policy.sequence_packing.enabled": default(True, "train.packed={}"),
    "policy.sequence_packing.logprob_mb_tokens": replace(
        MEMORY, default="${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}"
    ),
    "policy.sequence_packing.algorithm": nothing(
        "modified_first_fit_decreasing", "the order of rows in a micro-batch never changes the gradient"
    ),
    "policy.sequence_packing.sequence_length_round": nothing(64, "rows are not padded to a multiple"),
    "policy.sequence_packing.train_mb_tokens": default(
        "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
        "train.micro_batch_tokens={}",
        "8192 here",
    ),
    "data.dataset_name": Equivalent(
        "", "task=gsm8k, math, ..., or task=hub task.path=OWNER/NAME", default="OpenMathInstruct-2"
    ),
    "data.train_data_path": Equivalent("task=jsonl task.path={}"),
    "data.val_data_path": Equivalent("task=jsonl task.eval_path={}"),
    "data.input_key": Equivalent("task.prompt_column={}"),
    "data.output_key": Equivalent("task.answer_column={}"),
    "data.train_split": Equivalent("task.split={}"),
    "data.val_split": Equivalent("task.eval_split={}"),
    "data.max_input_seq_length": default(
        "${policy.max_total_sequence_length}", "rollout.max_prompt_tokens={}", "512 here"
    ),
    "data.prompt_file": Equivalent(
        "", "task.prompt_template with the column in {braces} in place of {}", default="examples/prompts/cot.txt"
    ),
    "data.system_prompt_file": Equivalent("", "task.system_prompt is the text itself", default=None),
    "data.shuffle": Equivalent(
        "", "true is the default: every epoch has its own order, a function of seed", ORDERS, default=True
    ),
    "env.math.num_workers": default(8, "reward=[math] reward.math.workers={}", "0 here: one for each core"),
    "env.math.math_verify_impl": Equivalent(
        "reward=[math]", "it is math-verify with the answer's form checked as well", default="hf_math_verify"
    ),
    "checkpointing.enabled": default(True, Equivalent("", "checkpoint.every=0 saves only at the end")),
    "checkpointing.checkpoint_dir": default("results/grpo", "hydra.run.dir={}", "runs/DATE/TIME here"),
    "checkpointing.save_period": default(10, "checkpoint.every={}", "20 here"),
    "checkpointing.keep_top_k": default(
        3, Equivalent("checkpoint.keep={}", "the newest, not the best"), "2 here, the newest"
    ),
    "checkpointing.metric_name": missing("val_reward", "the newest checkpoints are kept, not the best"),
    "checkpointing.higher_is_better": missing(True, "the newest checkpoints are kept, not the best"),
    "checkpointing.checkpoint_must_save_by": Equivalent(
        "", "hydra.launcher.signal_before=SECONDS saves before a SLURM job's time limit", default=None
    ),
    "checkpointing.model_save_format": nothing("safetensors", "models are Hugging Face folders with safetensors"),
    "checkpointing.save_consolidated": nothing(False, "a checkpoint's model is a Hugging Face folder"),
    "logger.log_dir": nothing("logs", "everything of a run is in its folder, hydra.run.dir"),
    "logger.wandb_enabled": Equivalent("tracker=wandb", values={"false": "tracker=none"}, default=False),
    "logger.tensorboard_enabled": Equivalent("tracker=tensorboard", values={"false": "tracker=none"}, default=False),
    "logger.mlflow_enabled": Equivalent("tracker=mlflow", values={"false": "tracker=none"}, default=False),
    "logger.swanlab_enabled": Equivalent("tracker=swanlab", values={"false": "tracker=none"}, default=False),
    "logger.wandb.project": default("grpo-dev", "tracker=wandb tracker.project={}", "grpocli here"),
    "logger.wandb.name": nothing("grpo-dev-logger", "a run is called after its folder, hydra.run.dir"),
    "logger.tensorboard": nothing(UNSTATED, "tracker=tensorboard writes into the run's folder"),
    "logger.mlflow.experiment_name": default("grpo-dev", "tracker=mlflow tracker.project={}", "grpocli here"),
    "logger.mlflow.run_name": nothing("grpo-dev-logger", "a run is called after its folder, hydra.run.dir"),
    "logger.gpu_monitoring": missing(UNSTATED, "memory and times are metrics; a GPU's load is not"),
    "logger.num_val_samples_to_print": nothing(0, SHOWN),
    "logger.monitor_gpus": missing(True, "memory and times are metrics; a GPU's load is not"),
    "cluster.gpus_per_node": Equivalent("", "hardware.processes=N, by default all GPUs", default=1),
    "cluster.num_nodes": Equivalent("", "hardware=multinode hardware.train_nodes=N", default=1),
}
"""Keys of NeMo RL's examples/configs/grpo_math_1B.yaml, with its values as defaults, and a few beside them."""
