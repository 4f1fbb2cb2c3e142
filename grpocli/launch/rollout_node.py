"""A machine that serves completions to a run on other machines: `python -m grpocli.launch.rollout_node RUN_DIR`.

The batch script starts one such process on each machine. It waits for the first training machine, starts this machine's
vLLM servers, and ends when the run is over or a signal arrives.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

from grpocli.composition.compose import saved_run
from grpocli.errors import ConfigError, GrpoError, config_errors
from grpocli.hardware import devices_of
from grpocli.http import is_loopback
from grpocli.launch.run import READY_WITHIN
from grpocli.launch.trainer_launcher import wait_for_job
from grpocli.processes.libraries import quiet_libraries
from grpocli.processes.node import Node
from grpocli.processes.signals import handle_stops
from grpocli.runs.run_dir import RunDir
from grpocli.text import clean


def main() -> None:
    """Serve, and exit with the code of the error if there is one."""
    run_dir, stop_event = Path(sys.argv[1]), threading.Event()
    handle_stops(lambda *_: stop_event.set())
    try:
        serve(run_dir, stop_event)
    except GrpoError as error:
        print(f"grpocli: error: {socket.gethostname()}: {clean(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


def serve(run_dir: Path, stop_event: threading.Event) -> None:
    """Serve until the run in `run_dir` is over, or `stop_event` is set. Raises ConfigError or EngineError."""
    from grpocli.rollout.vllm.supervisor import own_servers, report_failure, serve_until_over

    node = Node.here()
    if node is None:
        raise ConfigError("grpocli.launch.rollout_node runs in a SLURM job only", hint="the batch script starts it")
    run = saved_run(RunDir(run_dir))
    quiet_libraries()
    logging.basicConfig(filename=run_dir / "run.log", level=logging.INFO, format="%(asctime)s [serving] %(message)s")
    job = wait_for_job(run_dir, node.session, READY_WITHIN, ready=False, give_up=stop_event)
    if job is None:
        return
    try:
        engine = replace(job.engine, gpus=devices_of(run.hardware, run.engine).train)  # all of this machine
        first = node.rank * run.engine.replicas
        with own_servers(run.engine, engine, stop_event, _reachable_name(), first) as servers:
            serve_until_over(servers, run_dir, stop_event)
    except GrpoError as error:
        if stop_event.is_set():
            return
        report_failure(run_dir, node.rank, error)
        raise


def _reachable_name() -> str:
    """The name under which other machines reach this one. Raises ConfigError if it has only loopback addresses."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with config_errors(OSError, says=f"{name} has no address here: {{}}", key="hardware", value="multinode"):
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    if all(is_loopback(address) for address in addresses):
        problem = f"{name} is {', '.join(sorted(addresses))} here, which other machines do not reach"
        raise ConfigError(problem, key="hardware", value="multinode", hint="remove that line from its /etc/hosts")
    return name


if __name__ == "__main__":
    main()
