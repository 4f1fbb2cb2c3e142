"""engine=vllm_colocate: vLLM inside each trainer process, which loads the trainer's weights directly.

`InProcessLLM` wraps `vllm.LLM`; `ColocateEngine` syncs and verifies its weights. vLLM changes its process; with
`VllmState` what the trainer needs is unchanged outside of its calls.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.config.user_code import keep_random_state
from grpocli.errors import ConfigError, EngineError
from grpocli.files import QuietFileHandler
from grpocli.rollout.engine import Engine, ignore_group
from grpocli.rollout.sampling import stop_token_ids
from grpocli.rollout.vllm.client import completions, sampling_params
from grpocli.rollout.vllm.plugin import leave_out_ranks
from grpocli.rollout.vllm.server import HF_OVERRIDES, common_options, on_cpu
from grpocli.rollout.vllm.weight_sync import PROBE_ROOM, PolicyWeights, WeightVerifier, require_close, together
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, EngineJob, OnGroup
    from grpocli.rollout.vllm.config import ColocateOptions

IN_PROCESS_BACKEND = "direct"  # the name under which vLLM finds `weight_transfer.InProcessWeightTransfer`
DISCARD_LEVEL = 2  # vLLM keeps neither weights nor cache; `InProcessLLM.load` sends the weights again

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",  # `log_to` configures its log
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of the trainer's process."""


class ColocateEngine(Engine):
    """Runs a full copy of the model in vLLM in each trainer process; each process samples its share of the requests."""

    def __init__(self, llm: InProcessLLM, context: EngineContext) -> None:
        self.llm, self.policy, self.world = llm, context.policy, context.world
        self.weights = PolicyWeights(context.policy, llm.dtype)
        self.verifier = WeightVerifier(context)
        self.version: int | None = None
        self._stop = stop_token_ids(self.policy.model, context.tokenizer)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order. Raises EngineError if a request fails."""
        if self.version is None:
            raise EngineError("engine=vllm_colocate does not have the policy's weights: call sync before generate")
        parameters = [sampling_params(request, sampling, self._stop) for request in requests]
        answers = self.llm.complete([request.token_ids for request in requests], parameters)
        return [
            completions(choices, request, sampling, self.version)
            for choices, request in zip(answers, requests, strict=True)
        ]

    def sync(self, version: int) -> dict[str, float]:
        """Load the policy's weights and verify them in every process; if one process fails, all raise EngineError.

        At the first sync vLLM's weights are random, which proves the load.
        """
        everything = itertools.chain(self.weights.stream(), self.weights.buffers())
        with together(self.world), self.weights.to_the_end(everything) as stream:
            self.llm.load(stream, version)  # in the trainer's dtype: vLLM's loader casts while it copies
        expected = self.verifier.score()  # outside of the next block, since that may be collective
        with together(self.world):
            require_close(self.llm.score(self.verifier.token_ids), expected, self.verifier.tolerance, version)
        self.version = version
        return {"sync/bytes": float(self.weights.bytes())}

    def release_memory(self) -> None:
        """Release vLLM's memory. The update makes its weights old, so `generate` needs a sync first.

        If one process fails, all raise EngineError.
        """
        self.version = None
        with together(self.world):
            self.llm.sleep()

    def close(self) -> None:
        self.llm.close()


def connect(options: ColocateOptions, context: EngineContext) -> ColocateEngine:
    """Start vLLM in this process. Collective: the processes create their process groups together."""
    return ColocateEngine(start(options, context.job, context.world), context)


class InProcessLLM:
    """A `vllm.LLM` in this process. Errors are raised as EngineError with the path of the log."""

    def __init__(self, llm: Any, state: VllmState, dtype: torch.dtype, can_sleep: bool, log: Path) -> None:
        self.llm, self.dtype, self.can_sleep, self.log = llm, dtype, can_sleep, log
        self.asleep = False
        self._state = state

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, drop the prefix cache and wake up."""
        with self._vllm_call("load the weights"):
            if self.asleep:
                torch.cuda.empty_cache()  # release unused memory cached by the trainer's allocator
                self.llm.wake_up(tags=["weights"])
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"weights": weights}})
            self.llm.finish_weight_update(weight_version=str(version))
            if self.asleep:  # only now, when the load's temporary memory is free again
                torch.cuda.empty_cache()
                self.llm.wake_up(tags=["kv_cache"])
                self.asleep = False
            if not self.llm.reset_prefix_cache():
                raise EngineError("vLLM did not clear its prefix cache because requests are running")

    def sleep(self) -> None:
        """Release the memory if `can_sleep` and it is awake; only `load` wakes vLLM up again."""
        if self.can_sleep and not self.asleep:
            with self._vllm_call("sleep"):
                self.llm.sleep(level=DISCARD_LEVEL)
            self.asleep = True

    def complete(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]
    ) -> list[list[dict[str, Any]]]:
        """The completions of each prompt, in order, in the form of the server's JSON (`client.py`)."""
        with self._vllm_call("generate"):
            outputs = self._generate(prompts, parameters)
            return [[_choice(one) for one in sorted(output.outputs, key=lambda o: o.index)] for output in outputs]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1."""
        with self._vllm_call("score the probe"):
            sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
            entries = self._generate([token_ids], [sampling])[0].prompt_logprobs[1:]
        return [float(entry[token].logprob) for entry, token in zip(entries, token_ids[1:], strict=True)]

    def _generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]) -> list[Any]:
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs: list[Any] = self.llm.generate(inputs, [_parameters(one) for one in parameters], use_tqdm=False)
        return outputs

    def close(self) -> None:
        """End vLLM and free its memory, but keep the trainer's own process group."""
        if self.llm is None:
            return
        with self._vllm_call("stop"), output_to(self.log), _keep_trainers_group():
            if self.asleep:  # vLLM's allocator would release memory that sleeps a second time
                torch.cuda.empty_cache()
                with contextlib.suppress(RuntimeError):  # no room, after a failure in the update: the driver complains
                    self.llm.wake_up()
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _vllm_call(self, what: str) -> Iterator[None]:
        with self._state.active(), _as_engine_error(what, self.log):
            yield


