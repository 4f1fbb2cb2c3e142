"""TRL's settings as overrides: the same objective, batches and schedule, with TRL's defaults written out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString

from grpocli.config.foreign_names import GRPO_CONFIG, LORA_CONFIG, TRAINING_ARGUMENTS, TRL, UNSTATED
from grpocli.porting.source import Data, RewardCall, Source, Unread
from grpocli.tracking.text import clean

DEFAULTS = {n: e.default for n, e in (GRPO_CONFIG | TRAINING_ARGUMENTS).items() if e.default is not UNSTATED}
BUILT_IN = {"accuracy_reward": "math", "think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}
"""TRL's reward functions."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
PLAIN = re.compile(r"[\w/.:+-]+")


@dataclass(frozen=True, slots=True)
class Line:
    """An override, and where it comes from."""

    key: str
    value: Any
    comment: str = ""

    @property
    def override(self) -> str:
        return f"{self.key}={hydra_value(self.value)}"


@dataclass(slots=True)
class Port:
    """The overrides, what has no counterpart, and what a reader must check."""

    lines: list[Line] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        self.lines.append(Line(key, value, comment))


def hydra_value(value: Any) -> str:
    """A value in the syntax of Hydra's overrides."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value)
    if isinstance(value, int | float) or PLAIN.fullmatch(text):
        return text
    return str(QuotedString(text, Quote.double).with_quotes())


def recipe(port: Port, origin: str) -> str:
    """The overrides as a recipe: choices in the defaults list, and keys as nested mappings."""
    groups = [line for line in port.lines if "." not in line.key and line.key != "seed"]
    values: dict[str, Any] = {}
    for line in port.lines:
        if line not in groups:
            *sections, last = line.key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = line.value
    chosen = [{f"override /{line.key}": line.value} for line in sorted(groups, key=lambda line: line.key)]
    text: str = yaml.safe_dump({"defaults": [*chosen, "_self_"], **values}, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# From {clean(origin)}, by grpocli from-trl.\n{text}"


class Translation:
    """Translates one source. processes: TRL's number of processes; prompts: those of the dataset, if known."""

    def __init__(self, source: Source, processes: int = 1, prompts: int | None = None) -> None:
        self.source, self.processes, self.prompts = source, processes, prompts
        self.port = Port(notes=list(source.notes))
        self.updates = 1

    def get(self, name: str) -> Any:
        """A setting, or TRL's default if it is not set or no literal."""
        value = self.source.settings.get(name, DEFAULTS.get(name))
        return DEFAULTS.get(name) if isinstance(value, Unread) else value

    def given(self, name: str) -> Any:
        """A setting of the file; None if it is not set or no literal."""
        value = self.source.settings.get(name)
        return None if isinstance(value, Unread) else value

    def number(self, name: str) -> float:
        """A setting as a number, also from text such as YAML's `1e-6`; TRL's default for anything else."""
        try:
            value = float(self.get(name))
        except (TypeError, ValueError):
            self.port.notes.append(f"{name}={self.get(name)} is not a number, and TRL's default stands for it")
            value = float(DEFAULTS[name])
        return value

    def whole(self, name: str) -> int:
        return max(1, int(self.number(name)))

    def translate(self) -> Port:
        self._model()
        self._data()
        self._rewards()
        self._objective()
        self._batches()
        self._optimizer()
        self._rest()
        self._report()
        return self.port

    def _model(self) -> None:
        model = self.source.model
        if isinstance(model, str):
            self.port.set("model", "hf")
            self.port.set("model.path", model, "model")
        else:
            self.port.notes.append(f"model={model} is not read: set model=OWNER/NAME yourself")
        lora = self.source.lora
        if lora is None and self.given("use_peft"):
            names = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules"}
            lora = {"r": 16, "lora_alpha": 32}
            lora |= {names[n]: self.given(n) for n in names if self.given(n) is not None}
        if lora is not None:
            for name, key in {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}.items():
                value = lora.get(name, LORA_CONFIG[name].default)
                if isinstance(value, Unread):
                    self.port.notes.append(f"{name}={value} is not a literal: set model.lora.{key} yourself")
                elif value is not None:
                    self.port.set(f"model.lora.{key}", value, name)
        for name, key in (("revision", "revision"), ("attn_implementation", "attn_implementation")):
            if self.given(name) is not None:
                self.port.set(f"model.{key}", self.given(name), name)
        dtype = self.given("dtype") or self.given("torch_dtype")
        if self.given("bf16") or self.given("fp16"):
            self.port.set("model.dtype", "bfloat16", "bf16")
        elif dtype in ("bfloat16", "float32"):
            self.port.set("model.dtype", dtype, "dtype")

    def _data(self) -> None:
        data = self.source.data
        if not isinstance(data, Data) or not data.path:
            self.port.notes.append(f"the dataset {data} is not read: set task=hub task.path=OWNER/NAME yourself")
            return
        kinds = ("json", "csv", "parquet")
        files = data.files.get(data.split or "train") if isinstance(data.files, dict) else data.files
        path = files[0] if isinstance(files, list) and files else files if data.path in kinds else data.path
        self.port.set("task", "jsonl" if data.path in kinds else "hub")
        self.port.set("task.path", path, "train_dataset")
        if data.name:
            self.port.set("task.name", data.name)
        if data.split:
            self.port.set("task.split", data.split)
        steps = [step for step in data.steps if step.method != "shuffle"]
        maps = [step for step in steps if step.method == "map" and step.plain and step.function.isidentifier()]
        if len(maps) == 1:
            self.port.set("task.processor", f"{self.source.file}:{maps[0].function}", f"line {maps[0].line}")
            self.port.notes.append(f"{maps[0].function} must return every column that rewards need, not only new ones")
        elif not any(reward.name in BUILT_IN for reward in self.source.rewards if isinstance(reward, RewardCall)):
            self.port.set("task.answer_column", None, "rewards get columns by name")
        else:
            self.port.set("task.answer_column", "solution", "the column of TRL's accuracy_reward")
        for step in steps:
            if step not in maps or len(maps) > 1:
                self.port.notes.append(f"line {step.line}: dataset.{step.method}(...) is not carried over: {step.text}")

    def _rewards(self) -> None:
        chosen: list[str] = []
        names: list[str] = []
        for reward in self.source.rewards:
            if isinstance(reward, Unread):
                self.port.notes.append(f"the reward {reward} is not read: add it to reward=[...] yourself")
                names.append("")
                continue
            known = BUILT_IN.get(reward.name) if reward.module.startswith("trl") else None
            place = reward.module or str(self.source.file)
            chosen.append("model" if reward.path else known or f"{place}:{reward.name}")
            names.append("model" if reward.path else known or reward.name)
            if reward.path:
                self.port.set("reward.model.path", reward.path)
            for theirs, ours in (("max_completion_len", "max_tokens"), ("soft_punish_cache", "buffer_tokens")):
                if known == "overlong" and isinstance(reward.arguments.get(theirs), int):
                    self.port.set(f"reward.overlong.{ours}", reward.arguments[theirs], theirs)
        if not chosen:
            self.port.notes.append("no reward is read: set reward=[FILE.py:NAME] yourself")
            return
        self.port.set("reward", chosen, "reward_funcs")
        weights = self.given("reward_weights")
        for name, weight in zip(names, weights if isinstance(weights, list) else [], strict=False):
            if name and weight != 1:
                self.port.set(f"reward.{name}.weight", weight, "reward_weights")
        if self.source.starts_training and any(":" in one for one in chosen):
            self.port.notes.append(
                f"importing {self.source.file} would start its training: move the functions to a file of their own"
            )

    def _objective(self) -> None:
        port, loss = self.port, str(self.get("loss_type"))
        beta = self.number("beta")
        port.set("algorithm", "grpo")
        if beta:
            port.set("algorithm.kl.beta", beta, "beta")
            port.set("algorithm.kl.on_policy", bool(self.get("use_bias_correction_kl")), "use_bias_correction_kl")
        else:
            port.set("algorithm/kl", "none", "beta=0.0")
        low = self.number("epsilon")
        high = low if self.get("epsilon_high") is None else float(self.get("epsilon_high"))
        if loss in ("dapo", "bnpo", "cispo"):
            port.set("algorithm/aggregate", "token_mean", f"loss_type={loss}")
        if loss == "bnpo":
            port.set("algorithm.aggregate.scope", "micro_batch")
        if loss in ("dr_grpo", "luspo"):
            port.set("algorithm/aggregate", "constant", f"loss_type={loss}")
        if loss == "luspo":
            port.set("algorithm.aggregate.length", 1)
        if loss == "cispo" and high >= 1:
            port.set("algorithm/objective", "cispo", "TRL's bound is 1 + high")
            port.set("algorithm.objective.high", high - 1, "epsilon_high")
        elif loss == "sapo":
            port.set("algorithm/objective", "sapo")
            port.set("algorithm.objective.tau_positive", self.number("sapo_temperature_pos"))
            port.set("algorithm.objective.tau_negative", self.number("sapo_temperature_neg"))
        else:
            if loss not in ("grpo", "dapo", "bnpo", "dr_grpo", "luspo"):
                port.missing.append(f"loss_type={loss} (epsilon_high={high}): GRPO's clipped objective stands for it")
            self._clip(low, high)
        self._parts()

    def _clip(self, low: float, high: float) -> None:
        for key, value in (("low", low), ("high", high)):
            if value != 0.2:
                self.port.set(f"algorithm.objective.{key}", value, "epsilon")
        if self.get("delta") is not None:
            self.port.set("algorithm.objective.delta", self.get("delta"), "delta")
        if self.get("importance_sampling_level") != "token":
            self.port.set("algorithm.objective.level", self.get("importance_sampling_level"))

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
        if self.get("use_vllm") and self.get("vllm_importance_sampling_correction"):
            mode = str(self.get("vllm_importance_sampling_mode"))
            token = mode if mode.startswith("token_") else "token_truncate"
            port.set("algorithm/correction", token, f"vllm_importance_sampling_mode={mode}")
            bound = self.get("vllm_importance_sampling_clip_max")
            port.set("algorithm.correction.max", 1e9 if bound is None else bound, "vllm_importance_sampling_clip_max")
            if token != mode:
                port.missing.append(
                    f"vllm_importance_sampling_mode={mode}: a product over tokens; {token} is the nearest"
                )

    def _batches(self) -> None:
        port = self.port
        group, accumulate = self.whole("num_generations"), self.whole("gradient_accumulation_steps")
        micro = self.whole("per_device_train_batch_size") * self.processes
        batch = self.given("generation_batch_size")
        pieces = int(batch) // micro if batch else int(self.given("steps_per_generation") or accumulate)
        updates = max(1, pieces // accumulate)
        completions = micro * max(pieces, accumulate)
        if pieces > accumulate and pieces % accumulate:
            port.missing.append(f"steps_per_generation={pieces} is no multiple of {accumulate} micro-batches an update")
        if completions % group:
            port.notes.append(f"{completions} completions are no multiple of num_generations={group}; TRL refuses them")
        prompts = math.ceil(completions / group)
        updates = min(updates, prompts)
        epochs = self.whole("num_iterations")
        self.updates = updates * epochs
        sums = f"{micro} x {max(pieces, accumulate)} / {group}, with {self.processes} process(es)"
        port.set("rollout.prompts_per_step", prompts, sums)
        port.set("rollout.group_size", group, "num_generations")
        for key, value, name in (
            ("minibatches", updates, "steps_per_generation"),
            ("epochs", epochs, "num_iterations"),
        ):
            if value != 1:
                port.set(f"train.{key}", value, name)
        port.notes.append(
            f"TRL ran in {self.processes} process(es), as assumed here: --processes N says another number"
        )
        self._length()
        self._steps(prompts)

    def _length(self) -> None:
        completion = int(self.number("max_completion_length"))
        self.port.set("rollout.max_completion_tokens", completion, "max_completion_length")
        total = self.given("max_seq_length")
        prompt = self.given("max_prompt_length") or (total - completion if isinstance(total, int) else None) or 512
        if prompt != 512:
            self.port.set("rollout.max_prompt_tokens", prompt, "max_prompt_length")
        if prompt + completion > 8192:
            self.port.set("train.micro_batch_tokens", prompt + completion, "a micro-batch holds whole completions")
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
            if self.number(name) != default:
                self.port.set(f"rollout.{name}", self.get(name), name)
        if self.get("min_p"):
            self.port.set("rollout.min_p", self.get("min_p"), "min_p")

    def _steps(self, prompts: int) -> None:
        most = int(self.number("max_steps"))
        if most > 0:
            self.port.set("train.steps", math.ceil(most / self.updates), f"max_steps={most} updates")
        elif self.prompts:
            steps = math.ceil(self.number("num_train_epochs") * (self.prompts // prompts))
            self.port.set("train.steps", max(1, steps), f"num_train_epochs x {self.prompts} prompts")
        else:
            epochs = self.number("num_train_epochs")
            self.port.notes.append(
                f"train.steps={epochs:g} x prompts / {prompts}: give the dataset's number with --prompts N"
            )

    def _optimizer(self) -> None:
        port = self.port
        port.set("optim.lr", self.number("learning_rate"), "learning_rate")
        schedule = str(self.get("lr_scheduler_type"))
        if schedule not in SCHEDULES:
            port.missing.append(f"lr_scheduler_type={schedule}: cosine stands for it")
        port.set("optim.schedule", SCHEDULES.get(schedule, "cosine"), "lr_scheduler_type")
        ratio = self.given("warmup_ratio") or (self.number("warmup_steps") if self.number("warmup_steps") < 1 else 0)
        steps = next((line.value for line in port.lines if line.key == "train.steps"), None)
        if ratio and steps:
            port.set("optim.warmup_steps", math.ceil(ratio * steps * self.updates), f"warmup_ratio={ratio}")
        elif ratio:
            port.notes.append(f"optim.warmup_steps={ratio} x train.steps x {self.updates}: set it with train.steps")
        elif self.number("warmup_steps"):
            port.set("optim.warmup_steps", int(self.number("warmup_steps")), "warmup_steps")
        for name, key in (
            ("weight_decay", "weight_decay"),
            ("adam_epsilon", "eps"),
            ("max_grad_norm", "max_grad_norm"),
        ):
            if self.number(name) != DEFAULTS[name]:
                port.set(f"optim.{key}", self.number(name), name)
        betas = [self.number("adam_beta1"), self.number("adam_beta2")]
        if betas != [0.9, 0.999]:
            port.set("optim.betas", betas, "adam_beta1, adam_beta2")

    def _rest(self) -> None:
        port = self.port
        if self.get("gradient_checkpointing"):
            port.set("train.gradient_checkpointing", True, "gradient_checkpointing")
        port.set("seed", int(self.number("seed")), "seed")
        if self.get("use_vllm"):
            server = self.get("vllm_mode") == "server"
            port.set("engine", "vllm" if server else "vllm_colocate", f"vllm_mode={self.get('vllm_mode')}")
            if server and self.given("vllm_server_base_url"):
                port.set("engine.base_url", self.given("vllm_server_base_url"), "a server of grpocli vllm-serve")
            elif not server and self.given("vllm_gpu_memory_utilization") is not None:
                port.set("engine.gpu_memory_utilization", self.given("vllm_gpu_memory_utilization"))
        if self.given("save_steps"):
            port.set("checkpoint.every", max(1, int(self.number("save_steps")) // self.updates), "save_steps")
        report = self.given("report_to")
        trackers = report if isinstance(report, list) else [report]
        for name in [str(one) for one in trackers if one not in (None, "none", "all")][:1]:
            port.set("tracker", name, "report_to")
        if not str(self.get("optim")).startswith("adamw_torch"):
            port.missing.append(f"optim={self.get('optim')}: optim=adamw in float32 stands for it")
        if str(self.get("eval_strategy")) == "no":
            port.set("eval.problems", 0, "eval_strategy=no")
        elif self.given("eval_steps"):
            port.set("eval.every", max(1, int(self.number("eval_steps")) // self.updates), "eval_steps")
        if self.given("output_dir"):
            port.set("hydra.run.dir", str(self.given("output_dir")), "output_dir")

    def _report(self) -> None:
        """Name the settings without a counterpart, and those that are no literals."""
        for name, value in self.source.settings.items():
            here = TRL.get(name)
            if isinstance(value, Unread):
                keys = here.overrides if here and here.overrides else (here.note if here else "no key of TRL")
                self.port.notes.append(f"{name}={value} is not a literal: set {keys or name} yourself")
            elif here is not None and here.lacks and value != here.default:
                self.port.missing.append(f"{name}={value}: {here.note.removeprefix('no counterpart: ')}")
        self.port.missing += [f"{name}={value}" for name, value in self.source.ignored.items()]
