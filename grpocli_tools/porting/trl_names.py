"""Names of TRL, transformers and PEFT, and other names that people type."""

from __future__ import annotations

from dataclasses import replace

from grpocli_tools.porting.equivalent import (
    ALGORITHMS,
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

COMPLETIONS = Equivalent(
    "",
    "rollout.prompts_per_step=N counts prompts, this counts completions: divide it by num_generations",
)
HUB = Equivalent("", "hub.push=OWNER/NAME pushes the finished run, with hub.checkpoints=true its checkpoints, too")
LOSSES = {
    "bnpo": ALGORITHMS["bnpo"],
    "cispo": "algorithm=grpo algorithm/objective=cispo algorithm/aggregate=token_mean",
    "dapo": "algorithm=grpo algorithm/aggregate=token_mean",
    "dr_grpo": "algorithm=grpo algorithm/aggregate=constant",
    "grpo": "algorithm=grpo",
    "luspo": "algorithm=grpo algorithm.objective.level=sequence algorithm/aggregate=token_sum",
    "sapo": "algorithm=grpo algorithm/objective=sapo",
}
"""TRL's `loss_type`, which is a part of the algorithm."""
LOSS = (
    "loss_type is the loss alone; the whole methods of the papers are algorithm=dapo, algorithm=drgrpo; "
    "add algorithm/kl=none for beta=0, TRL's default"
)
ADVANTAGES = {
    "true": "algorithm/advantage=std",
    "group": "algorithm/advantage=std",
    "batch": "algorithm/advantage=batch_std",
    "false": "algorithm/advantage=center",
    "none": "algorithm/advantage=center",
}
ENGINES = {"true": "engine=vllm", "false": "engine=transformers"}
VESPO = missing(UNSTATED, "VESPO's loss (loss_type=vespo) is not an objective here; take grpo, cispo or sapo")
ADAPTIVE = missing(UNSTATED, "the entropy bonus has a constant coefficient, algorithm.entropy.coefficient")
CUT = "the loss has the log-probs of the cut distribution here, those of the whole one in TRL"
OWN_BATCHES = "engine=transformers batches completions itself; engine=vllm is the fast way"

GRPO_CONFIG = {
    "learning_rate": default(1e-6, "optim.lr={}"),
    "remove_unused_columns": nothing(False, "rewards get every column that their signature names"),
    "model_init_kwargs": Equivalent(
        "", "its entries are keys: model.dtype, .attention, .revision, .trust_remote_code", default=None
    ),
    "trust_remote_code": default(False, "model.trust_remote_code={}"),
    "router_aux_loss_coef": default(
        None, "algorithm.router_aux_loss_coef={}", note="of each completion here, of a micro-batch in TRL"
    ),
    "disable_dropout": nothing(False, "training has no dropout, since the sampler has none"),
    "cast_lm_head_to_fp32": default(
        False,
        Equivalent(
            "model.head_dtype=float32",
            "in vLLM too: trainer and sampler then differ by a third less",
            values={"false": "model.head_dtype=null"},
        ),
    ),
    "num_generations": default(8, "rollout.group_size={}"),
    "num_generations_eval": default(
        None, "eval.samples={}", "TRL's default is num_generations; 4 here, and a greedy completion as well"
    ),
    "max_completion_length": default(512, LENGTH, "256 is enough for grade-school mathematics; state your own"),
    "ds3_gather_for_generation": nothing(True, "with hardware.parallel=zero3 completions come from engine=vllm"),
    "shuffle_dataset": Equivalent(
        "",
        "true is the default: every epoch has its own order, a function of seed; with false TRL leaves out the last "
        "rows of an epoch that do not fill a batch",
        ORDERS,
        default=True,
    ),
    "pad_to_multiple_of": nothing("auto", "rows are packed end to end (train.packed), so there is little padding"),
    "generation_batch_size": default(None, COMPLETIONS),
    "steps_per_generation": Equivalent(
        "train.minibatches={}", "divided by gradient_accumulation_steps, since TRL counts micro-batches", default=None
    ),
    "temperature": default(1.0, "rollout.temperature={}"),
    "top_p": default(1.0, "rollout.top_p={}", note=CUT),
    "top_k": default(0, "rollout.top_k={}", note=CUT),
    "min_p": default(None, Equivalent("rollout.min_p={}", CUT, {"none": "rollout.min_p=0.0"})),
    "generation_kwargs": Equivalent(
        "", "its entries are keys of rollout, such as rollout.stop; others have no counterpart", default=None
    ),
    "chat_template_kwargs": Equivalent("", "each entry is model.chat_template_arguments.NAME=VALUE", default=None),
    "repetition_penalty": default(
        1.0, "rollout.repetition_penalty={}", note="the loss has log-probs with the penalty here, without it in TRL"
    ),
    "cache_implementation": nothing(None, "engine=transformers has its own cache of keys and values"),
    "use_vllm": default(
        False,
        Equivalent("engine=vllm", "with TRL's default vllm_mode=colocate it is engine=vllm_colocate", values=ENGINES),
        "engine=auto takes vLLM where it is installed with a GPU, except for short runs, else engine=transformers",
    ),
    "vllm_mode": default("colocate", Equivalent("engine=vllm", values={"colocate": "engine=vllm_colocate"})),
    "vllm_model_impl": Equivalent(
        "engine=vllm engine.vllm_args.model_impl={}", values={"vllm": "engine=vllm"}, default="vllm"
    ),
    "vllm_enable_sleep_mode": default(
        False, "engine=vllm_colocate engine.sleep={}", "null here: memory is given back on GPUs"
    ),
    "vllm_structured_outputs_regex": default(None, "rollout.regex={}"),
    "vllm_server_base_url": default(
        None, "engine=vllm engine.base_url={}", note="a server of `grpocli vllm-serve`; without it the run starts one"
    ),
    "vllm_server_host": Equivalent(
        "", "engine.base_url=http://HOST:PORT is a server of `grpocli vllm-serve`", default="0.0.0.0"
    ),
    "vllm_server_port": Equivalent(
        "", "engine.base_url=http://HOST:PORT is a server of `grpocli vllm-serve`", default=8000
    ),
    "vllm_server_timeout": default(
        240.0, "engine=vllm engine.start_timeout={}", "600 s: a large model and vLLM's compilation take minutes"
    ),
    "vllm_group_port": nothing(51216, "sync=nccl finds a free port"),
    "vllm_gpu_memory_utilization": default(
        0.3,
        "engine=vllm engine.gpu_memory_utilization={}",
        "null: 0.9 of a server's own GPUs, 0.4 of GPUs that also train; 0.3 for engine=vllm_colocate",
    ),
    "vllm_max_model_length": default(None, "engine=vllm engine.max_model_len={}"),
    "vllm_tensor_parallel_size": default(1, "engine=vllm engine.tensor_parallel={}"),
    "beta": default(
        0.0,
        Equivalent("algorithm.kl.beta={}", "algorithm=dapo, drgrpo and dgpo also need algorithm/kl=k3"),
        "algorithm=grpo has the KL term of the GRPO paper; algorithm/kl=none is TRL's default",
    ),
    "num_iterations": default(1, "train.epochs={}"),
    "epsilon": default(0.2, "algorithm.objective.low={} algorithm.objective.high={}"),
    "delta": default(None, "algorithm.objective.delta={}"),
    "epsilon_high": default(
        None,
        Equivalent("algorithm.objective.high={}", "for loss_type=cispo TRL's bound is 1 + high of this one"),
        "as in TRL, except for algorithm=dapo, which has the paper's 0.28",
    ),
    "sapo_temperature_neg": default(1.05, "algorithm/objective=sapo algorithm.objective.tau_negative={}"),
    "sapo_temperature_pos": default(1.0, "algorithm/objective=sapo algorithm.objective.tau_positive={}"),
    "vespo_k_pos": replace(VESPO, default=2.0),
    "vespo_lambda_pos": replace(VESPO, default=3.0),
    "vespo_k_neg": replace(VESPO, default=3.0),
    "vespo_lambda_neg": replace(VESPO, default=2.0),
    "importance_sampling_level": default("token", "algorithm.objective.level={}"),
    "reward_weights": Equivalent("", "reward.NAME.weight=VALUE, for each", default=None),
    "multi_objective_aggregation": default(
        "sum_then_normalize", Equivalent("algorithm.combine={}", values={"sum_then_normalize": "algorithm.combine=sum"})
    ),
    "scale_rewards": default("group", Equivalent("algorithm/advantage=std", values=ADVANTAGES)),
    "loss_type": default(
        "dapo",
        Equivalent("algorithm={}", LOSS, LOSSES),
        "algorithm=grpo averages each completion first, as the GRPO paper does",
    ),
    "mask_truncated_completions": default(False, "algorithm.keep.mask_truncated={}"),
    "sync_ref_model": Equivalent("", "algorithm.kl.sync_every=N above 0 moves the reference", default=False),
    "ref_model_mixup_alpha": default(0.6, "algorithm.kl.sync_alpha={}"),
    "ref_model_sync_steps": default(
        512,
        Equivalent("algorithm.kl.sync_every={}", "it counts steps here and optimizer updates in TRL"),
        "0 here: the reference stays; TRL's number has no effect without sync_ref_model",
    ),
    "top_entropy_quantile": default(1.0, "algorithm/tokens=top_entropy algorithm.tokens.quantile={}"),
    "entropy_coef": default(0.0, "algorithm/entropy=bonus algorithm.entropy.coefficient={}"),
    "use_adaptive_entropy": replace(ADAPTIVE, default=False),
    "entropy_coef_min": replace(ADAPTIVE, default=0.0),
    "entropy_coef_max": replace(ADAPTIVE, default=1.0),
    "entropy_coef_delta": replace(ADAPTIVE, default=0.005),
    "entropy_target": replace(ADAPTIVE, default=0.2),
    "max_tool_calling_iterations": Equivalent(
        "", "task.environment.turns=N+1: the turns with calls and the one with the answer, 8 here", default=None
    ),
    "vllm_importance_sampling_correction": default(
        True,
        Equivalent("algorithm/correction=token_truncate", values={"false": "algorithm/correction=none"}),
        "a weight sync is verified, so on-policy completions need none; algorithm/correction=auto corrects stale ones",
    ),
    "vllm_importance_sampling_mode": default(
        "sequence_mask",
        Equivalent(
            "algorithm/correction={}",
            "TRL's sequence ratio is a product over tokens, here it is their geometric mean; token modes are equal",
        ),
        "a product of many ratios leaves hardly a long completion; token_truncate is the nearest",
    ),
    "vllm_importance_sampling_clip_max": default(
        3.0,
        "algorithm/correction=token_truncate algorithm.correction.max={}",
        "2 is the bound of the truncated importance sampling that the corrections are from",
    ),
    "vllm_importance_sampling_clip_min": default(
        None, "algorithm/correction=token_truncate algorithm.correction.min={}"
    ),
    "off_policy_mask_threshold": default(
        None,
        "algorithm.objective.drop_above={}",
        note="TRL compares with the sampler, here it is the old policy; algorithm/correction=sampler makes both one",
    ),
    "use_bias_correction_kl": default(
        True,
        "algorithm.kl.on_policy={}",
        "false here: the GRPO paper's estimate has no ratio; it matters only with a KL term",
    ),
    "log_completions": nothing(False, SHOWN),
    "log_multimodal": missing(True, "models are of text only"),
    "num_completions_to_print": nothing(None, SHOWN),
    "log_unique_prompts": nothing(False, SHOWN),
    "log_completions_hub_repo": nothing(None, "`grpocli rollouts RUN --export hub:OWNER/NAME` uploads them"),
    "use_transformers_continuous_batching": nothing(False, OWN_BATCHES),
    "transformers_continuous_batching_config": nothing(None, OWN_BATCHES),
    "use_transformers_paged": nothing(False, OWN_BATCHES),
    "vllm_importance_sampling_cap": default(
        None, "algorithm/correction=token_truncate algorithm.correction.max={}", note="TRL's former name of clip_max"
    ),
}
"""The fields that GRPOConfig of TRL 1.16 adds to TrainingArguments or gives another default."""

DIFFERENT_PRECISION = "auto here: the faster dtype of this machine; weights and optimizer state are float32 in both"
TRAINING_ARGUMENTS = {
    "output_dir": default(None, "hydra.run.dir={}", "runs/DATE/TIME here, so that no run overwrites another"),
    "per_device_train_batch_size": Equivalent(
        "",
        "rollout.prompts_per_step=N is the prompts of a step on all devices: this x gradient_accumulation_steps x "
        "processes / num_generations; train.micro_batch_tokens bounds memory",
        default=8,
    ),
    "gradient_accumulation_steps": default(1, MEMORY),
    "num_train_epochs": default(3.0, EPOCHS),
    "max_steps": Equivalent(
        "train.steps={}",
        "it counts optimizer updates in TRL: divide it by train.epochs x train.minibatches",
        default=-1,
        why="60 here, a number of steps instead of epochs",
    ),
    "lr_scheduler_type": default(
        "linear",
        Equivalent("optim.schedule={}", "those of transformers that follow no metric, after optim.warmup_steps"),
        "constant here, as in the papers of GRPO, DAPO and DGPO",
    ),
    "lr_scheduler_kwargs": Equivalent("", "each entry is optim.schedule_arguments.NAME=VALUE", default=None),
    "warmup_steps": default(0, "optim.warmup_steps={}"),
    "warmup_ratio": Equivalent(
        "", "optim.warmup_steps=N counts updates: train.steps x train.minibatches x train.epochs"
    ),
    "optim": default(
        "adamw_torch_fused",
        Equivalent("optim=adamw", "also adamw_8bit, muon, adafactor and sgd; paged ones are not there"),
    ),
    "optim_args": missing(None, "arguments are keys, such as optim.betas and optim.eps"),
    "weight_decay": default(0.0, "optim.weight_decay={}"),
    "adam_beta1": default(0.9, "optim.betas=[{},0.999]"),
    "adam_beta2": default(0.999, "optim.betas=[0.9,{}]"),
    "adam_epsilon": default(1e-8, "optim.eps={}"),
    "max_grad_norm": default(1.0, "optim.max_grad_norm={}"),
    "average_tokens_across_devices": nothing(True, "every denominator counts all processes"),
    "label_smoothing_factor": nothing(0.0, "it is for supervised training"),
    "bf16": default(
        None,
        Equivalent("model.dtype=bfloat16", values={"false": "model.dtype=float32"}),
        f"TRL takes bfloat16 unless fp16 is set; {DIFFERENT_PRECISION}",
    ),
    "fp16": default(
        False,
        Equivalent("model.dtype=float16", values={"false": ""}),
        "auto here: float16 on a GPU that has no bfloat16; losses are scaled in both",
    ),
    "tf32": missing(None, "matrix products are in model.dtype; torch's settings are left alone"),
    "gradient_checkpointing": default(
        True,
        "train.gradient_checkpointing={}",
        "false here: train.micro_batch_tokens bounds memory first, without computing twice",
    ),
    "gradient_checkpointing_kwargs": nothing(None, "it is the variant without re-entrance"),
    "torch_compile": default(
        False, "model.compile={}", "decoder layers, on a GPU with their attention; vLLM compiles its own"
    ),
    "use_liger_kernel": nothing(False, "log-probs are computed in chunks, without a table of all logits"),
    "torch_empty_cache_steps": nothing(None, "memory is bounded by train.micro_batch_tokens"),
    "auto_find_batch_size": nothing(
        False, "`grpocli plan` says whether a run fits, and train.micro_batch_tokens bounds it"
    ),
    "logging_steps": nothing(10, "every step is in RUN/metrics.jsonl and goes to the tracker"),
    "logging_first_step": nothing(False, "every step is in RUN/metrics.jsonl"),
    "logging_strategy": nothing("steps", "every step is in RUN/metrics.jsonl"),
    "logging_dir": nothing(UNSTATED, "metrics are in the run's folder"),
    "disable_tqdm": nothing(None, "the progress lines are in RUN/run.log too"),
    "report_to": default("none", "tracker={}"),
    "run_name": default(None, "hydra.run.dir=runs/{}"),
    "eval_strategy": Equivalent(
        "",
        "eval.every=N evaluates every N steps, besides before and after the run",
        default="no",
        why="accuracy is measured before and after the run here, on held-out prompts; eval.problems=0 is off",
    ),
    "eval_steps": default(None, Equivalent("eval.every={}", "it counts steps here and optimizer updates in TRL")),
    "eval_on_start": nothing(False, "every run with eval.problems above 0 begins with an evaluation"),
    "per_device_eval_batch_size": default(8, MEMORY),
    "save_strategy": default("steps", Equivalent("", "checkpoint.every=N saves every N steps")),
    "save_steps": default(
        500,
        Equivalent("checkpoint.every={}", "it counts steps here and optimizer updates in TRL"),
        "20 here: a step is many completions, and an exact resume loses no more",
    ),
    "save_total_limit": default(
        None, Equivalent("checkpoint.keep={}", values={"none": "checkpoint.keep=0"}), "2 here, all in TRL"
    ),
    "save_only_model": nothing(False, "a checkpoint has all training state; the final RUN/model has the model alone"),
    "push_to_hub": default(False, HUB),
    "hub_model_id": default(None, "hub.push={}"),
    "hub_strategy": default("every_save", HUB),
    "load_best_model_at_end": missing(False, "the final model is the last one; checkpoint.keep=0 keeps all"),
    "metric_for_best_model": missing(None, "the final model is the last one"),
    "seed": default(42, "seed={}", "0 here"),
    "data_seed": nothing(None, "seed is that of everything random, the order of prompts too"),
    "full_determinism": nothing(False, "runs on a CPU repeat to the bit; a GPU may sum in another order"),
    "use_cpu": default(False, Equivalent("", "hardware.device=cpu", {"true": "hardware.device=cpu"})),
    "dataloader_num_workers": nothing(0, "prompts are read in the trainer; rollout.max_staleness overlaps sampling"),
    "dataloader_drop_last": nothing(False, "steps run on across epochs, so nothing is dropped"),
    "ddp_timeout": default(1800, "hardware.timeout={}"),
    "fsdp": Equivalent("hardware.parallel=fsdp2", values={"none": ""}, default=None),
    "fsdp_config": Equivalent("hardware.parallel=fsdp2", values={"none": ""}, default=None),
    "deepspeed": Equivalent("hardware.parallel=zero2", "or zero3", {"none": ""}, default=None),
    "accelerator_config": nothing(None, "batches are not split by accelerate"),
    "resume_from_checkpoint": Equivalent(
        "", "resume=RUN continues from the newest checkpoint of a run's folder", default=None
    ),
}
"""Fields of transformers' TrainingArguments that people set, with TRL's defaults."""

MODEL_CONFIG = {
    "model_name_or_path": default(None, MODEL),
    "model_revision": default("main", "model.revision={}"),
    "dtype": default("float32", "model.dtype={}", DIFFERENT_PRECISION),
    "torch_dtype": Equivalent("model.dtype={}"),
    "attn_implementation": default(None, "model.attention={}"),
    "use_peft": default(False, Equivalent("model.lora.rank=16", values={"false": "model.lora.rank=0"})),
    "lora_r": default(16, "model.lora.rank={}", "0 here: without use_peft, TRL's number has no effect"),
    "lora_alpha": default(32, "model.lora.alpha={}"),
    "lora_dropout": missing(0.05, "LoRA has no dropout, since the sampler has none"),
    "lora_target_modules": default(
        None, "model.lora.target_modules={}", "all-linear here, PEFT's choice by model there"
    ),
    "lora_target_parameters": missing(None, "LoRA is added to linear layers"),
    "lora_modules_to_save": missing(None, "all other weights stay as they are"),
    "lora_task_type": nothing("CAUSAL_LM", "every policy is a causal language model"),
    "use_rslora": missing(False, "set model.lora.alpha to alpha x sqrt(rank), which is the same scale"),
    "use_dora": missing(False, "LoRA has no magnitudes"),
    "load_in_8bit": missing(False, "base weights have 4 bits or all: model.quantization=nf4"),
    "load_in_4bit": default(
        False, Equivalent("model.quantization=nf4", values={"false": "model.quantization=null"}), note="with model.lora"
    ),
    "bnb_4bit_quant_type": Equivalent("model.quantization={}", "the only type is nf4", default="nf4"),
    "use_bnb_nested_quant": missing(False, "scales are float32, since a mean of them depends on the number of threads"),
    "dataset_name": default(None, Equivalent("task=hub task.path={}", "task=jsonl for a file")),
    "dataset_config": default(None, "task.name={}"),
    "dataset_train_split": default("train", "task.split={}"),
    "dataset_test_split": default(
        "test", "task.eval_split={}", "null here: without it, prompts of the training split are held out"
    ),
    "dataset_streaming": default(False, "task=hub task.streaming={}"),
    "reward_model_name_or_path": default(None, "reward=[model] reward.model.path={}"),
    "reward_funcs": Equivalent(
        "", "reward=[FILE.py:NAME] uses your functions, reward=[math,format] built-in rewards", default=None
    ),
}
"""Fields of TRL's ModelConfig and ScriptArguments, which `trl grpo` reads beside GRPOConfig."""

TRAINER = {
    "model": MODEL,
    "args": Equivalent("", "the keys of this page"),
    "train_dataset": Equivalent("", "task=hub task.path=OWNER/NAME, task=jsonl task.path=FILE, or a task of grpocli"),
    "eval_dataset": Equivalent("", "task.eval_path=FILE or task.eval_split=NAME"),
    "processing_class": nothing(None, "the tokenizer is the model's; model.chat_template=FILE replaces its template"),
    "reward_processing_classes": nothing(None, "a reward model brings its tokenizer"),
    "callbacks": Equivalent(
        "", "callbacks=[FILE.py:CLASS], with a class derived from grpocli.Callback (docs/trackers.md)"
    ),
    "optimizers": missing(None, "optim=adamw is made from its keys"),
    "peft_config": Equivalent("", "model.lora.rank=R model.lora.alpha=A model.lora.target_modules=[...]"),
    "quantization_config": Equivalent("", "for 4 bits: model.quantization=nf4 with model.lora.rank", default=None),
    "tools": Equivalent("", "task.tools=[FILE.py:NAME,...], the same functions"),
    "rollout_func": Equivalent("", "task.environment.name=FILE.py:CLASS for several turns, or an engine of your own"),
    "environment_factory": Equivalent("", "task.environment.name=FILE.py:CLASS"),
}
"""Arguments of GRPOTrainer."""

LORA_CONFIG = {
    "r": default(8, "model.lora.rank={}", "0 here: all weights train"),
    "lora_alpha": default(8, "model.lora.alpha={}", "32 here, TRL's own default"),
    "target_modules": default(None, "model.lora.target_modules={}", "all-linear here, PEFT's choice by model there"),
    "lora_dropout": missing(0.0, "LoRA has no dropout, since the sampler has none"),
    "bias": missing("none", "biases are not trained with LoRA"),
    "task_type": nothing(None, "every policy is a causal language model"),
    "use_rslora": MODEL_CONFIG["use_rslora"],
    "use_dora": MODEL_CONFIG["use_dora"],
    "modules_to_save": MODEL_CONFIG["lora_modules_to_save"],
}
"""Arguments of PEFT's LoraConfig; `target_modules` and `r` are too general for the advice of the command line."""

TRL = GRPO_CONFIG | TRAINING_ARGUMENTS | MODEL_CONFIG

PAGE = "the run's folder has everything that is logged"
TEMPLATE = Equivalent("", "write the template to a file, and set model.chat_template=FILE")
END = Equivalent("", "set rollout.stop=[TEXT], or save the tokenizer with it beside the model: model.path=FOLDER")

EARLIER = {
    "chat_template": TEMPLATE,
    "eos_token": END,
    "eos_token_id": END,
    "max_prompt_length": Equivalent(
        "rollout.max_prompt_tokens={}",
        "TRL cut longer prompts from the left, as rollout.long_prompts=truncate does; they are dropped by default here",
        default=512,
    ),
    "vllm_device": nothing("auto", "hardware.rollout_devices says which GPUs sample"),
    "vllm_dtype": nothing("auto", "vLLM has the dtype of the policy, model.dtype"),
    "vllm_max_model_len": Equivalent("engine=vllm engine.max_model_len={}", default=None),
    "vllm_guided_decoding_regex": Equivalent("rollout.regex={}", default=None),
    "use_liger_loss": nothing(False, "log-probs are computed in chunks, without a table of all logits"),
    "evaluation_strategy": Equivalent("", "eval.every=N evaluates every N steps", default="no"),
    "overwrite_output_dir": nothing(False, "a run never overwrites another; resume=RUN continues one"),
    "do_train": nothing(False, "`grpocli train` trains"),
    "do_eval": nothing(
        False, "eval.problems above 0 evaluates before and after the run; `grpocli eval --run RUN` later"
    ),
    "save_safetensors": nothing(True, "models are Hugging Face folders with safetensors"),
    "group_by_length": nothing(False, "rows are packed end to end (train.packed)"),
    "log_level": nothing("passive", PAGE),
    "log_on_each_node": nothing(True, PAGE),
    "logging_nan_inf_filter": nothing(True, "metrics are logged as they are"),
    "dataloader_pin_memory": nothing(True, "prompts are read in the trainer"),
    "dataloader_prefetch_factor": nothing(None, "prompts are read in the trainer"),
    "dataloader_persistent_workers": nothing(False, "prompts are read in the trainer"),
    "ddp_find_unused_parameters": nothing(None, "every parameter that trains has a gradient"),
    "eval_accumulation_steps": nothing(None, "train.micro_batch_tokens bounds the memory"),
    "greater_is_better": missing(None, "the final model is the last one"),
    "hub_token": nothing(None, "the token is that of HF_TOKEN or `hf auth login`"),
    "hub_private_repo": Equivalent("hub.private={}"),
    "tokenizer": nothing(None, "the tokenizer is the model's; model.chat_template=FILE replaces its template"),
}
"""Fields of earlier versions of TRL and transformers, and others without a counterpart."""

ALIASES = EARLIER | {
    "batch_size": BATCH,
    "chat_template_path": Equivalent("model=hf model.chat_template={}"),
    "dataset": TRL["dataset_name"],
    "dataset_path": Equivalent("task=jsonl task.path={}"),
    "epochs": EPOCHS,
    "group_size": Equivalent("rollout.group_size={}"),
    "lora_rank": Equivalent("model.lora.rank={}"),
    "max_new_tokens": LENGTH,
    "max_tokens": LENGTH,
    "model_id": MODEL,
    "model_name": MODEL,
    "model_path": MODEL,
    "num_epochs": EPOCHS,
    "num_processes": Equivalent("hardware.processes={}"),
    "context_parallel_size": Equivalent("hardware.context_parallel={}"),
    "cp_size": Equivalent("hardware.context_parallel={}"),
    "sp_size": Equivalent("hardware.context_parallel={}"),
    "pretrained_model_name_or_path": MODEL,
    "stop_strings": Equivalent("rollout.stop={}"),
    "system_prompt": Equivalent("task.system_prompt={}"),
    "train_batch_size": BATCH,
    "train_file": Equivalent("task=jsonl task.path={}"),
    "random_state": nothing(UNSTATED, "seed is that of everything random"),
    "use_gradient_checkpointing": Equivalent(
        "train.gradient_checkpointing={}", values={"unsloth": "train.gradient_checkpointing=true"}
    ),
}
"""Other names that people type."""
