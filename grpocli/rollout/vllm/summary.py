"""What `grpocli vllm-serve` prints once its server is ready."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpocli.rollout.vllm.client import Client

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.endpoint import Endpoint


def served(endpoint: Endpoint) -> dict[str, Any]:
    """vLLM's version and its own description of the model that it serves."""
    client = Client(endpoint, timeout=60)
    config = client.get("/server_info?config_format=json")["vllm_config"]
    return {"version": client.get("/version")["version"], **config["model_config"]}


def how_to_use(endpoint: Endpoint, record: Path, job: EngineJob, description: dict[str, Any]) -> str:
    """What the server is, and how runs on this machine and elsewhere are pointed at it.

    record: the file with the key. description: see `served`.
    """
    rank, shm = job.lora_rank, job.transport == "shm"
    facts = {
        "vLLM": description["version"],
        "model": job.model_path,
        "dtype": f"{job.dtype} (the run's model.dtype must be the same)",
        "max_model_len": f"{description['max_model_len']} tokens of prompt and completion",
        "weights": f"sync={job.transport}" + (f", through {endpoint.shm_dir}" if shm else ""),
        "adapters": f"up to rank {rank} (the run's model.lora.rank)" if rank else "none: runs send all weights",
        "key": f"{record} (mode 0600; a run on this machine finds it)",
        **({"log": f"{endpoint.log} (verbose=true prints it)"} if endpoint.log else {}),
    }
    choices = [f"model.lora.rank={rank}"] * bool(rank) + [f"sync={job.transport}"] * (not shm)
    port = urlsplit(endpoint.url).port
    return "\n".join(
        [
            f"\nvLLM serves at {endpoint.url}",
            *(f"  {name:<15}{fact}" for name, fact in facts.items()),
            "train with it, with the same model=:",
            "  " + " ".join(["grpocli train engine=vllm", f"engine.base_url={endpoint.url}", *choices]),
            "from another machine, where this one serves with host=0.0.0.0:",
            f"  engine.base_url=http://THIS_MACHINE:{port} engine.api_key_file=COPY_OF_THE_KEY",
            *(["  and here and there sync=shm sync.folder=A_FOLDER_THAT_BOTH_SEE"] if shm else []),
            "stop with Ctrl-C\n",
        ]
    )