def start(options: ColocateOptions, job: EngineJob, world: World) -> InProcessLLM:
    """Start vLLM in this process, with arbitrary weights until the first `load`.

    Raises EngineError with vLLM's reason if it does not start.
    """
    os.environ.update(SETTINGS)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override engine.cpu_kv_cache_gb
    os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)  # vLLM refuses it without its own logging
    state = VllmState()
    log = (job.run_dir / "logs" / ("vllm.log" if world.is_main else f"vllm_{world.rank}.log")).absolute()
    log_to(log)
    given = arguments(options, job, world.size, on_cpu())
    with state.active(), output_to(log), _keep_variables(), _as_engine_error("start", log):
        from vllm import LLM

        from grpocli.rollout.vllm.weight_transfer import register_in_process_transfer

        register_in_process_transfer(IN_PROCESS_BACKEND)
        if on_cpu():
            leave_out_ranks()
        llm = LLM(**given)
        llm.init_weight_transfer_engine({"init_info": {}})
    return InProcessLLM(llm, state, getattr(torch, job.dtype), bool(given["enable_sleep_mode"]), log)


def arguments(options: ColocateOptions, job: EngineJob, processes: int, cpu: bool) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    given = {
        **common_options(options, job, job.model_path, cpu),
        "model": job.model_path,
        "revision": job.revision,
        "max_model_len": options.max_model_len or max(job.max_tokens, PROBE_ROOM),
        "enable_sleep_mode": not cpu,
        "weight_transfer_config": {"backend": IN_PROCESS_BACKEND},
        "load_format": "dummy",  # random weights, so that a parameter missing from a sync is detected
        "use_tqdm_on_load": False,
    }
    if cpu:  # vLLM's default is a share of the whole machine's memory
        given["kv_cache_memory_bytes"] = options.cpu_kv_cache_gb * 2**30
    else:
        given["gpu_memory_utilization"] = options.gpu_memory_utilization
    if processes > 1:  # vLLM uses this process's device and the trainers' process group, each engine alone in a group
        given["distributed_executor_backend"] = "external_launcher"
    return given | {name: value for name, value in options.vllm_args.items() if name != HF_OVERRIDES}


