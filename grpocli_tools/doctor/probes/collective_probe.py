"""Adds a tensor over several processes: `collective_probe.py BACKEND COUNT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

TIMEOUT = timedelta(seconds=30)


def rank(backend: str, count: int, number: int, folder: str) -> None:
    """The work of one process."""
    import torch
    import torch.distributed as distributed

    device = torch.device("cuda", number) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=number, world_size=count, timeout=TIMEOUT
    )
    one = torch.ones(1, device=device)
    distributed.all_reduce(one)  # the first one connects
    one.fill_(1)
    began = time.monotonic()
    distributed.all_reduce(one)
    total = float(one)
    if number == 0:
        print(json.dumps({"sum": total, "seconds": time.monotonic() - began}), flush=True)
    distributed.destroy_process_group()


def main() -> int:
    backend, count = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        rank(backend, count, int(sys.argv[3]), sys.argv[4])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", str(Path(__file__)), backend, str(count)]
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
        ranks = [subprocess.Popen([*command, str(number), folder], env=environ) for number in range(count)]
        return max(abs(one.wait()) for one in ranks)


if __name__ == "__main__":
    sys.exit(main())
