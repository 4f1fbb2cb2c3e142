"""The seam between the trainer and whatever samples completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpocli.progress import UNWATCHED, Progress, Watch, unreported
from grpocli.rollout.sync import Sync
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.distributed.world import World


class PolicyView(Protocol):
    """What an engine may know of the trainer's model."""

    model: PreTrainedModel  # not wrapped by any parallelism
    dtype: torch.dtype  # what it computes in (weights are float32)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, tied ones once."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1, no gradient."""
        ...


@dataclass(frozen=True, slots=True)
class EngineJob:
    """What a run knows before any model is loaded.

    model_path: the folder (or hub id) of the initial weights. dtype: "float32" or "bfloat16".
    max_tokens: the longest prompt plus completion. max_num_seqs: completions of one request.
    run_dir: where logs and addresses go.
    transport: how weights get to a server, "shm", "nccl" or "ipc". sync_folder: where shm leaves them
        (null: a new folder).
    lora_rank: 0 where all weights are trained. quantized: the engine rounds weights (engine.quantization).
    revision, trust_remote_code: as for the trainer's model.
    gpus: of this machine's servers, as CUDA_VISIBLE_DEVICES names them; empty on a CPU.
    nodes: machines that serve, where those are not this one; 0: this one does.
    progress: called during the launch; it is not part of the saved job.
    """

    model_path: str
    dtype: str
    max_tokens: int
    run_dir: Path
    seed: int
    transport: str = "shm"
    sync_folder: str | None = None
    lora_rank: int = 0
    quantized: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    max_num_seqs: int = 1
    gpus: tuple[str, ...] = ()
    nodes: int = 0
    progress: Progress = field(default=unreported, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What a trainer process hands its engine.

    in_flight: weights may change under running requests. sampling: of training, so that an engine can refuse it at
    once; None where nobody knows it yet.
    recover: has the engine synced again by the thread that trains, and returns when that is done. For an engine that
    must sync within `generate`; to be called in every process and as often in each. None: it may sync by itself.
    stopping: whether this process was asked to stop, so that a long wait can end with EngineGone.
    """

    job: EngineJob
    policy: PolicyView
    tokenizer: PreTrainedTokenizerBase
    world: World
    sync: Sync = field(default_factory=Sync)
    in_flight: bool = False
    sampling: Sampling | None = None
    recover: Callable[[], None] | None = None
    stopping: Callable[[], bool] = lambda: False


OnGroup = Callable[[int, list[Completion]], None]


def ignore(k: int, completions: list[Completion]) -> None:
    """An `OnGroup` that does nothing."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An `OnGroup` with a `Watch`, which is called with the progress and may cancel the rest.

    An engine without progress calls it as any other `OnGroup`; others use `Listener.wrap`.
    """

    on_group: OnGroup = ignore
    watch: Watch = UNWATCHED

    @classmethod
    def wrap(cls, on_group: OnGroup) -> Listener:
        """`on_group` itself if it is a Listener, else one without a watch."""
        return on_group if isinstance(on_group, Listener) else cls(on_group)

    def __call__(self, k: int, completions: list[Completion]) -> None:
        self.on_group(k, completions)


class Engine(Protocol):
    """A live source of completions, in every trainer process.

    With `rollout.max_staleness` above 0 `generate` is called in a thread of its own, beside the main one's; `sync` is
    called in the main thread, and while `generate` runs only if weights may change under running requests or
    `generate` asked for it with `EngineContext.recover`.
    """

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore
    ) -> list[list[Completion]]:
        """`n` completions for each request, in the requests' order.

        on_group: may be called with a request's number and its completions as soon as all of them are there, once, in
        any thread; it returns at once. Where it is a `Listener` whose watch is cancelled, `generate` may return early,
        with completions that are cut off or missing; in every process it makes the same collective calls all the same.
        """
        ...

    def sync(self, version: int) -> dict[str, float]:
        """Bring the engine to the policy's present weights and prove it; collective over all processes.

        Returns metrics (`sync/bytes` ...). Raises EngineError with both numbers if the proof fails.
        """
        ...

    def close(self) -> None: ...


class EnginePart(Protocol):
    """A choice of the config group `engine`.

    One that samples beside the trainer, with weights and devices of its own, says so with `overlaps = True`; it can be
    used with `rollout.max_staleness`.
    """

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        """Start what lives outside the trainer processes (servers); stop it on the way out.

        Called once, in the process that the user started.
        """
        ...

    def connect(self, context: EngineContext) -> Engine:
        """Called in every trainer process after `launch`."""
        ...
