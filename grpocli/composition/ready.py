"""Checks that the files, packages and servers of a run exist, before anything heavy is imported."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from grpocli.config.parts import require
from grpocli.config.user_code import check_exists
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.rollout.vllm.engine_parts import Vllm

CONNECT_WITHIN = 1.0
"""Seconds to wait for a connection."""


def check_ready(run: Run) -> None:
    """Raise ConfigError for the first missing thing. Imports no user code and loads no data."""
    _check_packages(run)
    _check_engine(run)
    for part in (run.engine, run.model, run.optim, run.algorithm):
        _check_part(part)
    check_teachers(run)
    check_data(run)


def check_training(run: Run) -> None:
    """`check_ready` for what only a training needs: its callbacks, and a token that may push it to the hub."""
    for spec in run.callbacks:
        check_exists(spec, "callbacks")
    if run.hub.push is not None:
        from grpocli.hub import PUSH_KEY, check_may_push

        check_may_push(PUSH_KEY, run.hub.push, run.hub.revision, private=run.hub.private)


def check_teachers(run: Run) -> None:
    """`check_ready` for the models of `algorithm.kl.model` only; raises ConfigError if one is missing there."""
    from grpocli.algorithm.kl import has_teacher

    _check_signal(run)
    if has_teacher(run.algorithm.kl):
        from grpocli.models.teacher import teachers_of

        for teacher in teachers_of(run.algorithm.kl, run.model):
            teacher.check_ready()


def _check_signal(run: Run) -> None:
    """Raise ConfigError if the policy would learn nothing; not in `check_run`, as such a config can be explained."""
    from grpocli.algorithm.advantage import NoAdvantage
    from grpocli.algorithm.kl import KL, has_teacher

    algorithm = run.algorithm
    if not isinstance(algorithm.advantage, NoAdvantage) or algorithm.needs_entropy_gradient:
        return
    if not algorithm.needs_reference:
        problem = "nothing trains: choose algorithm/kl=reverse with algorithm.kl.model=TEACHER, or another advantage"
        if has_teacher(algorithm.kl):
            problem = "nothing trains, as algorithm/advantage=none: give a beta above 0"
            raise ConfigError(problem, key="algorithm.kl.beta", value=0)
        raise ConfigError(problem, key="algorithm/advantage", value="none")
    if isinstance(algorithm.kl, KL) and not has_teacher(algorithm.kl):
        problem = "the start policy would be its own teacher: give a folder or a name on the hub"
        raise ConfigError(problem, key="algorithm.kl.model", value="null")


def check_data(run: Run) -> None:
    """`check_ready` for tasks and rewards only."""
    from grpocli.tasks.task import errors_below, key_of, tasks_of

    for name, task in tasks_of(run.task).items():
        with errors_below(key_of(run.task, name)):
            _check_part(task)
    for reward in run.reward.values():
        _check_part(reward)


def _check_part(part: object) -> None:
    """Call the part's `check_ready`, which parts of users may lack."""
    check = getattr(part, "check_ready", None)
    if check:
        check()


def _check_packages(run: Run) -> None:
    run.tracker.check()
    if run.hardware.parallel in ("zero2", "zero3"):
        hint = "pip install '.[deepspeed]' in a clone of grpocli, or choose fsdp2"
        there = find_spec("deepspeed") is not None
        require(run.hardware, "parallel", there, "needs DeepSpeed, which is not installed", hint)
    if run.model.lora.rank:
        there = find_spec("peft") is not None
        require(run.model.lora, "rank", there, "needs peft, which is not installed: pip install peft")


def _check_engine(run: Run) -> None:
    from grpocli.rollout.vllm.config import check_plugin, check_vllm
    from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate

    if isinstance(run.engine, VllmColocate):
        check_vllm("vllm_colocate")
    elif isinstance(run.engine, Vllm) and run.engine.base_url is None:
        check_plugin()
    elif isinstance(run.engine, Vllm) and not getproxies():
        _check_listens(run.engine)


def _check_listens(engine: Vllm) -> None:
    """Raise ConfigError if nothing listens at a given address. A later check asks whether it is a vLLM server."""
    for url in engine.urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), CONNECT_WITHIN).close()
        except TimeoutError:
            continue  # it may be slow: the engine's timeout decides
        except OSError as error:
            problem = f"no vLLM server answers there ({error.strerror or error})"
            hint = "start one with `grpocli vllm-serve`, or leave it out to have one started"
            raise ConfigError(problem, key="engine.base_url", value=url, hint=hint) from error
