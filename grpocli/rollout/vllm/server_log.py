"""The log of a vLLM server: the phase of its start, the cause of a failure, and the key to change."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO

from grpocli.rollout.vllm.config import RENAMED

FOLLOW = 0.1  # seconds between checks of a growing log
TAIL = 256 * 1024  # bytes at the end of a log that are searched for the cause
ERROR = re.compile(r"(?:^|[\s\]])((?:[\w.]+\.)?\w*(?:Error|Exception): .+|[\w.]+: error: .+)$")
DEFAULTS = re.compile(r"non-default args: (\{.*\})")
PYDANTIC_WORDS = re.compile(
    r"(?:pydantic_core\S*)?ValidationError: \d+ validation errors? for |Value error, |\[type=.*?\]"
)
NOT_THE_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|CancelledError|KeyboardInterrupt")
PREFIX = re.compile(r"^(?:\(\S+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[\S+\] )?")  # of vLLM's log lines
SHARE = re.compile(r"\b(\d{1,3})% ?(?:Completed )?\|")  # of a progress bar
PYDANTIC_LINES = 8  # lines after "validation error for" with the details
OPTIONS = {
    **RENAMED,
    "max_lora_rank": "model.lora.rank",
    "model": "model",
    "port": "engine.port",
    **{name: f"engine.{name}" for name in ("enforce_eager", "gpu_memory_utilization", "max_model_len", "quantization")},
}
"""The config keys of vLLM's options; any other option is in engine.vllm_args."""
ADVICE = (
    (r"GiB\) on kv cache allocation is less than", "too little memory for the KV cache: lower engine.cpu_kv_cache_gb"),
    (r"on startup is less than desired CPU memory", "too little free memory: lower engine.cpu_kv_cache_gb"),
    (
        r"Free memory on device .* is less than|CUDA out of memory|OutOfMemoryError",
        "too little free GPU memory: lower engine.gpu_memory_utilization, or free the GPU of other programs",
    ),
    (
        r"is larger than the available KV cache memory",
        (
            "the KV cache cannot hold one request: raise engine.gpu_memory_utilization (CPU: engine.cpu_kv_cache_gb), "
            "or lower engine.max_model_len or rollout.max_completion_tokens"
        ),
    ),
    (
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache: raise engine.gpu_memory_utilization (CPU: engine.cpu_kv_cache_gb)",
    ),
    (
        r"(?i)unsupported head.?(dim|size)|head.?(dim|size).{0,20}not supported",
        "vLLM's attention has no kernel for this model's head size: take engine=transformers, which supports any",
    ),
    (
        r"is greater than the derived max_model_len",
        (
            "the model's own context is too short: lower rollout.max_prompt_tokens, rollout.max_completion_tokens or "
            "engine.max_model_len"
        ),
    ),
    (
        r"World size .* is larger than the number of available GPUs|Invalid device id|invalid device ordinal",
        "there are fewer GPUs than engine.tensor_parallel times engine.data_parallel: lower them",
    ),
    (
        r"Model architectures .* failed to be inspected",
        "vLLM's code for this model does not load here (Qwen3.5 needs torchvision): take engine=transformers",
    ),
    (r"Model architectures .* are not supported", "vLLM does not know this model: take engine=transformers"),
    (r"Bfloat16 is only supported", "this GPU has no bfloat16: set model.dtype=float16"),
    (r"does not support float16", "its activations overflow float16: set model.dtype=bfloat16, or float32"),
    (r"requires BF16", "vLLM computes recurrent layers on a CPU in bfloat16 only: set model.dtype=bfloat16"),
    (r"only supported for an unquantized lm_head", "the output head is quantized: set model.head_dtype=null"),
    (r"trust_remote_code=True", "the model has its own code: set model.trust_remote_code=true if you trust it"),
)
"""Patterns of vLLM's errors, and the remedy for each."""

PHASES = (
    (r"non-default args|Resolved architecture", "reading the model's config"),
    (r"Initializing a V1 LLM engine", "starting its engine"),
    (r"Starting to load model|Loading safetensors", "loading weights"),
    (r"Loading weights took|Model loading took", "making room for the KV cache"),
    (r"Compiling a graph|Start compiling|Using cache directory: .* for vLLM's torch.compile", "compiling"),
    (r"Warming up|warming up", "warming up"),
    (r"Capturing CUDA graph", "capturing CUDA graphs"),
    (r"Starting vLLM (API )?server|Started server process|Application startup", "opening its port"),
)
"""Patterns of lines in vLLM's log, and the phase of the start that each line begins."""


