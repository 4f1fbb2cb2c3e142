"""TRL's settings as overrides: the same objective, batches and schedule, with TRL's defaults written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from grpocli.training.optim import SCHEDULES
from grpocli.types import DTYPES
from grpocli_tools.porting.foreign_names import (
    ALIASES,
    GRPO_CONFIG,
    LORA_CONFIG,
    TRAINER,
    TRAINING_ARGUMENTS,
    TRANSLATION,
    TRL,
    UNSTATED,
    without_effect,
)
from grpocli_tools.porting.port import HALVES, MISSING, Port, Unread, with_numbers
from grpocli_tools.porting.script import ScriptSource
from grpocli_tools.porting.trl_data import set_data, set_rewards

DEFAULTS = {n: e.default for n, e in (GRPO_CONFIG | TRAINING_ARGUMENTS).items() if e.default is not UNSTATED}


class Translation:
    """Translates one source. processes: TRL's number of processes; prompts: those of the dataset; None if unknown.

    functions: the file that the script's functions are written to.
    """

    def __init__(
        self, source: ScriptSource, processes: int | None = None, prompts: int | None = None, functions: str = ""
    ) -> None:
        self.source, self.processes, self.prompts, self.functions = source, processes, prompts, functions
        self.port = Port(notes=list(source.notes))
        self.settings = with_numbers(source.settings, DEFAULTS | dict.fromkeys(TRANSLATION["numbers"], 0), self.port)
        self.updates = 1

    def get(self, name: str) -> Any:
        """A setting, or TRL's default if it is not set or not a literal."""
        value = self.settings.get(name)
        return DEFAULTS.get(name) if value is None else value

    def given(self, name: str) -> Any:
        """A setting of the file; None if it is not set or not a literal."""
        return self.settings.get(name)

    def whole(self, name: str) -> int:
        return max(1, int(self.get(name)))

    def entries(self, name: str) -> Iterator[tuple[str, Any, str]]:
        """(key, value, name of the setting) of a dictionary."""
        entries = self.given(name)
        if isinstance(entries, dict) and entries:
            self.port.named.add(name)
            for key, value in entries.items():
                yield str(key), value, f"{name}.{key}"

    def translate(self) -> Port:
        self._model()
        self._lora()
        set_data(self.port, self.source)
        set_rewards(self.port, self.source, self.functions, self.given("reward_weights"))
        self._objective()
        self._parts()
        self._correction()
        self._batches()
        self._lengths()
        self._steps()
        self._optimizer()
        self._engine()
        self._kl()
        self._reports()
        self._rest()
        return self.port

    def _model(self) -> None:
        model = self.source.model
        if isinstance(model, str):
            self.port.set("model", "hf")
            self.port.set("model.path", model, "model", "model_name_or_path")
        else:
            self.port.set("model", MISSING, note="the model is not read")
            self.port.check("model", model, "it is not read; set model=OWNER/NAME yourself")
        for name in TRANSLATION["model"]:
            if self.given(name) is not None:
                self._model_key(name, self.given(name), name)
        if half := next((name for name in HALVES if self.given(name)), ""):
            self.port.set("model.dtype", HALVES[half], half)
        for key, value, name in self.entries("model_init_kwargs"):
            if value is None or key in ("device_map", "use_cache"):
                self.port.skip(name, value, "devices and caches are the engine's and the trainer's")
            elif key in TRANSLATION["model"]:
                self._model_key(key, value, name)
            else:
                self.port.lack(name, value, "models are loaded without this argument")
        for key, value, name in self.entries("chat_template_kwargs"):
            self.port.set(f"model.chat_template_arguments.{key}", value, name)

    def _model_key(self, key: str, value: Any, name: str) -> None:
        if TRANSLATION["model"][key] == "dtype" and value not in ("auto", *DTYPES):
            self.port.set("model.dtype", "bfloat16", name, note=f"training has no {value}")
        elif key != "revision" or value != "main":
            self.port.set(f"model.{TRANSLATION['model'][key]}", value, name)

    def _lora(self) -> None:
        lora = self.source.lora
        if lora is None and self.given("use_peft"):
            self.port.set("model.lora.rank", self.given("lora_r") or 16, "use_peft", "lora_r")
            self.port.set("model.lora.alpha", self.given("lora_alpha") or 32, "lora_alpha")
        if lora is None:
            return
        for name in dict.fromkeys(["r", "lora_alpha", "target_modules", *lora]):
            here = LORA_CONFIG.get(name) or ALIASES.get(name)
            if here and name not in lora and here.default is not None:
                self.port.set(here.keys[0], here.default, name)
            elif name in lora:
                self.port.carry(name, lora[name], here)

    def _objective(self) -> None:
        port, loss, low = self.port, str(self.get("loss_type")), self.get("epsilon")
        high = self.given("epsilon_high") or low
        known = TRL["loss_type"].values
        if loss not in known or (loss == "cispo" and high < 1):
            port.lack("loss_type", loss, f"GRPO's clipped objective, with epsilon_high={high:g}, is used instead")
            loss = "dapo" if loss == "cispo" else "grpo"
        for override in known[loss].split():
            key, _, value = override.partition("=")
            port.set(key, value, "loss_type", note=loss)
        if self.get("importance_sampling_level") != "token" or "algorithm.objective.level" in port.lines:
            port.set("algorithm.objective.level", self.get("importance_sampling_level"), "importance_sampling_level")
        if loss == "sapo":
            for ours, theirs in (("positive", "pos"), ("negative", "neg")):
                name = f"sapo_temperature_{theirs}"
                port.set(f"algorithm.objective.tau_{ours}", self.get(name), name)
            return
        if loss == "cispo":
            port.set("algorithm.objective.high", high - 1, "epsilon_high", note="TRL's bound is 1 + high")
            if "epsilon" in self.settings:
                port.skip("epsilon", low, "cispo has an upper bound alone")
            return
        for key, value, name in (("low", low, "epsilon"), ("high", high, "epsilon_high")):
            if value != 0.2:
                port.set(f"algorithm.objective.{key}", value, name)

    def _parts(self) -> None:
        port = self.port
        scale = TRL["scale_rewards"].values.get(str(self.get("scale_rewards")).lower(), "")
        if scale.endswith(("=batch_std", "=center")):
            port.set(*scale.split("="), "scale_rewards")
        if self.get("beta"):
            port.set("algorithm.kl.beta", self.get("beta"), "beta")
            port.set("algorithm.kl.on_policy", bool(self.get("use_bias_correction_kl")), "use_bias_correction_kl")
        else:
            port.set("algorithm/kl", "none", "beta", note="0")

    def _kl(self) -> None:
        """The moving reference, whose period counts updates in TRL."""
        port = self.port
        if self.get("beta") and self.get("sync_ref_model"):
            every = max(1, self.whole("ref_model_sync_steps") // self.updates)
            port.set("algorithm.kl.sync_every", every, "sync_ref_model", "ref_model_sync_steps")
            port.set("algorithm.kl.sync_alpha", self.get("ref_model_mixup_alpha"), "ref_model_mixup_alpha")
        elif self.get("beta") and "sync_ref_model" in self.settings:
            port.skip("sync_ref_model", False, "the reference stays, as it does here")

    def _correction(self) -> None:
        port, mode = self.port, str(self.get("vllm_importance_sampling_mode"))
        if not self.get("use_vllm"):
            return
        if not self.get("vllm_importance_sampling_correction"):
            port.set("algorithm/correction", "none", "vllm_importance_sampling_correction", note="false")
            return
        name = "vllm_importance_sampling_mode"
        token = mode if mode.startswith("token_") else "token_truncate"
        port.set("algorithm/correction", token, "vllm_importance_sampling_correction", name, note=mode)
        names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        bound = self.given(names[1]) or self.settings.get(names[0], DEFAULTS[names[0]])
        port.set("algorithm.correction.max", 1e9 if bound is None else bound, *names)
        if token != mode:
            port.lack(name, mode, f"its ratio is a product over tokens; {token} is the nearest")

    def _batches(self) -> None:
        port, processes = self.port, self.processes or 1
        group, accumulate = self.whole("num_generations"), self.whole("gradient_accumulation_steps")
        micro = self.whole("per_device_train_batch_size") * processes
        batch = self.given("generation_batch_size")
        pieces = int(batch) // micro if batch else int(self.given("steps_per_generation") or accumulate)
        completions = micro * max(pieces, accumulate)
        if pieces > accumulate and pieces % accumulate:
            reason = f"it is not a multiple of the {accumulate} micro-batches of an update"
            port.lack("steps_per_generation", pieces, reason)
        if completions % group:
            port.check("num_generations", group, f"{completions} completions are no multiple of it; TRL refuses them")
        prompts = -(-completions // group)
        minibatches, epochs = min(max(1, pieces // accumulate), prompts), self.whole("num_iterations")
        self.updates = minibatches * epochs
        sums = f"{micro} x {max(pieces, accumulate)} / {group}, with {processes} process(es)"
        port.set("rollout.prompts_per_step", prompts, *TRANSLATION["batch"], note=sums)
        port.set("rollout.group_size", group, "num_generations")
        if given := [f"{name}={self.given(name)}" for name in TRANSLATION["batch"] if self.given(name) is not None]:
            port.nothing.append(f"{', '.join(given)}: rollout.prompts_per_step and train.minibatches follow from them")
        for key, value, name in (
            ("minibatches", minibatches, "steps_per_generation"),
            ("epochs", epochs, "num_iterations"),
        ):
            if value != 1:
                port.set(f"train.{key}", value, name)
        if self.processes is None:
            port.notes.append("this assumes that TRL ran in 1 process; --processes N sets another number")

    def _lengths(self) -> None:
        port, completion = self.port, self.whole("max_completion_length")
        port.set("rollout.max_completion_tokens", completion, "max_completion_length")
        total, prompt = self.given("max_seq_length"), self.given("max_prompt_length")
        if prompt:
            note = "TRL cuts prompts from the left"
            port.set("rollout.max_prompt_tokens", int(prompt), "max_prompt_length")
            port.set("rollout.long_prompts", "truncate", "max_prompt_length", note=note)
            if total is not None:
                port.skip("max_seq_length", total, "a completion has room after every prompt")
        elif total and total > completion:
            prompt = total - completion
            port.set("rollout.max_prompt_tokens", int(prompt), "max_seq_length")
        else:
            port.notes.append("prompts over rollout.max_prompt_tokens=512 are dropped; TRL has no limit")
        if (tokens := int(prompt or 512) + completion) > 8192:
            port.set("train.micro_batch_tokens", tokens, note="a micro-batch holds whole completions")
        for key, value, name in self.entries("generation_kwargs"):
            if ours := TRANSLATION["generation"].get(key):
                listed = [value] if ours == "stop" and isinstance(value, str) else value
                port.set(f"rollout.{ours}", listed, name)
            else:
                port.lack(name, value, "rollout has no such key")

    def _steps(self) -> None:
        port, most, prompts = self.port, int(self.get("max_steps")), self.port.value("rollout.prompts_per_step")
        unread, epochs = self.source.settings.get("num_train_epochs"), self.get("num_train_epochs")
        if most > 0:
            port.set("train.steps", math.ceil(most / self.updates), "max_steps", note=f"{most} updates")
            if "num_train_epochs" in self.settings:
                port.skip("num_train_epochs", epochs, "max_steps replaces it")
            return
        if "max_steps" in self.settings:
            port.skip("max_steps", most, "num_train_epochs says how long TRL trains")
        if self.prompts and not {"max_steps", "num_train_epochs"} & self._unread():
            steps = max(1, math.ceil(epochs * (self.prompts // prompts)))
            port.set("train.steps", steps, "num_train_epochs", note=f"{epochs:g} x {self.prompts} prompts")
            return
        port.set("train.steps", MISSING, note="the number of steps is not known")
        if isinstance(unread, Unread):
            port.check(
                "num_train_epochs", unread, f"it is not a literal; train.steps is its value x prompts / {prompts}"
            )
        elif "max_steps" not in self._unread():
            sums = f"train.steps={epochs:g} x prompts / {prompts}"
            port.check("num_train_epochs", f"{epochs:g}", f"{sums}; give the number of its prompts with --prompts N")

    def _optimizer(self) -> None:
        port, name, schedule = self.port, str(self.get("optim")), str(self.get("lr_scheduler_type"))
        port.set("optim.lr", self.get("learning_rate"), "learning_rate")
        betas = [self.get("adam_beta1"), self.get("adam_beta2")]
        if betas != [0.9, 0.999]:
            port.set("optim.betas", betas, "adam_beta1", "adam_beta2")
        if name in TRANSLATION["optimizers"]:
            port.set("optim", TRANSLATION["optimizers"][name], "optim")
        elif name.startswith("paged_adamw"):
            chosen = "adamw_8bit" if name.endswith("8bit") else "adamw"
            port.lack("optim", name, f"optim={chosen} is used instead, with its state in the device's memory")
            port.set("optim", chosen)
        elif not name.startswith("adamw_torch"):
            port.lack("optim", name, "optim=adamw in float32 is used instead")
        schedule = schedule.removesuffix("_with_warmup")
        if schedule not in SCHEDULES:
            port.lack("lr_scheduler_type", schedule, "cosine is used instead")
        port.set("optim.schedule", schedule if schedule in SCHEDULES else "cosine", "lr_scheduler_type")
        self._warmup()

    def _warmup(self) -> None:
        port, steps, warmup = self.port, self.port.value("train.steps"), self.get("warmup_steps")
        ratio = self.given("warmup_ratio") or (warmup if warmup < 1 else 0)
        if ratio and steps == MISSING:
            sums = f"optim.warmup_steps={ratio} x train.steps x {self.updates}"
            port.check("warmup_ratio", ratio, f"{sums}; set it with train.steps")
        elif ratio:
            warmed = math.ceil(ratio * steps * self.updates)
            port.set("optim.warmup_steps", warmed, "warmup_ratio", note=f"{ratio} of the updates")
        elif warmup:
            port.set("optim.warmup_steps", int(warmup), "warmup_steps")
        elif self.given("warmup_ratio") is not None:
            port.skip("warmup_ratio", self.given("warmup_ratio"), "there is no warm-up, as here")

    def _engine(self) -> None:
        port, mode = self.port, str(self.get("vllm_mode"))
        if not self.get("use_vllm"):
            return
        server = mode == "server"
        port.set("engine", "vllm" if server else "vllm_colocate", "use_vllm", "vllm_mode", note=mode)
        host, number = self.given("vllm_server_host"), self.given("vllm_server_port")
        url = self.given("vllm_server_base_url")
        if (host or number) and not url:
            url = f"http://{host or '127.0.0.1'}:{number or 8000}"
        if server and url:
            port.set("engine.base_url", url, "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
            model = self.source.model if isinstance(self.source.model, str) else "MODEL"
            start = f"grpocli vllm-serve model={model} port={str(url).rpartition(':')[2]}"
            port.check("engine.base_url", url, f"start the server first: {start}")

    def _reports(self) -> None:
        """Checkpoints, evaluations and trackers, whose periods count updates in TRL."""
        port, saves, evaluates = self.port, str(self.get("save_strategy")), str(self.get("eval_strategy"))
        if saves == "no":
            port.set("checkpoint.every", 0, "save_strategy", note="no; the end is always saved")
        elif saves != "steps":
            port.check("save_strategy", saves, "set checkpoint.every=N, which counts steps")
        elif {"save_steps", "save_strategy"} & set(self.settings):
            every = max(1, self.whole("save_steps") // self.updates)
            port.set("checkpoint.every", every, "save_strategy", "save_steps")
        if evaluates == "no":
            port.set("eval.problems", 0, "eval_strategy", note="no")
        elif self.given("eval_steps"):
            every = max(1, self.whole("eval_steps") // self.updates)
            port.set("eval.every", every, "eval_strategy", "eval_steps")
        report = self.given("report_to")
        trackers = [str(one) for one in (report if isinstance(report, list) else [report]) if one is not None]
        chosen = [one for one in trackers if one not in ("none", "all")]
        if trackers:
            port.set("tracker", chosen[0] if chosen else "none", "report_to", note="" if chosen else trackers[0])
        if len(chosen) > 1:
            port.lack("report_to", chosen[1:], "a run has one tracker, and metrics.jsonl")

    def _rest(self) -> None:
        """Carry over, or name, every setting that nothing has named so far."""
        for name in ("gradient_checkpointing", "seed"):
            self.port.carry(name, self.get(name), TRL[name])
        for name, value in self.source.settings.items():
            if not isinstance(value, Unread) and (reason := without_effect(name, self._effective)):
                if name not in self.port.named | self.port.remarked:
                    self.port.skip(name, value, reason)
            else:
                self.port.carry(name, self.settings.get(name, value), TRL.get(name) or ALIASES.get(name))
        for name, value in self.source.ignored.items():
            self.port.carry(name, value, TRAINER.get(name) or TRL.get(name) or ALIASES.get(name))
        unread = self._unread()
        for key, line in self.port.lines.items():
            if names := [name for name in line.names if name in unread]:
                note = f"TRL's default, since {names[0]} is not read"
                self.port.lines[key] = replace(line, names=(), note=note)

    def _unread(self) -> set[str]:
        return {name for name, value in self.source.settings.items() if isinstance(value, Unread)}

    def _effective(self, name: str) -> Any:
        """A setting; TRL's LoRA needs use_peft to be given."""
        return self.given(name) if name == "use_peft" else self.get(name)
