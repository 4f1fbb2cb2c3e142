"""The interface of engines, which sample completions.

To write an engine, derive its config from `EnginePart`, and return an engine derived from `Engine` from `connect`:

    launch          once, in the process that the user started: start servers, stop them when the block ends
    connect         in every trainer process, after `launch`: return the engine
    sync            at the start of step v: take over the policy's current weights, as version v
    generate        complete token ids: n completions for each request, with each token's log-prob in nats
    sample          with `rollout.max_staleness`: the same in the main process alone, in several threads at a time
    release_memory  before the updates of a step; does nothing by default
    close           at the end of the run

`fake_engine.py` is a small example. In an engine that samples with the policy itself, `sync` only stores the version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from grpocli.config.parts import base, require
from grpocli.config.user_code import choice_of
from grpocli.hardware import Multinode
from grpocli.progress import UNWATCHED, Progress, Watch, unreported
from grpocli.rollout.sync_config import SyncConfig
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World


class PolicyView(Protocol):
    """The part of the trainer's policy that engines use."""

    model: PreTrainedModel  # not wrapped by DDP, FSDP or DeepSpeed
    dtype: torch.dtype  # of its computations; weights are float32

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, tied ones once."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1, no gradient."""
        ...

    def sampling_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients, for forwards of `model`. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The settings that an engine gets before any model is loaded."""

    model_path: str
    """The folder (or hub id) of the initial weights."""
    dtype: str
    """One of DTYPES."""
    max_tokens: int
    """Tokens of the longest prompt plus completion."""
    run_dir: Path
    """The folder for logs and addresses."""
    seed: int
    transport: str = "shm"
    """How weights reach a server: "shm", "nccl" or "ipc"."""
    sync_folder: str | None = None
    """The folder of shm's files; None: a new one."""
    lora_rank: int = 0
    """0 if all weights are trained."""
    quantized: bool = False
    """The engine rounds weights (engine.quantization)."""
    revision: str | None = None
    trust_remote_code: bool = False
    """As for the trainer's model, like `revision`."""
    max_num_seqs: int = 1
    """Completions of one request."""
    gpus: tuple[str, ...] = ()
    """Of servers on this machine, as in CUDA_VISIBLE_DEVICES; empty on a CPU."""
    shares_gpus: bool = False
    """A trainer computes on some of `gpus`, too."""
    nodes: int = 0
    """The number of rollout nodes; 0: this machine serves."""
    head_dtype: str | None = None
    """`float32` if the output head multiplies in float32 while the model computes in another dtype; else None."""
    served_path: str | None = None
    """The folder that vLLM serves; None: model_path."""
    architecture: str | None = None
    """The class of the model to serve; None: that of its config."""
    dummy: bool = False
    """The run's own vLLM servers start with random weights, so that the first sync proves itself."""
    progress: Progress = field(default=unreported, compare=False, repr=False)
    """Called during the launch; not part of the saved job."""

    @property
    def served(self) -> str:
        """The folder (or hub id) that vLLM serves."""
        return self.served_path or self.model_path


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The objects and settings of a trainer process that its engine uses."""

    job: EngineJob
    policy: PolicyView
    tokenizer: PreTrainedTokenizerBase
    world: World
    sync: SyncConfig = field(default_factory=SyncConfig)
    in_flight: bool = False
    """Weights may change during requests."""
    stopping: Callable[[], bool] = lambda: False
    """Whether a stop of the run is requested; a long wait then ends with EngineGone."""
    before_change: Callable[[], None] = lambda: None
    """Called in every process before a canary changes the policy's adapter; waits until no checkpoint is written."""


OnGroup = Callable[[int, list[Completion]], None]


def ignore_group(k: int, completions: list[Completion]) -> None:
    """An `OnGroup` that does nothing."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An `OnGroup` with a `Watch`, which receives the progress of `generate` and may cancel it; see `wrap`."""

    on_group: OnGroup = ignore_group
    watch: Watch = UNWATCHED

    @classmethod
    def wrap(cls, on_group: OnGroup) -> Listener:
        """`on_group` itself if it is a Listener, else a Listener without a watch."""
        return on_group if isinstance(on_group, Listener) else cls(on_group)

    def __call__(self, k: int, completions: list[Completion]) -> None:
        self.on_group(k, completions)


