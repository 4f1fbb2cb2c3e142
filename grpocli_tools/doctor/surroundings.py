"""Checks of the hub, of ports, of SLURM and of the locale."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.resources import LEAST_DISK, room

if TYPE_CHECKING:
    from grpocli_tools.doctor.checkup import Needs
    from grpocli_tools.doctor.machine import Machine

HUB = "https://huggingface.co"
ENCODINGS = "import json,locale,sys; print(json.dumps({'e': [locale.getpreferredencoding(), sys.stdout.encoding]}))"


def hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether the model hub answers, its cache, and whether there is a token, which is not shown."""
    environ = machine.environ
    endpoint = environ.get("HF_ENDPOINT", HUB).rstrip("/")
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    missing = f"; not in the cache: {needs.hub}" if needs.hub else ""
    if offline:
        detail = f"{offline[0]} is set: only what is in the cache{missing}"
        yield problem("hub", detail, f"unset {offline[0]} to download", needs.hub)
    elif not endpoint.startswith(("http://", "https://")):
        detail = f"HF_ENDPOINT={endpoint!r} is not a URL, so nothing can be downloaded"
        yield problem("hub", detail, "unset HF_ENDPOINT", needs.hub)
    elif reason := machine.reach(endpoint):
        advice = (
            "export HTTPS_PROXY=URL of a proxy or HF_ENDPOINT=URL of a mirror, or work without the hub: "
            "model=hf model.path=FOLDER task.path=FILE"
        )
        yield problem("hub", f"{endpoint} does not answer: {reason}{missing}", advice, needs.hub)
    else:
        yield ok("hub", f"{endpoint} answers")
    least = LEAST_DISK if needs.hub else 0
    found = room(machine, "hub cache", hub_cache(machine), least, "export HF_HOME=FOLDER on another disk")
    yield replace(found, status="warning") if found.status == "error" and not needs.hub else found
    if environ.get("HF_TOKEN") or _there(Path(environ.get("HF_TOKEN_PATH", hub_home(machine) / "token"))):
        yield ok("hub token", "set")
    else:
        yield not_needed("hub token", "none; only gated models and private data need one (`hf auth login`)")


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder of another user
        return False


def hub_home(machine: Machine) -> Path:
    """The folder of Hugging Face's libraries."""
    environ = machine.environ
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/')}/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def hub_cache(machine: Machine) -> Path:
    """The folder of downloaded models."""
    return Path(machine.environ.get("HF_HUB_CACHE") or hub_home(machine) / "hub")


def in_cache(machine: Machine, name: str, kind: str) -> bool:
    """Whether a model or a dataset (kind: "models" or "datasets") has been downloaded."""
    prepared = Path(machine.environ.get("HF_DATASETS_CACHE") or hub_home(machine) / "datasets")
    downloaded = _there(hub_cache(machine) / f"{kind}--{name.replace('/', '--')}")
    plain = name.lower().replace("/", "").replace("_", "")
    found = prepared.iterdir() if kind == "datasets" and _there(prepared) else ()
    return downloaded or any(one.name.lower().replace("_", "") == plain for one in found)


def ports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether a server on this machine can be started and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 2.0).close()
    except OSError as error:
        detail = f"127.0.0.1 cannot be used: {error.strerror or error}"
        yield Finding("loopback", "error", detail, "bring the loopback interface up: ip link set lo up")
    else:
        yield ok("loopback", "a port on 127.0.0.1 can be opened and reached")


def slurm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """SLURM's commands, and whether this is a job of it."""
    job = machine.environ.get("SLURM_JOB_ID")
    inside = f", inside of job {job}" if job else ""
    if not machine.has("sbatch"):
        advice = "ssh to a login node of the cluster, or leave out hydra/launcher=slurm"
        yield problem("SLURM", f"no sbatch on the path{inside}", advice, needs.slurm, otherwise="-")
        return
    ended = machine.run(["sinfo", "--noheader", "--format=%P %D %t"])
    rows = [words for line in ended.out.splitlines() if len(words := line.split()) == 3]
    if ended.code == 0 and rows:
        partitions, nodes = len({partition for partition, _, _ in rows}), sum(int(count) for _, count, _ in rows)
        yield ok("SLURM", f"answers: {partitions} partitions, {nodes} nodes{inside}")
        return
    advice = "scontrol ping shows whether slurmctld runs; SLURM_CONF=FILE names another slurm.conf"
    yield problem("SLURM", f"sbatch is installed, and sinfo fails: {ended.reason}", advice, needs.slurm)


def locale(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether text is UTF-8."""
    ended = machine.run([machine.python, "-P", "-c", ENCODINGS])
    found = [str(name) for name in ended.answers().get("e", [])]
    if found and all(name.lower().replace("-", "") == "utf8" for name in found):
        yield ok("text", "UTF-8")
    else:
        shown = " and ".join(dict.fromkeys(found)) or ended.reason
        yield warning("text", f"is {shown}, not UTF-8; prompts in other scripts may not print", "export LC_ALL=C.UTF-8")
