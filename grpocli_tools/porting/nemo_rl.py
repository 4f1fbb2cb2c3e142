"""NeMo RL's settings as overrides, by its table of names; a missing setting has the value of grpo_math_1B.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from grpocli.types import DTYPES
from grpocli_tools.porting.equivalent import UNSTATED
from grpocli_tools.porting.nemo_rl_names import NEMO_RL
from grpocli_tools.porting.source import Unread
from grpocli_tools.porting.translation import MISSING, Numbers, Port

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*(.+?),\s*(.+?)\s*\}")
DATASETS = {
    "OpenMathInstruct-2": ("hub", "nvidia/OpenMathInstruct-2", "problem", "expected_answer", "train_1M"),
    "DeepScaler": ("hub", "agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", "train"),
}
"""{name of NeMo RL: (task, path, prompt column, answer column, split)}."""
OWN_TASKS = {"DAPOMath17K": "dapo-math-17k", "gsm8k": "gsm8k", "openai/gsm8k": "gsm8k"}
SCHEDULERS = {"ConstantLR": "constant", "CosineAnnealingLR": "cosine", "LinearLR": "linear"}
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab")


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Whether a config is NeMo RL's."""
    return any(isinstance(values.get(name), dict) for name in ("grpo", "policy", "loss_fn"))


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{dotted name: value}. A mapping that is a row of the table, or empty, is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value and name not in NEMO_RL:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


