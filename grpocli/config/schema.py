"""The schema of a run: its sections and config groups, with types, defaults and checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpocli.config.parts import Escaped, UserCode, check_regex, nearest, one_of, part, require, require_part, section
from grpocli.config.user_code import choice_of, name_of
from grpocli.errors import ConfigError
from grpocli.hub import REPO
from grpocli.types import Sampling

MAX_COMPLETIONS = 10_000_000


@section("train")
class Train:
    """Length of the training, and how each step's update is split."""

    steps: int = 60
    """Steps: rounds of sampling and updating."""
    data_epochs: float | None = None
    """Passes over the training data, which replace steps: as many as there are rollout.prompts_per_step of its examples
    in them, rounded up. null: steps."""
    epochs: int = 1
    """Number of passes over each step's rollouts (mu in the papers)."""
    minibatches: int = 1
    """Number of optimizer updates per pass."""
    micro_batch_tokens: int = 8192
    """Most tokens of a forward pass, padding included; bounds memory, never changes the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    packed: bool = True
    """Put rows end to end, with each prompt once for its group, where the model's attention allows it; false: side by
    side with padding."""

    def __post_init__(self) -> None:
        for field in ("steps", "epochs", "minibatches", "micro_batch_tokens"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        passes = self.data_epochs
        require(self, "data_epochs", passes is None or 0 < passes < math.inf, "must be above 0, or null")

    def check_run(self, run: Run) -> None:
        """Require a group for each update, and micro-batches that hold whole rows."""
        prompts, longest, split = run.rollout.prompts_per_step, run.rollout.longest_row, run.hardware.context_parallel
        problem = f"must be at most rollout.prompts_per_step={prompts}: an update needs a group"
        require(self, "minibatches", self.minibatches <= prompts, problem)
        limits = "rollout.max_prompt_tokens + rollout.max_completion_tokens"
        problem = f"must be at least ({limits}) / hardware.context_parallel = {-(-longest // split)}"
        hint = "a micro-batch holds whole rows: raise it, or let more processes share each row"
        require(self, "micro_batch_tokens", self.micro_batch_tokens * split >= longest, problem, hint)

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@section("rollout")
class Rollouts:
    """The sampling of a step: `prompts_per_step` x `group_size` completions."""

    prompts_per_step: int = 16
    """Number of prompts of a step."""
    group_size: int = 8
    """Number of completions of a prompt, at least 2."""
    max_prompt_tokens: int = 512
    """Most tokens of a prompt."""
    long_prompts: str = "drop"
    """`drop` prompts over max_prompt_tokens, or `truncate` them from the left."""
    max_completion_tokens: int = 256
    """Most tokens of a completion."""
    temperature: float = 1.0
    """Divides the logits before sampling, at least 0.001; 1: the model's own probabilities."""
    top_p: float = 1.0
    """Sample from the most probable tokens with this total probability; 1: from all."""
    top_k: int = 0
    """Sample from this number of most probable tokens; 0: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the highest probability; 0: from all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or earlier in the
    completion; 1: none. The trainer scores tokens under the same penalty."""
    stop: list[Escaped] = dataclasses.field(default_factory=list)
    r"""Strings that end a completion (`["\n\n"]` is two line breaks). The token that completes one is the last; rewards
    see the text with it."""
    regex: str | None = None
    """Regular expression that every completion matches, unless it is cut off at max_completion_tokens; needs
    engine=vllm. The trainer scores without this constraint; `algorithm/correction` makes up for it."""
    json_schema: Any = None
    """JSON schema that every completion matches, with the conditions of regex; use one of them."""
    max_reward_errors: float = 0.1
    """Largest share, 0 to 1, of a step's samples that may fail to be scored; above it the run stops."""
    max_prob_error: float | None = 10.0
    """Largest `token_mult_prob_error` of a step; above it the run stops without that step, since the engine's tokens or
    weights are not those that it reports. null: no limit. Not checked with regex or json_schema, nor in a step with
    completions of older weights."""
    max_staleness: int = 0
    """Largest age of the weights that sample a completion, in weight versions. 0: exactly on-policy; above 0, groups
    are sampled while steps train, no further ahead than keeps steps from waiting."""
    in_flight: bool = True
    """With max_staleness: change the weights under running requests. false: wait for them before each sync; which
    weights sample a completion then depends on no clock, and a resumed run is equal to the bit."""
    order: str = "ready"
    """With max_staleness: which groups a step trains on. ready: the oldest weights first, then what ended first;
    request: in the order of their prompts, so that a long completion holds up later ones."""

    def __post_init__(self) -> None:
        for field in ("prompts_per_step", "group_size", "max_prompt_tokens", "max_completion_tokens"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        problem = f"a step of more than {MAX_COMPLETIONS:,} completions fits in no memory"
        require(self, "prompts_per_step", self.prompts_per_step * self.group_size <= MAX_COMPLETIONS, problem)
        problem = f"{self.max_staleness + 1} steps of completions at once are more than {MAX_COMPLETIONS:,}"
        most = MAX_COMPLETIONS // max(1, self.prompts_per_step * self.group_size)
        require(self, "max_staleness", self.max_staleness < most, problem)
        one_of(self, "long_prompts", ("drop", "truncate"))
        problem = "must be above 0 (at least 0.001) and finite: groups of greedy completions are all equal"
        require(self, "temperature", 1e-3 <= self.temperature < math.inf, problem)
        require(self, "top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        require(self, "top_k", self.top_k >= 0, "must be 0 (off) or more")
        require(self, "min_p", 0 <= self.min_p < 1, "must be at least 0 and below 1")
        ok = 0 < self.repetition_penalty < math.inf
        require(self, "repetition_penalty", ok, "must be above 0 and finite (1: no penalty)")
        require(self, "stop", all(self.stop), "a stop string must not be empty")
        schema = self.json_schema
        require(self, "json_schema", schema is None or isinstance(schema, dict), "must be a JSON schema: an object")
        require(self, "json_schema", schema is None or self.regex is None, "choose this or rollout.regex, not both")
        if self.regex is not None:
            check_regex(self, "regex")
        require(self, "max_staleness", self.max_staleness >= 0, "must be 0 (exactly on-policy) or more")
        one_of(self, "order", ("ready", "request"))
        bound = self.max_prob_error
        require(self, "max_prob_error", bound is None or bound > 1, "must be above 1 (where both agree), or null")
        require(self, "max_reward_errors", 0 <= self.max_reward_errors <= 1, "must be between 0 and 1")

    def check_run(self, run: Run) -> None:
        """Require groups and sampling that the algorithm can use, and completions for each trainer process."""
        size, algorithm = self.group_size, run.algorithm
        if algorithm.supervised:
            problem = "supervised training has one answer for each prompt, from the data: set it to"
            require(self, "group_size", size == 1, f"{problem} 1")
            require(self, "max_staleness", self.max_staleness == 0, f"{problem} 0")
        else:
            require(self, "group_size", size >= 2, "a group is compared with itself: it needs at least 2")
        if name := self.sampling.structure:
            problem = "samples from a part of the policy's distribution: choose algorithm/correction=token_truncate"
            require(self, name, algorithm.has_correction, problem)
        problem = "a stream has no surplus to carry over: set algorithm.keep.surplus=discard"
        require(self, "max_staleness", not self.max_staleness or algorithm.keep.surplus != "carry", problem)
        processes, groups = run.hardware.processes or 1, self.prompts_per_step // run.train.minibatches
        problem = f"leaves some of {processes} trainer processes without data: an update has {groups} groups of {size}"
        enough = processes <= groups * size * run.hardware.context_parallel
        require(self, "prompts_per_step", enough, problem, "raise it, or train in fewer processes")

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a prompt with its completion."""
        return self.max_prompt_tokens + self.max_completion_tokens

    @property
    def in_order(self) -> bool:
        """Whether a step of a stream takes groups in the order of their prompts."""
        return self.order == "request" or not self.in_flight

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_completion_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop),
            regex=self.regex,
            json_schema=self.json_schema,
        )


@section("checkpoint")
class Checkpoint:
    """When checkpoints are written, and how many are kept."""

    every: int = 20
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of checkpoints that are kept; 0: all."""

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be 0 (only at the end) or more")
        require(self, "keep", self.keep >= 0, "must be 0 (keep all) or more")


@section("eval.stop_at")
class StopAt:
    """An accuracy on held-out problems that ends the run after the evaluation that reaches it."""

    metric: str | None = None
    """Name of the accuracy, without `eval/`: accuracy, accuracy_greedy, pass@K, maj@N, or TASK/ and one of these;
    null: train all train.steps."""
    threshold: float | None = None
    """The run ends once the metric is at least this share, 0 to 1."""

    def __post_init__(self) -> None:
        ok = self.threshold is None or 0 <= self.threshold <= 1
        require(self, "threshold", ok, "must be a share between 0 and 1")
        ok = (self.metric is None) == (self.threshold is None)
        require(self, "metric", ok, "goes with eval.stop_at.threshold, the share at which the run ends: give both")

    def check_run(self, run: Run) -> None:
        """Require an accuracy that is measured within the run."""
        if self.metric is None:
            return
        require(self, "metric", bool(run.reward), "ends the run at an accuracy, and reward=none measures none")
        name, known = self.metric.rpartition("/")[2], run.eval.accuracies([])
        require(self, "metric", name in known, f"choose one of {', '.join(known)}{nearest(name, known)}")
        for key in ("every", "problems"):
            problem = f"ends the run after an evaluation, and eval.{key}=0 leaves none within the run: raise it"
            require(self, "metric", getattr(run.eval, key) != 0, problem)

    @property
    def name(self) -> str:
        """The metric's name in metrics.jsonl; empty for none."""
        return f"eval/{self.metric.removeprefix('eval/')}" if self.metric is not None else ""

    def reached_by(self, results: Mapping[str, Any] | None) -> float | None:
        """The metric of an evaluation that ends the run; None if it does not end it."""
        value = (results or {}).get(self.name)
        known = isinstance(value, int | float) and self.threshold is not None
        return float(value) if known and value >= self.threshold else None  # type: ignore[arg-type, operator]

    def reason(self, results: Mapping[str, Any] | None) -> str:
        """Why an evaluation ends the run, such as `eval/accuracy is 0.940, at least ...`; empty if it does not."""
        value, limit = self.reached_by(results), self.threshold
        return "" if value is None else f"{self.name} is {value:.3f}, at least eval.stop_at.threshold={limit:g}"


@section("eval")
class Eval:
    """Accuracy on held-out problems, at temperature 1 (mean over `samples` completions) and greedy."""

    every: int = 0
    """Steps between evaluations; 0: only before and after training."""
    problems: int | None = None
    """Number of problems to evaluate on; 0: no evaluation; null: 256 on a GPU, 32 on a CPU."""
    samples: int = 4
    """Number of completions of a problem at temperature 1."""
    reward: str | None = None
    """Name of the reward that measures accuracy; null: the first. A score of 1 or more is right."""
    stop_at: StopAt = StopAt()
    """An accuracy that ends the run."""

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be 0 (only before and after) or more")
        require(self, "problems", (self.problems or 0) >= 0, "must be 0 (no evaluation) or more")
        require(self, "samples", self.samples >= 1, "must be at least 1")

    def check_run(self, run: Run) -> None:
        """Require a reward of this run."""
        if self.reward is not None:
            one_of(self, "reward", run.reward, "one of this run's rewards:")

    def n_problems(self, cpu: bool) -> int:
        """The number of problems. cpu: whether the model runs on a CPU."""
        return self.problems if self.problems is not None else 32 if cpu else 256

    def accuracies(self, tasks: Sequence[str]) -> list[str]:
        """The names of the accuracies of an evaluation, without `eval/`. tasks: the run's."""
        powers = [2**i for i in range(1, self.samples.bit_length()) if 2**i < self.samples]
        several = [*(f"pass@{k}" for k in [*powers, self.samples]), f"maj@{self.samples}"] if self.samples > 1 else []
        names = ["accuracy", "accuracy_greedy", *several]
        return names + [f"{task}/{name}" for task in (tasks if len(tasks) > 1 else ()) for name in names]


@section("hub")
class Hub:
    """Pushing the run to the Hugging Face hub, with the token of HF_TOKEN or `hf auth login`."""

    push: str | None = None
    """OWNER/NAME of a model repository that gets the finished run: final model, card, report, config, metrics; null: no
    network is used."""
    revision: str | None = None
    """Branch to push to; null: the default branch."""
    private: bool = True
    """Create the repository as a private one; an existing repository stays as it is."""
    rollouts: bool = True
    """Push the sampled completions, too."""
    checkpoints: bool = False
    """Push each checkpoint to hub.push while training goes on, and delete those that checkpoint.keep has deleted."""
    timeout: float = 3600.0
    """Most seconds that the end of the run waits for its push."""

    def __post_init__(self) -> None:
        ok = self.push is None or REPO.fullmatch(self.push) is not None
        require(self, "push", ok, "expected OWNER/NAME")
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 and finite")


@part("", "run_schema")
class Run:
    """A whole run: its config groups, and the keys below, which belong to no group."""

    algorithm: Any
    """The algorithm's parts."""
    reward: dict[str, Any]
    """Rewards by name; the first is the accuracy of evaluations."""
    task: Any
    """The prompts."""
    model: Any
    """The policy."""
    engine: Any
    """The sampler of completions."""
    sync: Any
    """How weights reach a vLLM server."""
    hardware: Any
    """Machines, devices and processes."""
    optim: Any
    """The optimizer."""
    tracker: Any
    """Where metrics go beside metrics.jsonl."""
    train: Train = Train()
    rollout: Rollouts = Rollouts()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    hub: Hub = Hub()
    callbacks: list[UserCode] = dataclasses.field(default_factory=list)
    """Callbacks of your own, FILE.py:CLASS with a class derived from grpocli.Callback, called in this order. An
    error in one is logged, and the run goes on."""
    name: str | None = None
    """Name of the run in tables, pages and trackers; null: its folder."""
    tags: list[str] = dataclasses.field(default_factory=list)
    """Words that tables and trackers show beside the name, such as `[baseline,paper]`."""
    seed: int = 0
    """Seed of everything random, at least 0."""
    resume: str | None = None
    """Run folder to resume; null: a new run."""
    resume_fallback: bool = False
    """If the newest checkpoint is damaged, resume from the newest intact one."""
    resume_other_weights: bool = False
    """For one resume: go on although the start model (the base of LoRA, the reference of a KL term) or a teacher has
    other weights than before."""
    overrides: list[str] = dataclasses.field(default_factory=list)
    """The command line that composed this config; grpocli writes it, for `resume=`."""

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks by name: those of a mixture, or the only one, named after its choice."""
        if choice_of("task", self.task) == "mixture":
            return dict(self.task.tasks)
        return {getattr(self.task, "task_name", None) or name_of(choice_of("task", self.task)): self.task}

    def __post_init__(self) -> None:
        groups = ("algorithm", "task", "model", "engine", "sync", "hardware", "optim", "tracker")
        rewards = {f"reward.{name}": reward for name, reward in self.reward.items()}
        for key, value in ({group: getattr(self, group) for group in groups} | rewards).items():
            require_part(value, key)
        for spec in self.callbacks:
            if ":" not in spec:
                raise ConfigError("must be FILE.py:CLASS or module:CLASS", key="callbacks", value=spec)
        require(self, "seed", self.seed >= 0, "must be 0 or more")
