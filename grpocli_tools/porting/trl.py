"""TRL's settings as overrides: the same objective, batches and schedule, with TRL's defaults written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from grpocli.training.optim import SCHEDULES
from grpocli.types import DTYPES
from grpocli_tools.porting.accelerate import HALVES
from grpocli_tools.porting.equivalent import UNSTATED
from grpocli_tools.porting.source import ScriptSource, Unread, number_of
from grpocli_tools.porting.translation import MISSING, Numbers, Port
from grpocli_tools.porting.trl_data import set_data, set_rewards
from grpocli_tools.porting.trl_names import (
    ALIASES,
    GRPO_CONFIG,
    LORA_CONFIG,
    MODEL_CONFIG,
    TRAINER,
    TRAINING_ARGUMENTS,
    TRL,
)

DEFAULTS = {n: e.default for n, e in (GRPO_CONFIG | TRAINING_ARGUMENTS).items() if e.default is not UNSTATED}
OPTIMIZERS = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "sgd": "sgd"}
"""Names of transformers beside AdamW's own; adafactor is another implementation than torch's."""
PAGED = ("paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit")
CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "vespo")
NEEDS: tuple[tuple[tuple[str, ...], str, tuple[Any, ...]], ...] = (
    (("vllm_",), "use_vllm", (True,)),
    (("vllm_server_", "vllm_group_port"), "vllm_mode", ("server",)),
    (("vllm_enable_sleep_mode",), "vllm_mode", ("colocate",)),
    (
        ("vllm_importance_sampling_c", "vllm_importance_sampling_mode"),
        "vllm_importance_sampling_correction",
        (True,),
    ),
    (("sapo_",), "loss_type", ("sapo",)),
    (("vespo_",), "loss_type", ("vespo",)),
    (("epsilon", "importance_sampling_level"), "loss_type", (*CLIPPED, "cispo")),
    (("delta",), "loss_type", CLIPPED),
    (("entropy_coef_", "entropy_target"), "use_adaptive_entropy", (True,)),
    (("ref_model_",), "sync_ref_model", (True,)),
    (("lora_", "use_rslora", "use_dora"), "use_peft", (True,)),
    (("bnb_4bit_", "use_bnb_"), "load_in_4bit", (True,)),
    (("save_steps",), "save_strategy", ("steps",)),
    (("hub_",), "push_to_hub", (True,)),
)
"""(beginnings of names, another setting, values of it with which they have an effect)."""
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
"""The settings that prompts of a step follow from."""
MODEL_KEYS = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attention",
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
}


class Translation(Numbers):
    """Translates one source. processes: TRL's number of processes; prompts: those of the dataset; None if unknown.

    functions: the file that the script's functions are written to; "" for a config.
    """

    default_text = "TRL's default, {:g},"

    def __init__(
        self, source: ScriptSource, processes: int | None = None, prompts: int | None = None, functions: str = ""
    ) -> None:
        self.source, self.prompts, self.functions = source, prompts, functions
        self.processes, self.assumed = processes or 1, processes is None
        self.port = Port(notes=list(source.notes))
        self.updates = 1

    def get(self, name: str) -> Any:
        """A setting, or TRL's default if it is not set or not a literal."""
        value = self.source.settings.get(name, DEFAULTS.get(name))
        return DEFAULTS.get(name) if isinstance(value, Unread) else value

    def default(self, name: str) -> Any:
        return DEFAULTS[name]

    def given(self, name: str) -> Any:
        """A setting of the file; None if it is not set or not a literal."""
        value = self.source.settings.get(name)
        return None if isinstance(value, Unread) else value

    def optional(self, name: str) -> float | None:
        """A setting as a number; None if it is not set or not a number."""
        value = None if self.given(name) is None else number_of(self.given(name))
        if value is None and self.given(name) is not None:
            self.port.check(name, self.given(name), "it is not a finite number, and is left out")
        return value

    def translate(self) -> Port:
        self._model()
        self._lora()
        set_data(self.port, self.source)
        set_rewards(self.port, self.source, self.functions, self.given("reward_weights"))
        self._objective()
        self._clip()
        self._kl()
        self._parts()
        self._correction()
        self._batches()
        self._length()
        self._steps()
        self._optimizer()
        self._schedule()
        self._engine()
        self._checkpoints()
        self._evaluation()
        self._rest()
        self._report()
        return self.port

    def _model(self) -> None:
        model = self.source.model
        if isinstance(model, str):
            self.port.set("model", "hf")
            self.port.set("model.path", model, "model", "model_name_or_path")
        else:
            self.port.set("model", MISSING, note="the model is not read")
            self.port.check("model", model, "it is not read; set model=OWNER/NAME yourself")
        for name, key in MODEL_KEYS.items():
            if self.given(name) is not None:
                self._model_key(key, self.given(name), name)
        if half := next((name for name in HALVES if self.given(name)), ""):
            self.port.set("model.dtype", HALVES[half], half)
        self._mapping("model_init_kwargs", self._model_key_of)
        self._mapping(
            "chat_template_kwargs",
            lambda key, value, name: self.port.set(f"model.chat_template_arguments.{key}", value, name),
        )

    def _mapping(self, name: str, put: Any) -> None:
        """Translate each entry of a dictionary."""
        entries = self.given(name)
        if isinstance(entries, dict) and entries:
            self.port.named.add(name)
            for key, value in entries.items():
                put(str(key), value, f"{name}.{key}")

    def _schedule_argument(self, key: str, value: Any, name: str) -> None:
        number = number_of(value) if isinstance(value, str) else None  # YAML's 1e-7 is a text
        self.port.set(f"optim.schedule_arguments.{key}", value if number is None else number, name)

    def _model_key_of(self, key: str, value: Any, name: str) -> None:
        if value is None or key in ("device_map", "use_cache"):
            self.port.skip(name, value, "devices and caches are the engine's and the trainer's")
        elif key in MODEL_KEYS:
            self._model_key(MODEL_KEYS[key], value, name)
        else:
            self.port.lack(name, value, "models are loaded without this argument")

    def _model_key(self, key: str, value: Any, name: str) -> None:
        if key == "dtype" and value not in ("auto", *DTYPES):
            self.port.set("model.dtype", "bfloat16", name, note=f"training has no {value}")
        elif key != "revision" or value != "main":
            self.port.set(f"model.{key}", value, name)

    def _lora(self) -> None:
        lora = self.source.lora
        if lora is None and self.given("use_peft"):
            names = {n.removeprefix("lora_") if n != "lora_alpha" else n: n for n in MODEL_CONFIG if "lora" in n}
            lora = {"r": 16, "lora_alpha": 32}
            lora |= {ours: self.given(n) for ours, n in names.items() if self.given(n) is not None}
            self.port.named |= {"use_peft", *(n for n in names.values() if n in self.source.settings)}
            if lora.pop("dropout", None):
                self.port.lack("lora_dropout", self.given("lora_dropout"), MODEL_CONFIG["lora_dropout"].note)
        if lora is None:
            return
        keys = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
        for name in dict.fromkeys([*keys, *lora]):
            value = lora.get(name, LORA_CONFIG[name].default if name in LORA_CONFIG else None)
            if name in keys and not isinstance(value, Unread):
                if value is not None:
                    self.port.set(f"model.lora.{keys[name]}", value, name)
            else:
                self.port.carry(
                    name, value, LORA_CONFIG.get(name) or MODEL_CONFIG.get(f"lora_{name}") or ALIASES.get(name)
                )

    def _objective(self) -> None:
        port, loss = self.port, str(self.get("loss_type"))
        port.set("algorithm", "grpo", "loss_type", note=loss)
        if loss in ("dapo", "bnpo", "cispo"):
            port.set("algorithm/aggregate", "token_mean", "loss_type", note=loss)
        if loss == "bnpo":
            port.set("algorithm.aggregate.scope", "micro_batch")
        if loss in ("dr_grpo", "luspo"):
            port.set("algorithm/aggregate", "constant", "loss_type", note=loss)
        if loss == "luspo":
            port.set("algorithm.aggregate.length", 1)
        if loss == "sapo":
            port.set("algorithm/objective", "sapo")
            for ours, theirs in (("positive", "pos"), ("negative", "neg")):
                name = f"sapo_temperature_{theirs}"
                port.set(f"algorithm.objective.tau_{ours}", self.number(name), name)

    def _clip(self) -> None:
        loss, low = str(self.get("loss_type")), self.number("epsilon")
        high = self.optional("epsilon_high") or low
        if loss == "cispo" and high >= 1:
            self.port.set("algorithm/objective", "cispo", note="TRL's bound is 1 + high")
            self.port.set("algorithm.objective.high", high - 1, "epsilon_high")
            if "epsilon" in self.source.settings:
                self.port.skip("epsilon", low, "cispo has an upper bound alone")
        elif loss != "sapo":
            if loss not in CLIPPED or loss == "vespo":
                self.port.lack(
                    "loss_type", loss, f"GRPO's clipped objective, with epsilon_high={high:g}, is used instead"
                )
            for key, value in (("low", low), ("high", high)):
                if value != 0.2:
                    self.port.set(f"algorithm.objective.{key}", value, "epsilon" if key == "low" else "epsilon_high")
            if self.get("delta") is not None:
                self.port.set("algorithm.objective.delta", self.get("delta"), "delta")
            if self.get("off_policy_mask_threshold") is not None:
                threshold = self.number("off_policy_mask_threshold")
                self.port.set("algorithm.objective.drop_above", threshold, "off_policy_mask_threshold")
            if self.get("importance_sampling_level") != "token":
                self.port.set(
                    "algorithm.objective.level", self.get("importance_sampling_level"), "importance_sampling_level"
                )

    def _kl(self) -> None:
        port, beta = self.port, self.number("beta")
        if not beta:
            port.set("algorithm/kl", "none", "beta", note="0")
            for name in ("use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"):
                if name in self.source.settings and not isinstance(self.source.settings[name], Unread):
                    port.skip(name, self.get(name), "it has no effect without beta")
            return
        port.set("algorithm.kl.beta", beta, "beta")
        port.set("algorithm.kl.on_policy", bool(self.get("use_bias_correction_kl")), "use_bias_correction_kl")

    def _sync_reference(self) -> None:
        if self.number("beta") and self.given("sync_ref_model"):
            every = max(1, int(self.number("ref_model_sync_steps")) // self.updates)
            self.port.set("algorithm.kl.sync_every", every, "sync_ref_model", "ref_model_sync_steps")
            self.port.set("algorithm.kl.sync_alpha", self.number("ref_model_mixup_alpha"), "ref_model_mixup_alpha")
        elif "sync_ref_model" in self.source.settings and self.given("sync_ref_model") is False:
            self.port.skip("sync_ref_model", False, "the reference stays, as it does here")

    def _parts(self) -> None:
        port = self.port
        scale = str(self.get("scale_rewards")).lower()
        advantage = {"batch": "batch_std", "none": "center", "false": "center"}.get(scale)
        if advantage:
            port.set("algorithm/advantage", advantage, "scale_rewards")
        if self.get("multi_objective_aggregation") == "normalize_then_sum":
            port.set("algorithm.combine", "normalize_then_sum", "multi_objective_aggregation")
        if self.get("mask_truncated_completions"):
            port.set("algorithm.keep.mask_truncated", True, "mask_truncated_completions")
        if self.number("top_entropy_quantile") < 1:
            port.set("algorithm/tokens", "top_entropy")
            port.set("algorithm.tokens.quantile", self.number("top_entropy_quantile"), "top_entropy_quantile")
        if self.number("entropy_coef"):
            port.set("algorithm/entropy", "bonus")
            port.set("algorithm.entropy.coefficient", self.number("entropy_coef"), "entropy_coef")

    def _correction(self) -> None:
        port = self.port
        if not self.get("use_vllm"):
            return
        if not self.get("vllm_importance_sampling_correction"):
            port.set("algorithm/correction", "none", "vllm_importance_sampling_correction", note="false")
            return
        mode = str(self.get("vllm_importance_sampling_mode"))
        name = "vllm_importance_sampling_mode"
        token = mode if mode.startswith("token_") else "token_truncate"
        port.set("algorithm/correction", token, "vllm_importance_sampling_correction", name, note=mode)
        bound = self.given("vllm_importance_sampling_cap") or self.get("vllm_importance_sampling_clip_max")
        names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        port.set("algorithm.correction.max", 1e9 if bound is None else bound, *names)
        if token != mode:
            reason = f"its ratio is a product over tokens; {token} is the nearest"
            port.lack("vllm_importance_sampling_mode", mode, reason)

    def _batches(self) -> None:
        port = self.port
        group, accumulate = self.whole("num_generations"), self.whole("gradient_accumulation_steps")
        micro = self.whole("per_device_train_batch_size") * self.processes
        batch = self.optional("generation_batch_size")
        pieces = int(batch) // micro if batch else int(self.optional("steps_per_generation") or accumulate)
        completions = micro * max(pieces, accumulate)
        if pieces > accumulate and pieces % accumulate:
            port.lack(
                "steps_per_generation", pieces, f"it is not a multiple of the {accumulate} micro-batches of an update"
            )
        if completions % group:
            port.notes.append(
                f"{completions} completions are not a multiple of num_generations={group}; TRL refuses them"
            )
        prompts = -(-completions // group)
        updates = min(max(1, pieces // accumulate), prompts)
        epochs = self.whole("num_iterations")
        self.updates = updates * epochs
        sums = f"{micro} x {max(pieces, accumulate)} / {group}, with {self.processes} process(es)"
        port.set("rollout.prompts_per_step", prompts, *BATCH, note=sums)
        port.set("rollout.group_size", group, "num_generations")
        given = [f"{name}={self.given(name)}" for name in BATCH if self.given(name) is not None]
        if given:
            port.nothing.append(f"{', '.join(given)}: rollout.prompts_per_step and train.minibatches follow from them")
        for key, value, name in (
            ("minibatches", updates, "steps_per_generation"),
            ("epochs", epochs, "num_iterations"),
        ):
            if value != 1:
                port.set(f"train.{key}", value, name)
        if self.assumed:
            port.notes.append("this assumes that TRL ran in 1 process; --processes N sets another number")

    def _length(self) -> None:
        completion = int(self.number("max_completion_length"))
        self.port.set("rollout.max_completion_tokens", completion, "max_completion_length")
        total = self.optional("max_seq_length")
        prompt = self.optional("max_prompt_length") or (total - completion if total else None) or 512
        prompt = int(prompt) if prompt > 0 else 512
        if prompt != 512 or {"max_prompt_length", "max_seq_length"} & set(self.source.settings):
            name = "max_prompt_length" if self.given("max_prompt_length") else "max_seq_length"
            self.port.set("rollout.max_prompt_tokens", prompt, name)
            if name == "max_prompt_length":
                self.port.set(
                    "rollout.long_prompts", "truncate", "max_prompt_length", note="TRL cuts prompts from the left"
                )
            if name == "max_prompt_length" and total is not None:
                self.port.skip("max_seq_length", total, "a completion has room after every prompt")
        else:
            self.port.notes.append("prompts over rollout.max_prompt_tokens=512 are dropped; TRL has no limit")
        if prompt + completion > 8192:
            self.port.set("train.micro_batch_tokens", prompt + completion, note="a micro-batch holds whole completions")
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
            if self.number(name) != default:
                value = max(0, int(self.number(name))) if name == "top_k" else self.get(name)
                self.port.set(f"rollout.{name}", value, name, note=TRL[name].note)
        if self.get("min_p"):
            self.port.set("rollout.min_p", self.get("min_p"), "min_p", note=TRL["min_p"].note)
        self._mapping("generation_kwargs", self._generation)

    def _generation(self, key: str, value: Any, name: str) -> None:
        known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_strings")
        if key in known:
            listed = [value] if key.startswith("stop") and isinstance(value, str) else value
            self.port.set(f"rollout.{key.removesuffix('_strings')}", listed, name)
        elif key in ("max_new_tokens", "max_tokens"):
            self.port.set("rollout.max_completion_tokens", value, name)
        else:
            self.port.lack(name, value, "rollout has no such key")

    def _steps(self) -> None:
        most, prompts = int(self.number("max_steps")), int(self.port.value("rollout.prompts_per_step"))
        if most > 0:
            self.port.set("train.steps", math.ceil(most / self.updates), "max_steps", note=f"{most} updates")
            if self.given("num_train_epochs") is not None:
                self.port.skip("num_train_epochs", self.given("num_train_epochs"), "max_steps replaces it")
            return
        if self.given("max_steps") is not None:
            self.port.skip("max_steps", most, "num_train_epochs says how long TRL trains")
        if isinstance(unread := self.source.settings.get("num_train_epochs"), Unread):
            advice = f"it is not a literal; train.steps is its value x prompts / {prompts}"
            self.port.set("train.steps", MISSING, note="the epochs are not read")
            self.port.check("num_train_epochs", unread, advice)
            return
        if isinstance(self.source.settings.get("max_steps"), Unread):
            self.port.set("train.steps", MISSING, note="max_steps is not read")
            return
        epochs = self.number("num_train_epochs")
        if self.prompts:
            steps = math.ceil(epochs * (self.prompts // prompts))
            self.port.set("train.steps", max(1, steps), "num_train_epochs", note=f"{epochs:g} x {self.prompts} prompts")
        else:
            self.port.set("train.steps", MISSING, note="the number of prompts is not known")
            sums = f"train.steps={epochs:g} x prompts / {prompts}"
            self.port.check(
                "num_train_epochs", f"{epochs:g}", f"{sums}; give the number of its prompts with --prompts N"
            )

    def _optimizer(self) -> None:
        port = self.port
        port.set("optim.lr", self.number("learning_rate"), "learning_rate")
        for name, key in (
            ("weight_decay", "weight_decay"),
            ("adam_epsilon", "eps"),
            ("max_grad_norm", "max_grad_norm"),
        ):
            if self.number(name) != DEFAULTS[name]:
                port.set(f"optim.{key}", self.number(name), name)
        betas = [self.number("adam_beta1"), self.number("adam_beta2")]
        if betas != [0.9, 0.999]:
            port.set("optim.betas", betas, "adam_beta1", "adam_beta2")
        name = str(self.get("optim"))
        if name in OPTIMIZERS:
            port.set("optim", OPTIMIZERS[name], "optim")
        elif name in PAGED:
            chosen = "adamw_8bit" if name.endswith("8bit") else "adamw"
            port.lack("optim", name, f"optim={chosen} is used instead, with its state in the device's memory")
            port.set("optim", chosen)
        elif not name.startswith("adamw_torch"):
            port.lack("optim", name, "optim=adamw in float32 is used instead")

    def _schedule(self) -> None:
        port, schedule = self.port, str(self.get("lr_scheduler_type"))
        if schedule not in SCHEDULES:
            port.lack("lr_scheduler_type", schedule, "cosine is used instead, since it needs no metric")
        port.set("optim.schedule", schedule if schedule in SCHEDULES else "cosine", "lr_scheduler_type")
        if schedule in SCHEDULES:
            self._mapping("lr_scheduler_kwargs", self._schedule_argument)
        ratio = self.optional("warmup_ratio") or (self.number("warmup_steps") if self.number("warmup_steps") < 1 else 0)
        steps = port.value("train.steps")
        if ratio and steps != MISSING:
            port.set(
                "optim.warmup_steps",
                math.ceil(ratio * steps * self.updates),
                "warmup_ratio",
                note=f"{ratio} of the updates",
            )
        elif ratio:
            sums = f"optim.warmup_steps={ratio} x train.steps x {self.updates}"
            port.check("warmup_ratio", ratio, f"{sums}; set it with train.steps")
        elif self.number("warmup_steps"):
            port.set("optim.warmup_steps", int(self.number("warmup_steps")), "warmup_steps")
        elif "warmup_ratio" in self.source.settings and self.given("warmup_ratio") is not None:
            port.skip("warmup_ratio", self.given("warmup_ratio"), "there is no warm-up, as here")

    def _engine(self) -> None:
        port = self.port
        if not self.get("use_vllm"):
            return
        server = self.get("vllm_mode") == "server"
        port.set(
            "engine", "vllm" if server else "vllm_colocate", "use_vllm", "vllm_mode", note=str(self.get("vllm_mode"))
        )
        host, number = self.given("vllm_server_host"), self.given("vllm_server_port")
        if server and self.given("vllm_server_base_url"):
            port.set("engine.base_url", self.given("vllm_server_base_url"), "vllm_server_base_url")
        elif server and (host or number):
            address = f"http://{host or '127.0.0.1'}:{number or 8000}"
            port.set("engine.base_url", address, "vllm_server_host", "vllm_server_port")
        if server and port.value("engine.base_url"):
            model = self.source.model if isinstance(self.source.model, str) else "MODEL"
            start = f"grpocli vllm-serve model={model} port={str(port.value('engine.base_url')).rpartition(':')[2]}"
            port.check("engine.base_url", port.value("engine.base_url"), f"start the server first: {start}")

    def _checkpoints(self) -> None:
        strategy = str(self.get("save_strategy"))
        if strategy == "no":
            self.port.set("checkpoint.every", 0, "save_strategy", note="no; the end is always saved")
        elif strategy == "steps" and {"save_steps", "save_strategy"} & set(self.source.settings):
            every = max(1, int(self.number("save_steps")) // self.updates)
            self.port.set("checkpoint.every", every, "save_strategy", "save_steps")
        elif strategy != "steps":
            self.port.check("save_strategy", strategy, "set checkpoint.every=N, which counts steps")

    def _evaluation(self) -> None:
        strategy = str(self.get("eval_strategy"))
        if strategy == "no":
            self.port.set("eval.problems", 0, "eval_strategy", note="no")
            for name in ("eval_steps", "num_generations_eval"):
                if self.given(name) is not None:
                    self.port.skip(name, self.given(name), "it has no effect without eval_strategy")
        elif self.given("eval_steps"):
            every = max(1, int(self.number("eval_steps")) // self.updates)
            self.port.set("eval.every", every, "eval_strategy", "eval_steps")

    def _rest(self) -> None:
        port = self.port
        self._sync_reference()
        if self.get("gradient_checkpointing"):
            port.set("train.gradient_checkpointing", True, "gradient_checkpointing")
        port.set("seed", int(self.number("seed")), "seed")
        report = self.given("report_to")
        trackers = [str(one) for one in (report if isinstance(report, list) else [report]) if one is not None]
        chosen = [one for one in trackers if one not in ("none", "all")]
        if chosen:
            port.set("tracker", chosen[0], "report_to")
        elif trackers:
            port.set("tracker", "none", "report_to", note=trackers[0])
        if len(chosen) > 1:
            port.lack("report_to", chosen[1:], "a run has one tracker, and metrics.jsonl")
        if self.given("output_dir"):
            port.set("hydra.run.dir", str(self.given("output_dir")), "output_dir")

    def _report(self) -> None:
        """Carry over, or name, every setting that nothing has named so far."""
        for name, value in self.source.settings.items():
            if not isinstance(value, Unread) and (reason := self._without_effect(name)):
                if name not in self.port.named | self.port.remarked:
                    self.port.skip(name, value, reason)
                continue
            self.port.carry(name, value, TRL.get(name) or ALIASES.get(name))
        for name, value in self.source.ignored.items():
            self.port.carry(name, value, TRAINER.get(name) or TRL.get(name) or ALIASES.get(name))
        self._mark_defaults()

    def _mark_defaults(self) -> None:
        """Say in the comments where TRL's default stands for a setting that is not read."""
        unread = {name for name, value in self.source.settings.items() if isinstance(value, Unread)}
        for index, line in enumerate(self.port.lines):
            if names := [name for name in line.names if name in unread]:
                note = f"TRL's default, since {names[0]} is not read"
                self.port.lines[index] = replace(line, names=(), note=note)

    def _without_effect(self, name: str) -> str:
        """Why a setting has no effect beside the others; "" if it has one."""
        for beginnings, setting, values in NEEDS:
            value = self.given("use_peft") if setting == "use_peft" else self.get(setting)
            if name.startswith(beginnings) and name != setting and value not in values:
                return f"it has no effect with {setting}={value}"
        return ""
