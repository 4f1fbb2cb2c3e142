"""Checks, before anything heavy is imported, that a run finds the code, files, packages and servers that it names."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.rollout.vllm.engine_parts import Vllm

CONNECT_WITHIN = 1.0
"""Seconds."""


def check_ready(run: Run) -> None:
    """Raise a ConfigError for the first thing that is missing. Imports no user's code and loads no data."""
    _check_packages(run)
    _check_engine(run)
    _check_part(run.engine)
    _check_part(run.model)
    check_data(run)


def check_data(run: Run) -> None:
    """`check_ready` for tasks and rewards alone."""
    from grpocli.tasks.mixture import about, key_of, tasks_of

    for name, task in tasks_of(run.task).items():
        with about(key_of(run.task, name)):
            _check_part(task)
    for reward in run.reward.values():
        _check_part(reward)


def _check_part(part: object) -> None:
    """The part's own `check_ready`; a user's part need not have one."""
    check = getattr(part, "check_ready", None)
    if check:
        check()


def _check_packages(run: Run) -> None:
    run.tracker.check()
    if run.hardware.parallel in ("zero2", "zero3") and find_spec("deepspeed") is None:
        problem = (
            "needs DeepSpeed, which is not installed: in a clone of grpocli, pip install '.[deepspeed]', or take fsdp2"
        )
        raise ConfigError(problem, key="hardware.parallel", value=run.hardware.parallel)
    if run.model.lora.rank and find_spec("peft") is None:
        raise ConfigError(
            "needs peft, which is not installed: pip install peft", key="model.lora.rank", value=run.model.lora.rank
        )


def _check_engine(run: Run) -> None:
    from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
    from grpocli.rollout.vllm.validate import check_plugin, check_vllm

    if isinstance(run.engine, VllmColocate):
        check_vllm("vllm_colocate")
    elif isinstance(run.engine, Vllm) and run.engine.base_url is None:
        check_plugin()
    elif isinstance(run.engine, Vllm) and not getproxies():
        _check_listens(run.engine)


def _check_listens(engine: Vllm) -> None:
    """Raise ConfigError where nothing listens at a given address. Whether it is a vLLM server is checked later."""
    for url in engine.urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), CONNECT_WITHIN).close()
        except TimeoutError:
            continue  # it may be slow: the engine's own deadline decides
        except OSError as error:
            problem = f"no vLLM server answers there ({error.strerror or error})"
            raise ConfigError(
                f"{problem}: start one with `grpocli vllm-serve`, or unset it to have one started",
                key="engine.base_url",
                value=url,
            ) from error
