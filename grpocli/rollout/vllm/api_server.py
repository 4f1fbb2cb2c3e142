"""vLLM's API server whose processes die with their parents: `python -m` this module, with vLLM's options.

vLLM's engine and worker processes do not notice the death of their parent, so a server killed by SIGKILL would leave
them behind with the model in memory. Spawned processes import this module as `__mp_main__` before any module of vLLM,
and forked ones run the hook. The plugin would run too late in the first and never in the second, and it also runs in
servers that users start, which may outlive their shell.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
from functools import partialmethod
from multiprocessing import process, shared_memory
from pathlib import Path

from grpocli.processes.reaper import die_with_parent
from grpocli.rollout.vllm.server_files import shared_memory_name

PRIVATE_FOLDER_VARIABLE = "GRPOCLI_SERVER_FOLDER"
"""The server's private folder. Its shared memory is named after it, so that the next start can remove leftovers."""
PARENT_VARIABLE = "GRPOCLI_SERVER_PROCESS"
"""The process id of the parent."""


def tie() -> None:
    """Die with the parent, also if it died before this call."""
    die_with_parent()
    if os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def name_shared_memory() -> None:
    """Name vLLM's shared memory and semaphores after the server's folder, for which Python has no public API."""
    name = shared_memory_name(Path(os.environ[PRIVATE_FOLDER_VARIABLE]))
    shared_memory._SHM_NAME_PREFIX = f"/{name}_"  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{name}"  # type: ignore[attr-defined]


if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__mp_main__":
        tie()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.register_at_fork(after_in_child=tie)
    name_shared_memory()
    if __name__ == "__main__":
        # a shortened name would be another option than the one that grpocli checked
        whole_names = partialmethod(argparse.ArgumentParser.__init__, allow_abbrev=False)
        argparse.ArgumentParser.__init__ = whole_names  # type: ignore[method-assign, assignment]
        # not with alter_sys: spawned processes would import vLLM's module instead of this one
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