class StartupLog:
    """The phase of a server's start, and how much of it is done, according to its log; other lines stay there.

    since: the byte at which this server's output begins.
    """

    def __init__(self, log: Path, since: int = 0) -> None:
        self.log, self.at = log, since
        self.phase, self.done = "loading libraries", ""

    def read(self) -> None:
        """Read the lines added since the last call; `phase` is the current phase, `done` its bar's `45 %` or empty."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.at)
                added = file.read()
        except FileNotFoundError:
            return
        whole = max(added.rfind(b"\n"), added.rfind(b"\r")) + 1  # a bar ends its line only when it is full
        self.at += whole
        for line in added[:whole].decode(errors="replace").splitlines():
            text = PREFIX.sub("", line).strip()
            begun = next((phase for pattern, phase in PHASES if re.search(pattern, text)), self.phase)
            share = SHARE.search(text)
            self.done = f"{share[1]} %" if share else self.done if begun == self.phase else ""
            self.phase = begun


def failure_cause(log: Path, since: int = 0) -> str:
    """`: ADVICE: CAUSE (see LOG)`, from the last line of the log that names an error; `: see LOG` if none does.

    since: the byte at which this server's output begins.
    """
    if not log.exists():
        return ""
    advice, cause = find_cause(log, since)
    return f": {': '.join(filter(None, [advice, cause]))} (see {log})" if cause else f": see {log}"


def find_cause(log: Path, since: int = 0) -> tuple[str, str]:
    """The key to change, if known, and the cause in vLLM's words; "" if the log names none."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - TAIL))
            lines = [PREFIX.sub("", line) for line in file.read().decode(errors="replace").splitlines()]
    except FileNotFoundError:
        return "", ""
    found = [_whole(match[1], lines[at + 1 :]) for at, line in enumerate(lines) if (match := ERROR.search(line))]
    found = [re.sub(r"\w+: Worker failed with error '(.*)', please check.*", r"\1", cause) for cause in found]
    causes = [cause for cause in found if not NOT_THE_CAUSE.search(cause)]
    given = next((match[1] for line in lines if (match := DEFAULTS.search(line))), "")
    return (advice_for(causes[-1], given), causes[-1][:400]) if causes else ("", "")


def _whole(error: str, following: list[str]) -> str:
    """The whole error: pydantic gives its details in indented lines after the first."""
    if "validation error" not in error:
        return error
    more = takewhile(re.compile(r"[\w.]+|\s+\S.*").fullmatch, following[:PYDANTIC_LINES])
    details = [line.strip() for line in more if not line.startswith("    For further information")]
    return " ".join(PYDANTIC_WORDS.sub("", " ".join([error, *details])).split())


def advice_for(cause: str, given: str = "") -> str:
    """The key to change, if known; else "".

    given: vLLM's list of the options that it was started with.
    """
    advice = next((advice for pattern, advice in ADVICE if re.search(pattern, cause)), None)
    return advice or _key(cause, given) or ""


def _key(cause: str, given: str) -> str | None:
    """The key of an option that vLLM refused; the user's if there are several."""
    names = [
        name.replace("-", "_")
        for name in re.findall(r"error: (?:argument|unrecognized arguments:) --(?:no-)?([\w-]+)", cause)
    ]
    names += re.findall(r"(\w+) (?:Input|Value|Extra|Field) \w+", cause)
    if not names:
        return None
    name = next((name for name in names if f"'{name}'" in given), names[0])
    return OPTIONS.get(name, f"engine.vllm_args.{name}")


@contextlib.contextmanager
def fresh_log(log: Path) -> Iterator[None]:
    """A new log for the block, removed at its end, but kept after an error."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.unlink(missing_ok=True)  # a killed or failed server may have left one
    log.touch(mode=0o600)
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if not failed:
            log.unlink(missing_ok=True)


@contextlib.contextmanager
def printed_log(log: Path) -> Iterator[None]:
    """Print a growing log to stdout until the block ends."""
    ended = threading.Event()
    with log.open(errors="replace") as file:
        thread = threading.Thread(target=_print_until, args=(file, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _print_until(file: IO[str], ended: threading.Event) -> None:
    last = False
    while not last:
        last = ended.wait(FOLLOW)
        if text := file.read():
            sys.stdout.write(text)
            sys.stdout.flush()