class NemoRl(Numbers):
    """Translates one config. prompts: those of the dataset, if known."""

    default_text = "{:g} of grpo_math_1B.yaml"

    def __init__(self, values: Mapping[str, Any], prompts: int | None = None) -> None:
        self.given = flat(values)
        self.settings = {name: self._resolved(value) for name, value in self.given.items()}
        self.prompts = prompts
        self.port = Port()

    def _resolved(self, value: Any, depth: int = 0) -> Any:
        """A value with `${name}` and `${mul:a, b}` replaced; Unread for another interpolation."""
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth < 10 and (one := REFERENCE.fullmatch(value)):
            return self._resolved(self._raw(one[1]), depth + 1)
        if depth < 10 and (two := PRODUCT.fullmatch(value)):
            factors = [self._resolved(text, depth + 1) for text in two.groups()]
            numbers = [int(one) if str(one).isdecimal() and len(str(one)) < 16 else one for one in factors]
            if all(isinstance(one, int) for one in numbers):
                return math.prod(numbers)
        return Unread(value, 0)

    def _raw(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        default = NEMO_RL[name].default if name in NEMO_RL else Unread(f"${{{name}}}", 0)
        return None if default is UNSTATED else default

    def get(self, name: str) -> Any:
        """A setting; the value of grpo_math_1B.yaml if the file lacks it or it is not a literal."""
        value = self.settings.get(name, self._resolved(self._raw(name)))
        return self.default(name) if isinstance(value, Unread) else value

    def default(self, name: str) -> Any:
        return self._resolved(NEMO_RL[name].default)

    def translate(self) -> Port:
        self._model()
        self._data()
        self._rewards()
        self._objective()
        self._clip()
        self._sampling_parts()
        self._batches()
        self._lengths()
        self._scheduler()
        self._engine()
        self._hardware()
        self._evaluation()
        self._checkpoints()
        self._trackers()
        self._report()
        return self.port

    def _model(self) -> None:
        self.port.set("model", "hf")
        self.port.set("model.path", self.get("policy.model_name"), "policy.model_name")
        dtype = self.get("policy.precision")
        if dtype in DTYPES:
            self.port.set("model.dtype", dtype, "policy.precision")
        else:
            self.port.lack("policy.precision", dtype, f"training is in {', '.join(DTYPES)}")

    def _data(self) -> None:
        port, name, path = self.port, self.get("data.dataset_name"), self.get("data.train_data_path")
        prompt, answer, split = self.get("data.input_key"), self.get("data.output_key"), self.get("data.train_split")
        if path:
            port.set("task", "jsonl" if str(path).endswith((".jsonl", ".json")) else "hub", "data.dataset_name")
            port.set("task.path", path, "data.train_data_path")
            port.set("task.prompt_column", prompt or "input", "data.input_key")
            port.set("task.answer_column", answer or "output", "data.output_key")
        elif name in OWN_TASKS:
            port.set("task", OWN_TASKS[name], "data.dataset_name")
        elif name in DATASETS:
            task, there, column, solution, part = DATASETS[name]
            port.set("task", task, "data.dataset_name")
            port.set("task.path", there)
            port.set("task.prompt_column", column)
            port.set("task.answer_column", solution)
            port.set("task.split", split or part)
        else:
            port.set("task", MISSING, note="the dataset is not known here")
            port.check("data.dataset_name", name, f"it is not known here; {NEMO_RL['data.dataset_name'].note}")
        for key in ("data.prompt_file", "data.system_prompt_file"):
            if self.get(key) is not None:
                port.check(key, self.get(key), f"write its text: {NEMO_RL[key].note}")

    def _rewards(self) -> None:
        names = sorted({name.split(".")[1] for name in self.settings if name.startswith("env.")})
        other = [name for name in names if name not in ("math", "should_use_nemo_gym")]
        if other and "math" not in names:
            hint = "set reward=[FILE.py:NAME] or task.environment.name=FILE.py:CLASS"
            self.port.check("env", ", ".join(other), f"environments of NeMo RL are not read; {hint}")
        chosen = ["math"]
        if self.get("grpo.reward_shaping.enabled"):
            chosen.append("overlong")
        self.port.set("reward", chosen, "env.math.math_verify_impl", "grpo.reward_shaping.enabled")
        self.port.set("reward.math.workers", self.whole("env.math.num_workers"), "env.math.num_workers")

    def _objective(self) -> None:
        port, beta = self.port, self.number("loss_fn.reference_policy_kl_penalty")
        port.set("algorithm", "grpo")
        if beta:
            port.set("algorithm.kl.beta", beta, "loss_fn.reference_policy_kl_penalty")
            name = "loss_fn.use_on_policy_kl_approximation"
            port.set("algorithm.kl.on_policy", True, name)
        else:
            port.set(
                "algorithm/kl", "none", "loss_fn.reference_policy_kl_penalty", "loss_fn.use_on_policy_kl_approximation"
            )
        tokens = bool(self.get("loss_fn.token_level_loss"))
        port.set("algorithm/aggregate", "token_mean" if tokens else "sequence_mean", "loss_fn.token_level_loss")
        scaled, others = self.get("grpo.normalize_rewards"), self.get("grpo.use_leave_one_out_baseline")
        if others:
            port.set("algorithm/advantage", "leave_one_out", "grpo.use_leave_one_out_baseline")
            if scaled:
                port.set("algorithm.advantage.scale", "others", "grpo.normalize_rewards")
        else:
            names = ("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline")
            port.set("algorithm/advantage", "std" if scaled else "center", *names)

        for name, key in (("low", "min"), ("high", "max")):
            if self.get(f"grpo.advantage_clip_{name}") is not None:
                bound = self.number(f"grpo.advantage_clip_{name}")
                port.set(f"algorithm.advantage_{key}", bound, f"grpo.advantage_clip_{name}")

    def _clip(self) -> None:
        port = self.port
        port.set("algorithm.objective.low", self.number("loss_fn.ratio_clip_min"), "loss_fn.ratio_clip_min")
        port.set("algorithm.objective.high", self.number("loss_fn.ratio_clip_max"), "loss_fn.ratio_clip_max")
        if self.get("loss_fn.ratio_clip_c") is not None:
            port.set("algorithm.objective.dual", self.number("loss_fn.ratio_clip_c"), "loss_fn.ratio_clip_c")
        name = "loss_fn.use_importance_sampling_correction"
        if self.get(name):
            bound = self.get("loss_fn.truncated_importance_sampling_ratio")
            port.set("algorithm/correction", "token_truncate", name)
            capped = "loss_fn.truncated_importance_sampling_ratio"
            port.set("algorithm.correction.max", 1e9 if bound is None else bound, capped)
        else:
            port.set("algorithm/correction", "none", name, "loss_fn.truncated_importance_sampling_ratio")

    def _sampling_parts(self) -> None:
        port = self.port
        if self.get("grpo.use_dynamic_sampling"):
            port.set("algorithm/keep", "dynamic", "grpo.use_dynamic_sampling")
        elif "grpo.dynamic_sampling_max_gen_batches" in self.settings:
            name = "grpo.dynamic_sampling_max_gen_batches"
            port.skip(name, self.get(name), "it has no effect without grpo.use_dynamic_sampling")
        age = "grpo.async_grpo.max_trajectory_age_steps"
        if self.get("grpo.async_grpo.enabled"):
            port.set("rollout.max_staleness", self.whole(age), "grpo.async_grpo.enabled", age)
        elif age in self.settings:
            port.skip(age, self.get(age), "it has no effect without grpo.async_grpo.enabled")
        turns = self.whole("grpo.max_rollout_turns")
        if turns == 1 and "grpo.max_rollout_turns" in self.settings:
            port.skip("grpo.max_rollout_turns", 1, "one turn needs no environment")

    def _batches(self) -> None:
        port, prompts = self.port, self.whole("grpo.num_prompts_per_step")
        group, batch = self.whole("grpo.num_generations_per_prompt"), self.whole("policy.train_global_batch_size")
        port.set("rollout.prompts_per_step", prompts, "grpo.num_prompts_per_step")
        port.set("rollout.group_size", group, "grpo.num_generations_per_prompt")
        updates = min(prompts, max(1, prompts * group // batch))
        port.set("train.minibatches", updates, "policy.train_global_batch_size", note=f"{prompts} x {group} / {batch}")
        steps, epochs = self.whole("grpo.max_num_steps"), self.whole("grpo.max_num_epochs")
        if self.prompts:
            steps = max(1, min(steps, epochs * (self.prompts // prompts)))
            port.set("train.steps", steps, "grpo.max_num_steps", "grpo.max_num_epochs", note=f"{self.prompts} prompts")
            return
        port.set("train.steps", steps, "grpo.max_num_steps")
        advice = (
            f"train.steps is at most {epochs} x prompts / {prompts}; give the number of its prompts with --prompts N"
        )
        port.check("grpo.max_num_epochs", epochs, advice)

    def _lengths(self) -> None:
        port, total = self.port, self.whole("policy.max_total_sequence_length")
        completion = min(self.whole("policy.generation.max_new_tokens"), total)
        prompt = min(self.whole("data.max_input_seq_length"), total)
        port.set("rollout.max_completion_tokens", completion, "policy.generation.max_new_tokens")
        port.set("rollout.max_prompt_tokens", prompt, "data.max_input_seq_length")
        packed = self.get("policy.sequence_packing.train_mb_tokens")
        tokens = max(packed if isinstance(packed, int) else 0, prompt + completion)
        name = "policy.sequence_packing.train_mb_tokens"
        port.set("train.micro_batch_tokens", tokens, name, note="at least a completion with its prompt")
        if "policy.max_total_sequence_length" in self.settings:
            reason = "rollout.max_prompt_tokens and rollout.max_completion_tokens bound the two parts"
            port.skip("policy.max_total_sequence_length", total, reason)

    def _scheduler(self) -> None:
        phases = self.settings.get("policy.scheduler")
        if not isinstance(phases, list):
            return
        schedule, warmup = "constant", 0
        for phase in [one for one in phases if isinstance(one, dict) and "name" in one]:
            kind = str(phase["name"]).rpartition(".")[2]
            kwargs = phase["kwargs"] if isinstance(phase.get("kwargs"), dict) else {}
            if kind == "LinearLR" and kwargs.get("end_factor", 1.0) == 1.0:
                warmup = kwargs["total_iters"] if isinstance(kwargs.get("total_iters"), int) else 5
            elif kind in SCHEDULERS:
                schedule = SCHEDULERS[kind]
            else:
                self.port.lack("policy.scheduler", kind, "optim.schedule is constant, linear or cosine")
        self.port.set("optim.schedule", schedule, "policy.scheduler")
        self.port.set("optim.warmup_steps", warmup, "policy.scheduler", note="from 0 instead of start_factor")

    def _engine(self) -> None:
        backend, together = self.get("policy.generation.backend"), self.get("policy.generation.colocated.enabled")
        engine = ("vllm_colocate" if together else "vllm") if backend in ("vllm", "sglang") else "transformers"
        names = ("policy.generation.backend", "policy.generation.colocated.enabled")
        self.port.set("engine", engine, *names)
        if backend not in ("vllm", "hf"):
            self.port.lack("policy.generation.backend", backend, f"engine={engine} is used instead")
        if engine == "transformers":
            for name in [one for one in self.settings if one.startswith("policy.generation.vllm_")]:
                self.port.skip(name, self.settings[name], f"it has no effect with {backend}")
        kwargs = self.settings.get("policy.generation.vllm_kwargs")
        if isinstance(kwargs, dict) and engine != "transformers":
            self.port.named.add("policy.generation.vllm_kwargs")
            for key, value in kwargs.items():
                self.port.set(f"engine.vllm_args.{key}", value, f"policy.generation.vllm_kwargs.{key}")
            if not kwargs:
                self.port.skip("policy.generation.vllm_kwargs", "{}", "it is empty")

    def _hardware(self) -> None:
        port, gpus, nodes = self.port, self.whole("cluster.gpus_per_node"), self.whole("cluster.num_nodes")
        if nodes > 1:
            port.set("hardware", "multinode", "cluster.num_nodes")
            port.set("hardware.train_nodes", nodes, "cluster.num_nodes")
        elif "cluster.num_nodes" in self.settings:
            port.skip("cluster.num_nodes", nodes, "hardware=single is one node")
        if "cluster.gpus_per_node" in self.settings:
            reason = "hardware.processes is all GPUs of a machine unless it is set"
            port.skip("cluster.gpus_per_node", gpus, reason)
        megatron = [name for name in self.settings if name.startswith("policy.megatron_cfg.")]
        if megatron and not self.settings.get("policy.megatron_cfg.enabled"):
            port.named.update(megatron)
            port.skip("policy.megatron_cfg.enabled", False, "nor has any other key of policy.megatron_cfg an effect")
        if gpus * nodes == 1 and "policy.dtensor_cfg.enabled" in self.settings:
            port.skip("policy.dtensor_cfg.enabled", self.get("policy.dtensor_cfg.enabled"), "one GPU has all weights")

    def _evaluation(self) -> None:
        period = int(self.number("grpo.val_period"))
        if period <= 0:
            self.port.set("eval.problems", 0, "grpo.val_period", "grpo.max_val_samples")
        else:
            self.port.set("eval.every", period, "grpo.val_period")
            self.port.set("eval.problems", self.get("grpo.max_val_samples"), "grpo.max_val_samples")
            if (samples := "grpo.val_num_generations_per_prompt") in self.settings:
                self.port.set("eval.samples", self.whole(samples), samples)
        self._stop_at(period > 0)

    def _stop_at(self, evaluates: bool) -> None:
        name, limit = "grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold"
        metric = self.get(name)
        if metric is None or self.get(limit) is None or not evaluates:
            reason = "it ends a run with the other one, and with grpo.val_period above 0"
            for one in (name, limit):
                if one in self.settings:
                    self.port.skip(one, self.get(one), reason)
            return
        samples = self.whole("grpo.val_num_generations_per_prompt")
        self.port.set("eval.stop_at.metric", f"pass@{samples}" if metric == "pass_k" else metric, name)
        self.port.set("eval.stop_at.threshold", self.number(limit), limit)

    def _checkpoints(self) -> None:
        if self.get("checkpointing.enabled"):
            self.port.set("checkpoint.every", self.whole("checkpointing.save_period"), "checkpointing.save_period")
            keep = self.get("checkpointing.keep_top_k")
            self.port.set("checkpoint.keep", keep or 0, "checkpointing.keep_top_k", note="the newest, not the best")
        else:
            self.port.set(
                "checkpoint.every", 0, "checkpointing.enabled", "checkpointing.save_period", note="only at the end"
            )

    def _trackers(self) -> None:
        chosen = [name for name in TRACKERS if self.get(f"logger.{name}_enabled")]
        self.port.set("tracker", chosen[0] if chosen else "none", *(f"logger.{n}_enabled" for n in TRACKERS))
        if len(chosen) > 1:
            self.port.lack("logger", chosen[1:], "a run has one tracker, and metrics.jsonl")
        for name, value in self.settings.items():
            tracker = name.split(".")[1] if name.startswith("logger.") else ""
            if tracker in TRACKERS and tracker not in chosen[:1]:
                self.port.skip(name, value, f"the tracker is {chosen[0] if chosen else 'none'}")

    def _report(self) -> None:
        """Carry over, or name, every setting that nothing has named so far."""
        if "defaults" in self.settings:
            advice = "settings that this file lacks have the values of grpo_math_1B.yaml"
            self.port.check("defaults", self.settings["defaults"], advice)
        for name, value in self.settings.items():
            beginning = next((row for row in NEMO_RL if name.startswith(f"{row}.")), None)
            self.port.carry(name, value, NEMO_RL.get(name) or NEMO_RL.get(beginning or ""))
