"""NeMo RL's settings as overrides, by its table of names; a missing setting has the value of grpo_math_1B.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.config.yaml_text import nodes
from grpocli.types import DTYPES
from grpocli_tools.porting.foreign_names import NEMO_RL, TRANSLATION, UNSTATED, without_effect
from grpocli_tools.porting.port import MISSING, Port, Unread, with_numbers

TABLES = TRANSLATION["NeMo RL"]
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab")


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    return any(isinstance(values.get(name), dict) for name in ("grpo", "policy", "loss_fn"))


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted name: value}. A mapping that is a row of the table, or empty, is a value."""
    every = dict(nodes(values, lists=False))
    rows = tuple(f"{name}." for name in every if name in NEMO_RL)
    found = {name: value for name, value in every.items() if not name.startswith(rows)}
    return {name: value for name, value in found.items() if name in NEMO_RL or not value or not isinstance(value, dict)}


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted name: value}, with interpolations such as `${mul:a, b}` replaced; Unread where that fails."""
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    config = DictConfig({})
    for name, value in values.items():
        OmegaConf.update(config, name, value, force_add=True)
    found: dict[str, Any] = {}
    for name in values:
        try:
            value = OmegaConf.select(config, name)
        except (OmegaConfBaseException, TypeError):
            value = Unread(str(values[name]), 0)
        found[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


class NemoRl:
    """Translates one config. prompts: those of the dataset, if known."""

    def __init__(self, values: Mapping[str, Any], prompts: int | None = None) -> None:
        self.port, self.prompts = Port(), prompts
        stated = {name: one.default for name, one in NEMO_RL.items() if one.default is not UNSTATED}
        given = settings_of(values)
        every = resolved(stated | given)
        self.read = {name: every.pop(name) for name in given}
        defaults = resolved(stated) | every
        self.settings = with_numbers(self.read, defaults, self.port)
        self.all = defaults | {name: value for name, value in self.settings.items() if value is not None}

    def get(self, name: str) -> Any:
        """A setting; the value of grpo_math_1B.yaml if the file lacks it or it is not a literal."""
        return self.all.get(name)

    def whole(self, name: str) -> int:
        return max(1, int(self.get(name)))

    def translate(self) -> Port:
        self._data()
        self._objective()
        self._batches()
        self._lengths()
        for name in TABLES["stated"]:
            if self.get(name) is not None:
                self.port.carry(name, self.get(name), NEMO_RL[name])
        self._scheduler()
        self._engine()
        self._hardware()
        self._evaluation()
        self._checkpoints()
        self._rest()
        return self.port

    def _data(self) -> None:
        port, name, path = self.port, self.get("data.dataset_name"), self.get("data.train_data_path")
        port.set("model", "hf")
        port.set("model.path", self.get("policy.model_name"), "policy.model_name")
        if (dtype := self.get("policy.precision")) in DTYPES:
            port.set("model.dtype", dtype, "policy.precision")
        else:
            port.lack("policy.precision", dtype, f"training is in {', '.join(DTYPES)}")
        if path:
            port.set("task", "jsonl" if str(path).endswith((".jsonl", ".json")) else "hub", "data.dataset_name")
            port.set("task.path", path, "data.train_data_path")
            port.set("task.prompt_column", self.get("data.input_key") or "input", "data.input_key")
            port.set("task.answer_column", self.get("data.output_key") or "output", "data.output_key")
        elif found := dict(TABLES["datasets"].get(name, {})):
            port.set("task", found.pop("task"), "data.dataset_name")
            if found and (split := self.get("data.train_split")):
                found["split"] = split
            for key, value in found.items():
                port.set(f"task.{key}", value)
        else:
            port.set("task", MISSING, note="the dataset is not known here")
            port.check("data.dataset_name", name, f"it is not known here; {NEMO_RL['data.dataset_name'].note}")
        for key in ("data.prompt_file", "data.system_prompt_file"):
            if self.get(key) is not None:
                port.check(key, self.get(key), f"write its text: {NEMO_RL[key].note}")
        environments = {one.split(".")[1] for one in self.read if one.startswith("env.")}
        if environments and "math" not in environments:
            hint = "set reward=[FILE.py:NAME] or task.environment.name=FILE.py:CLASS"
            port.check("env", ", ".join(sorted(environments)), f"environments of NeMo RL are not read; {hint}")
        chosen = ["math", *(["overlong"] if self.get("grpo.reward_shaping.enabled") else [])]
        port.set("reward", chosen, "env.math.math_verify_impl", "grpo.reward_shaping.enabled")

    def _objective(self) -> None:
        port, beta = self.port, self.get("loss_fn.reference_policy_kl_penalty")
        approximation = "loss_fn.use_on_policy_kl_approximation"
        port.set("algorithm", "grpo")
        if beta:
            port.set("algorithm.kl.beta", beta, "loss_fn.reference_policy_kl_penalty")
            port.set("algorithm.kl.on_policy", True, approximation)
        else:
            port.set("algorithm/kl", "none", "loss_fn.reference_policy_kl_penalty", approximation)
        names = ("grpo.use_leave_one_out_baseline", "grpo.normalize_rewards")
        others, scaled = map(self.get, names)
        port.set("algorithm/advantage", "leave_one_out" if others else "std" if scaled else "center", *names)
        if others and scaled:
            port.set("algorithm.advantage.scale", "others", "grpo.normalize_rewards")
        names = ("loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_ratio")
        corrected, bound = map(self.get, names)
        port.set("algorithm/correction", "token_truncate" if corrected else "none", *names)
        if corrected:
            port.set("algorithm.correction.max", 1e9 if bound is None else bound, names[1])
        age = "grpo.async_grpo.max_trajectory_age_steps"
        if self.get("grpo.use_dynamic_sampling"):
            port.set("algorithm/keep", "dynamic", "grpo.use_dynamic_sampling")
        if self.get("grpo.async_grpo.enabled"):
            port.set("rollout.max_staleness", self.whole(age), "grpo.async_grpo.enabled", age)

    def _batches(self) -> None:
        port, prompts, group = self.port, *map(self.whole, TABLES["stated"][:2])
        batch = self.whole("policy.train_global_batch_size")
        updates = min(prompts, max(1, prompts * group // batch))
        port.set("train.minibatches", updates, "policy.train_global_batch_size", note=f"{prompts} x {group} / {batch}")
        steps, epochs = self.whole("grpo.max_num_steps"), self.whole("grpo.max_num_epochs")
        names = ["grpo.max_num_steps"]
        if self.prompts:
            steps = max(1, min(steps, epochs * (self.prompts // prompts)))
            names.append("grpo.max_num_epochs")
        else:
            known = f"train.steps is at most {epochs} x prompts / {prompts}"
            port.check("grpo.max_num_epochs", epochs, f"{known}; give the number of its prompts with --prompts N")
        port.set("train.steps", steps, *names)

    def _lengths(self) -> None:
        port, total = self.port, self.whole("policy.max_total_sequence_length")
        completion = min(self.whole("policy.generation.max_new_tokens"), total)
        prompt = min(self.whole("data.max_input_seq_length"), total)
        port.set("rollout.max_completion_tokens", completion, "policy.generation.max_new_tokens")
        port.set("rollout.max_prompt_tokens", prompt, "data.max_input_seq_length")
        name = "policy.sequence_packing.train_mb_tokens"
        tokens = max(self.whole(name), prompt + completion)
        port.set("train.micro_batch_tokens", tokens, name, note="at least a completion with its prompt")

    def _scheduler(self) -> None:
        phases = self.settings.get("policy.scheduler")
        if not isinstance(phases, list):
            return
        schedule, warmup = "constant", 0
        for phase in [one for one in phases if isinstance(one, dict) and "name" in one]:
            kind, kwargs = str(phase["name"]).rpartition(".")[2], phase.get("kwargs") or {}
            if kind == "LinearLR" and kwargs.get("end_factor", 1.0) == 1.0:
                warmup = kwargs.get("total_iters", 5)
            elif kind in TABLES["schedulers"]:
                schedule = TABLES["schedulers"][kind]
            else:
                self.port.lack("policy.scheduler", kind, "optim.schedule is constant, linear or cosine")
        self.port.set("optim.schedule", schedule, "policy.scheduler")
        self.port.set("optim.warmup_steps", warmup, "policy.scheduler", note="from 0 instead of start_factor")

    def _engine(self) -> None:
        names = ("policy.generation.backend", "policy.generation.colocated.enabled")
        backend, together = map(self.get, names)
        engine = ("vllm_colocate" if together else "vllm") if backend in ("vllm", "sglang") else "transformers"
        self.port.set("engine", engine, *names)
        if backend not in ("vllm", "hf"):
            self.port.lack("policy.generation.backend", backend, f"engine={engine} is used instead")
        kwargs = self.settings.get("policy.generation.vllm_kwargs")
        if isinstance(kwargs, dict) and kwargs and engine != "transformers":
            self.port.named.add("policy.generation.vllm_kwargs")
            for key, value in kwargs.items():
                self.port.set(f"engine.vllm_args.{key}", value, f"policy.generation.vllm_kwargs.{key}")

    def _hardware(self) -> None:
        port, gpus, nodes = self.port, self.whole("cluster.gpus_per_node"), self.whole("cluster.num_nodes")
        if nodes > 1:
            port.set("hardware", "multinode", "cluster.num_nodes")
            port.set("hardware.train_nodes", nodes, "cluster.num_nodes")
        if gpus * nodes == 1 and "policy.dtensor_cfg.enabled" in self.settings:
            port.skip("policy.dtensor_cfg.enabled", self.get("policy.dtensor_cfg.enabled"), "one GPU has all weights")

    def _evaluation(self) -> None:
        port, period = self.port, int(self.get("grpo.val_period"))
        samples = "grpo.val_num_generations_per_prompt"
        if period <= 0:
            port.set("eval.problems", 0, "grpo.val_period", "grpo.max_val_samples")
        else:
            port.set("eval.every", period, "grpo.val_period")
            port.set("eval.problems", self.get("grpo.max_val_samples"), "grpo.max_val_samples")
        names = ("grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold")
        metric, limit = map(self.get, names)
        if metric is None or limit is None or period <= 0:
            for name in filter(self.settings.__contains__, names):
                port.skip(name, self.get(name), "it ends a run with the other one, and with grpo.val_period above 0")
        else:
            wanted = f"pass@{self.whole(samples)}" if metric == "pass_k" else metric
            port.set("eval.stop_at.metric", wanted, names[0])
            port.set("eval.stop_at.threshold", limit, names[1])

    def _checkpoints(self) -> None:
        port, names = self.port, ("checkpointing.enabled", "checkpointing.save_period")
        if self.get(names[0]):
            port.set("checkpoint.every", self.whole(names[1]), *names)
            keep = self.get("checkpointing.keep_top_k") or 0
            port.set("checkpoint.keep", keep, "checkpointing.keep_top_k", note="the newest, not the best")
        else:
            port.set("checkpoint.every", 0, *names, note="only at the end")
        chosen = [name for name in TRACKERS if self.get(f"logger.{name}_enabled")]
        port.set("tracker", chosen[0] if chosen else "none", *(f"logger.{name}_enabled" for name in TRACKERS))
        if len(chosen) > 1:
            port.lack("logger", chosen[1:], "a run has one tracker, and metrics.jsonl")

    def _rest(self) -> None:
        """Carry over, or name, every setting that nothing has named so far."""
        if "defaults" in self.settings:
            advice = "settings that this file lacks have the values of grpo_math_1B.yaml"
            self.port.check("defaults", self.settings["defaults"], advice)
        for name, value in self.read.items():
            if name not in self.port.named and (reason := without_effect("NeMo RL", name, self.get)):
                self.port.skip(name, value, reason)
                continue
            beginning = next((row for row in NEMO_RL if name.startswith(f"{row}.")), None)
            self.port.carry(name, self.settings.get(name, value), NEMO_RL.get(name) or NEMO_RL.get(beginning or ""))