class Engine(ABC):
    """Base class of connected engines in a trainer process.

    The main thread calls `generate` and `sync`. With `rollout.max_staleness` above 0, other threads of the main process
    call `sample`. While a `sample` runs, `sync` comes only if weights may change under running requests
    (`EngineContext.in_flight`), or if `needs_sync` asked for it.
    """

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in the requests' order.

        on_group: may be called once for each request, with its number and its completions, as soon as they are
        complete, in any thread; it must return immediately. If it is a `Listener` whose watch is cancelled, `generate`
        may return early with completions that are cut off or missing, after the same collective calls in every process.
        """

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """As `generate`, but called in the main process alone, in several threads at a time."""
        return self.generate(requests, sampling, on_group)

    @property
    def needs_sync(self) -> bool:
        """Whether a `sample` waits until `sync` has brought servers back."""
        return False

    @abstractmethod
    def sync(self, version: int) -> dict[str, float]:
        """Bring the engine to the policy's current weights and verify it; collective over all processes.

        Returns metrics (`sync/bytes` ...). If the verification fails, raises EngineError with the expected and the
        found value.
        """

    def release_memory(self) -> None:  # noqa: B027 (most engines have none to release)
        """Release memory that only sampling needs; called in every process before a step's updates."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; called at the end of the run."""


@base("engine")
class EnginePart:
    """Base class of the choices of the config group `engine`: their keys, and the start of the engine."""

    overlaps: ClassVar[bool] = False
    """Whether it samples beside the trainer, with its own weights and devices, as `rollout.max_staleness` needs."""

    constrains: ClassVar[bool] = False
    """Whether its completions can match a regex or a JSON schema."""

    def check_run(self, run: Run) -> None:
        """Raise ConfigError if other keys of the run ask what the engine cannot do."""
        rollout, hardware, name = run.rollout, run.hardware, f"engine={choice_of('engine', self)}"
        if structure := rollout.sampling.structure:
            problem = f"{name} cannot constrain completions: choose engine=vllm, or set it to null"
            require(rollout, structure, self.constrains, problem)
        problem = f"{name} does not sample beside the trainer: choose engine=vllm, or rollout.max_staleness=0"
        require(rollout, "max_staleness", self.overlaps or not rollout.max_staleness, problem)
        problem = f"{name} cannot sample from sharded weights: take engine=vllm, or fsdp2"
        require(hardware, "parallel", self.overlaps or hardware.parallel != "zero3", problem)
        lora = run.model.lora.rank > 0 and self.overlaps
        problem = f"{name} is sent LoRA's updates by one process, which must have them whole: take ddp"
        require(hardware, "parallel", not (lora and hardware.parallel == "fsdp2"), problem)
        if isinstance(hardware, Multinode):
            starts = self.server_gpus > 0
            problem = f"{name} starts {'servers, which need machines' if starts else 'no servers for these machines'}"
            require(hardware, "rollout_nodes", (hardware.rollout_nodes > 0) == starts, problem)
            fits = not starts or hardware.device == "cpu" or self.server_gpus == hardware.devices_per_node
            problem = f"engine.replicas x tensor_parallel x data_parallel = {self.server_gpus} must be all of them"
            require(hardware, "devices_per_node", fits, problem)

    @property
    def urls(self) -> list[str]:
        """Addresses of servers that run already."""
        return []

    @property
    def waits(self) -> dict[str, int]:
        """{config key: the longest wait for a lost server in seconds that it sets}."""
        return {}

    @property
    def quantizes(self) -> bool:
        """Whether it rounds the weights to fewer bits than the dtype has."""
        return False

    @property
    def server_gpus(self) -> int:
        """GPUs of the servers that the run starts; 0 if it starts none."""
        return 0

    def resolved(self) -> EnginePart:
        """The engine that samples: itself, or the choice of `engine=auto` on this machine."""
        return self

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        """Start the engine's servers in the process that the user started; stop them at the end of the block."""
        return nullcontext()

    def connect(self, context: EngineContext) -> Engine:
        """The engine of a trainer process; called in every trainer process after `launch`."""
        raise NotImplementedError(f"{type(self).__name__} has no `connect`")
