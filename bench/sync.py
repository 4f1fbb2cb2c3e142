"""Benchmark a weight sync against a plain copy of the same number of bytes: `python bench/sync.py --model FOLDER`.

Starts the server of `engine=vllm`, changes the weights, syncs n times, and prints JSON. `ratio` is `update_seconds`
(without the probe) over `copy_seconds`. `split` has the time of each call to the server; with several buckets the
trainer's `write` overlaps `update`. `copy_seconds` copies as many bytes between warm memory in this process, with as
many threads. Peaks are resident memory: VmHWM after the syncs minus VmRSS before the first (VmHWM is reset then), of
this process and of the server's largest process, its worker; shared buckets count in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("pause", "start_update", "update", "finish_update", "reset_prefix_cache", "weight_version", "resume", "score")


class CallTimer:
    """Records the duration of every call to the watched methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, name: str, label: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds.setdefault(label, []).append(time.perf_counter() - start)

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.seconds.clear()


def copy_seconds(size: int, times: int) -> float:
    """The median of copying `size` bytes into warm memory."""
    import torch

    source = torch.full((size,), 1, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def memory(pid: int | str, field: str) -> int:
    """Bytes of a field of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def reset_peak(pid: int | str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def largest_below(pid: int) -> int:
    """The descendant with the most resident memory."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue

    def below(child: int) -> bool:
        while child in parents:
            child = parents[child]
            if child == pid:
                return True
        return False

    return max((child for child in parents if below(child)), key=lambda child: memory(child, "VmRSS"))


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", required=True, help="a Hugging Face folder")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--times", type=int, default=10)
    cli.add_argument("--bucket-mb", type=int, default=None)
    cli.add_argument("--transport", default="auto", help="sync=auto|shm|nccl|ipc")
    args = cli.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in `grpocli train`: idle threads leave the cores to the server
    print(json.dumps(measure(args), indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpocli.rollout import sync_config
    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.engine_parts import Vllm
    from grpocli.training.policy import Policy

    options = Vllm()
    part = getattr(sync_config, f"{args.transport.capitalize()}SyncConfig")(
        **({"bucket_mb": args.bucket_mb} if args.bucket_mb else {})
    )
    transport = part.choose(sync_config.locate_servers("auto", options.urls, shared=True))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        job = EngineJob(args.model, args.dtype, 256, Path(folder), seed=0, transport=transport)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
        policy = Policy(model, model, getattr(torch, args.dtype))
        with options.launch(job):
            context = EngineContext(job, policy, AutoTokenizer.from_pretrained(args.model), alone(), part)
            engine: Any = options.connect(context)
            result = timings(engine, policy, args.times, {"trainer": os.getpid(), "server": largest_below(os.getpid())})
            engine.close()
    return {"model": args.model, "dtype": args.dtype, "transport": transport, **result}


def timings(engine: Any, policy: Any, times: int, processes: dict[str, int]) -> dict[str, Any]:
    import torch

    from grpocli.rollout.vllm.transports import BucketFile

    policy.score([1, 2, 3])
    before = {name: memory(pid, "VmRSS") for name, pid in processes.items()}
    for pid in processes.values():
        reset_peak(pid)
    calls = CallTimer()
    for server in engine._synchronizer.servers:
        for name in CALLS:
            calls.watch(server, name, name)
    calls.watch(BucketFile, "write", "write")
    calls.watch(policy, "score", "trainer's score")
    seconds, metrics = [], []
    for version in range(times + 1):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.001)
        if version == 1:
            calls.clear()
        start = time.perf_counter()
        metrics.append(engine.sync(version))
        seconds.append(time.perf_counter() - start)
    sent = int(metrics[0]["sync/bytes"])
    update, probe = (
        statistics.median(one[f"sync/seconds/{part}"] for one in metrics[1:]) for part in ("update", "probe")
    )
    copied = copy_seconds(sent, times)
    split = {name: round(sum(taken) / times, 4) for name, taken in calls.seconds.items()}
    return {
        "bytes": sent,
        "first_sync_seconds": round(seconds[0], 3),
        "sync_seconds": round(statistics.median(seconds[1:]), 4),
        "update_seconds": round(update, 4),
        "probe_seconds": round(probe, 4),
        "split": split,
        "copy_seconds": round(copied, 4),
        "ratio": round(update / copied, 2),
        "peak_extra_mib": {
            name: round((memory(pid, "VmHWM") - before[name]) / 2**20) for name, pid in processes.items()
        },
        "threads": torch.get_num_threads(),
    }


def alone() -> Any:
    """A world of one process."""
    from grpocli.distributed.world import World
    from grpocli.hardware import Single

    return World(Single())


if __name__ == "__main__":
    main()