def _parameters(given: Mapping[str, Any]) -> Any:
    """Build vLLM's SamplingParams from the JSON of its HTTP route."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    form = given.get("structured_outputs")
    if isinstance(form, Mapping):
        given = {**given, "structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**given)


def _choice(output: Any) -> dict[str, Any]:
    """A completion in the form of vLLM's token-in-token-out route."""
    tokens = list(output.token_ids)
    picked = [entry[token].logprob for entry, token in zip(output.logprobs or [], tokens, strict=False)]
    return {
        "index": output.index,
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": value} for value in picked]},
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


@contextlib.contextmanager
def _as_engine_error(what: str, log: Path) -> Iterator[None]:
    """Convert vLLM's exceptions to one-sentence EngineErrors."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        cause = " ".join(str(error).split())[:400] or type(error).__name__
        if isinstance(error, TypeError) and "unexpected keyword" in cause:
            raise ConfigError(cause, key="engine.vllm_args") from error
        raise EngineError(f"vLLM in the trainer's process could not {what}: {cause} (its log: {log})") from error


@contextlib.contextmanager
def _keep_trainers_group() -> Iterator[None]:
    """Keep torch's default process group, which vLLM's shutdown would destroy even if the trainer made it."""
    from vllm.distributed import parallel_state

    original = parallel_state.destroy_distributed_environment

    def destroy_vllms_groups() -> None:
        if parallel_state._WORLD:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        parallel_state.destroy_distributed_environment = destroy_vllms_groups
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = original


class VllmState:
    """`with state.active():` around every use of vLLM.

    Outside of the block, random generators, torch's threads, matmul precision and stream, and warning filters are as
    if vLLM were not there. Other threads see its state during a block.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # vLLM seeds all random generators at its start, and its sampler draws from torch's
        with warnings.catch_warnings(), keep_random_state(), contextlib.ExitStack() as stack:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(_set_threads, torch.set_num_threads, torch.get_num_threads())
            if torch.cuda.is_available():
                trainers = torch.cuda.current_stream()
                stack.callback(self._leave_stream, trainers)
                _switch(trainers, self._stream or trainers)
            yield

    def _leave_stream(self, trainers: torch.cuda.Stream) -> None:
        """Keep vLLM's stream for its next call, and make the trainer's the current one."""
        self._stream = torch.cuda.current_stream()
        _switch(self._stream, trainers)


def _switch(before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
    """Make another stream of the GPU the current one; it waits for the work of the one before."""
    if after != before:
        after.wait_stream(before)
        torch.cuda.set_stream(after)


@contextlib.contextmanager
def _keep_variables() -> Iterator[None]:
    """Restore the variables of workers, which vLLM's start sets for its own."""
    before = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _set_threads(set_num_threads: Callable[[int], None], threads: int) -> None:
    """On a CPU vLLM replaces `torch.set_num_threads` by a function that does nothing; on a GPU it sets one thread."""
    torch.set_num_threads = set_num_threads  # type: ignore[assignment]
    if torch.get_num_threads() != threads:
        set_num_threads(threads)


def log_to(path: Path) -> None:
    """Write vLLM's log to a file instead of the terminal and the run's log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    vllm_logger = logging.getLogger("vllm")
    handler = QuietFileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(name)s:%(lineno)d] %(message)s"))
    vllm_logger.handlers[:] = [handler]
    vllm_logger.setLevel(logging.INFO)
    vllm_logger.propagate = False


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Redirect standard error to a file, on the level of descriptors, because C++ libraries write there directly."""
    sys.stderr.flush()
    with path.open("a") as file, os.fdopen(os.dup(2), "w") as kept:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept.fileno(), 2)
