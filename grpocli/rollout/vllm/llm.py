"""vLLM inside this process: its start, its calls, sleep and wake, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm.env_isolation import Guest, log_to, output_to
from grpocli.rollout.vllm.protocol import PROBE_ROOM
from grpocli.rollout.vllm.server import on_cpu, sequences

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import ColocateOptions

DISCARD = 2  # vLLM's sleep level that keeps neither weights nor cache: the weights come from the trainer again


class Inside:
    """One `vllm.LLM` of this process. What goes wrong in it is an EngineError that says where its log is.

    dtype: of its weights. sleeps: whether it gives its memory back when told to.
    """

    def __init__(self, llm: Any, guest: Guest, dtype: torch.dtype, sleeps: bool, log: Path) -> None:
        self.llm, self.dtype, self.sleeps, self.log = llm, dtype, sleeps, log
        self.asleep = False
        self._guest = guest

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Replace all weights, forget what was computed with the old ones, wake up; return the bytes loaded."""
        sent = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                sent += tensor.numel() * self.dtype.itemsize
                yield name, tensor  # in the trainer's dtype: vLLM's loader casts as it copies

        with self._calling("load the weights"):
            if self.asleep:
                torch.cuda.empty_cache()  # what the trainer's allocator keeps and does not use
                self.llm.wake_up(tags=["weights"])
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"weights": counted()}})
            self.llm.finish_weight_update(weight_version=str(version))
            if self.asleep:  # now, so that what the load took for a moment is free again
                torch.cuda.empty_cache()
                self.llm.wake_up(tags=["kv_cache"])
                self.asleep = False
            if not self.llm.reset_prefix_cache():
                raise EngineError("vLLM in this process could not drop its prefix cache: requests run")
        return sent

    def sleep(self) -> None:
        """Give the memory back, where that is wanted; only `load` wakes up again."""
        if self.sleeps:
            with self._calling("sleep"):
                self.llm.sleep(level=DISCARD)
            self.asleep = True

    def weight_version(self) -> str:
        return str(self.llm.get_weight_version())

    def complete(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]
    ) -> list[list[dict[str, Any]]]:
        """The choices of each prompt as the server's route would answer (see `request`), in order."""
        with self._calling("generate"):
            outputs = self._generate(prompts, parameters)
            return [[_choice(one) for one in sorted(output.outputs, key=lambda o: o.index)] for output in outputs]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1."""
        with self._calling("score the probe"):
            sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
            entries = self._generate([token_ids], [sampling])[0].prompt_logprobs[1:]
        return [float(entry[token].logprob) for entry, token in zip(entries, token_ids[1:], strict=True)]

    def _generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]) -> list[Any]:
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs: list[Any] = self.llm.generate(inputs, [_parameters(one) for one in parameters], use_tqdm=False)
        return outputs

    def close(self) -> None:
        """End it and free its memory; the trainer's own process group stays."""
        if self.llm is None:
            return
        with self._calling("stop"), _trainers_group_kept():
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        with self._guest.visiting(), _failing(what, self.log):
            yield


def start(options: ColocateOptions, job: EngineJob, world: World) -> Inside:
    """An engine of this process's own. Its weights are arbitrary until the first `load`.

    Raises EngineError with vLLM's reason where it does not start.
    """
    guest = Guest()
    log = (job.run_dir / "logs" / ("vllm.log" if world.is_main else f"vllm_{world.rank}.log")).absolute()
    log_to(log)
    given = arguments(options, job, world.size, on_cpu())
    with guest.visiting(), output_to(log), _failing("start", log):
        from vllm import LLM

        from grpocli.rollout.vllm.in_process_transfer import register

        register()
        llm = LLM(**given)
        llm.init_weight_transfer_engine({"init_info": {}})
    return Inside(llm, guest, getattr(torch, job.dtype), bool(given["enable_sleep_mode"]), log)


def arguments(options: ColocateOptions, job: EngineJob, processes: int, cpu: bool) -> dict[str, Any]:
    """What `vllm.LLM` is made of."""
    given = {
        "model": job.model_path,
        "revision": job.revision,
        "trust_remote_code": job.trust_remote_code,
        "dtype": job.dtype,
        "seed": job.seed,
        "max_model_len": options.max_model_len or max(job.max_tokens, PROBE_ROOM),
        "quantization": options.quantization,
        "max_num_seqs": sequences(job.most, cpu),
        "enforce_eager": cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_sleep_mode": not cpu if options.sleep is None else options.sleep,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False if cpu else None,  # with seeds a prompt in pieces kills vLLM on a CPU
        "generation_config": "vllm",  # else the model's folder may change sampling behind our back
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "weight_transfer_config": {"backend": "direct"},  # in_process_transfer.py
        "load_format": "dummy",  # the weights are the trainer's: what a sync leaves out cannot pass for loaded
        "use_tqdm_on_load": False,
    }
    # its own memory would be a share of the machine's on a CPU, where a GPU's is a share of the GPU's
    memory = (
        {"kv_cache_memory_bytes": options.cpu_kv_cache_gb * 2**30}
        if cpu
        else {"gpu_memory_utilization": options.gpu_memory_utilization}
    )
    # takes this process's device and the trainers' process group, in which each engine is a group of one
    several = {"distributed_executor_backend": "external_launcher"} if processes > 1 else {}
    return given | memory | several | options.vllm_args


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that `vllm.LLM` does not have."""
    with Guest().visiting():
        from vllm import EngineArgs

        known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in given:
        if name not in known:
            raise ConfigError(f"engine.vllm_args.{name}: vllm.LLM has no such argument{nearest(name, known)}")


def _parameters(given: Mapping[str, Any]) -> Any:
    """vLLM's SamplingParams from what its route takes as JSON."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    form = given.get("structured_outputs")
    if isinstance(form, Mapping):
        given = {**given, "structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**given)


def _choice(output: Any) -> dict[str, Any]:
    """A completion in the words of vLLM's token-in-token-out route."""
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
def _failing(what: str, log: Path) -> Iterator[None]:
    """Anything that vLLM raises, as one sentence."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        cause = " ".join(str(error).split())[:400] or type(error).__name__
        memory = "; see engine.gpu_memory_utilization (GPU), engine.cpu_kv_cache_gb (CPU)" if "memory" in cause else ""
        raise EngineError(
            f"vLLM in the trainer's process could not {what}: {cause}{memory} (its log: {log})"
        ) from error


@contextlib.contextmanager
def _trainers_group_kept() -> Iterator[None]:
    """vLLM's shutdown destroys torch's default process group, also where the trainer made it before vLLM came."""
    from vllm.distributed import parallel_state

    whole = parallel_state.destroy_distributed_environment

    def groups_of_vllm() -> None:
        if parallel_state._WORLD:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        parallel_state.destroy_distributed_environment = groups_of_vllm
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = whole
