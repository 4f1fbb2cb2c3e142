"""Checks of the hub, of ports, of SLURM and of the locale."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.machine import MISSING
from grpocli_tools.doctor.needs import LEAST_DISK
from grpocli_tools.doctor.resources import room

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine
    from grpocli_tools.doctor.needs import Needs

HUB = "https://huggingface.co"
SLURM_SECONDS = 10.0
ENCODINGS = "import json,locale,sys; print(json.dumps({'e': [locale.getpreferredencoding(), sys.stdout.encoding]}))"


def hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether the model hub answers, its cache, and whether there is a token, which is not shown."""
    environ = machine.environ
    endpoint = environ.get("HF_ENDPOINT", HUB).rstrip("/")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _true(environ.get(name, ""))]
    if offline:
        advice = f"unset {offline[0]} to download"
        missing = f", which lacks {needs.hub}" if needs.hub else ""
        yield problem("hub", f"{offline[0]} is set: only what is in the cache{missing}", advice, needs.hub)
    elif not endpoint.startswith(("http://", "https://")):
        detail = f"HF_ENDPOINT={endpoint!r} is not a URL, so nothing can be downloaded"
        yield problem("hub", detail, "unset HF_ENDPOINT", needs.hub)
    elif reason := machine.reach(endpoint):
        advice = (
            "export HTTPS_PROXY=URL of a proxy or HF_ENDPOINT=URL of a mirror, or work without the hub: "
            "model=hf model.path=FOLDER task.path=FILE"
        )
        missing = f"; not in the cache: {needs.hub}" if needs.hub else ""
        yield problem("hub", f"{endpoint} does not answer: {reason}{missing}", advice, needs.hub)
    else:
        yield ok("hub", f"{endpoint} answers")
    cache = hub_cache(machine)
    found = room(machine, "hub cache", cache, LEAST_DISK if needs.hub else 0, "export HF_HOME=FOLDER on another disk")
    unneeded = found.status == "error" and not needs.hub
    yield replace(found, status="warning") if unneeded else found
    token = environ.get("HF_TOKEN") or existing_file(Path(environ.get("HF_TOKEN_PATH", hub_home(machine) / "token")))
    if token:
        yield ok("hub token", "set")
    else:
        yield not_needed("hub token", "none; only gated models and private data need one (`hf auth login`)")


def existing_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def hub_home(machine: Machine) -> Path:
    """The folder of Hugging Face's libraries."""
    environ = machine.environ
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/')}/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def hub_cache(machine: Machine) -> Path:
    """The folder of downloaded models."""
    environ = machine.environ
    return Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or hub_home(machine) / "hub")


def in_cache(machine: Machine, name: str, kind: str) -> bool:
    """Whether a model or a dataset (kind: "models" or "datasets") has been downloaded."""
    folders = [hub_cache(machine) / f"{kind}--{name.replace('/', '--')}"]
    if kind == "datasets":
        prepared = Path(machine.environ.get("HF_DATASETS_CACHE") or hub_home(machine) / "datasets")
        folders += [prepared] if any(_plain(one.name) == _plain(name) for one in _content(prepared)) else []
    return any(_content(folder) for folder in folders)


def _plain(name: str) -> str:
    """A dataset's name without the characters that `datasets` changes in its cache, `openai___gsm8k`."""
    return name.lower().replace("/", "").replace("_", "").replace("-", "")


def _content(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _true(text: str) -> bool:
    return text.upper() in ("1", "ON", "YES", "TRUE")


def ports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether a server on this machine can be started and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 2.0).close()
    except OSError as error:
        detail = f"127.0.0.1 cannot be used: {error.strerror or error}"
        yield Finding("loopback", "error", detail, "bring the loopback interface up: ip link set lo up")
        return
    yield ok("loopback", "a port on 127.0.0.1 can be opened and reached")


def slurm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """SLURM's commands, and whether this is a job of it."""
    job = machine.environ.get("SLURM_JOB_ID")
    inside = f"inside of job {job}" if job else ""
    if not machine.has("sbatch"):
        detail = f"{inside}, without sbatch on the path" if inside else "no sbatch on the path"
        advice = "ssh to a login node of the cluster, or leave out hydra/launcher=slurm"
        yield problem("SLURM", detail, advice, needs.slurm, otherwise="-")
        return
    ended = machine.run(["sinfo", "--noheader", "--format=%P %D %t"], SLURM_SECONDS)
    if ended.code == 0 and ended.out.strip():
        nodes = sum(int(words[1]) for line in ended.out.splitlines() if len(words := line.split()) > 1)
        partitions = {line.split()[0] for line in ended.out.splitlines() if line.split()}
        detail = f"answers: {len(partitions)} partitions, {nodes} nodes"
        yield ok("SLURM", f"{detail}, {inside}" if inside else detail)
        return
    reason = f"no answer within {SLURM_SECONDS:g} s" if ended.code is None else ended.last_error
    reason = "sinfo is not on the path" if ended.code == MISSING else reason
    advice = "scontrol ping shows whether slurmctld runs; SLURM_CONF=FILE names another slurm.conf"
    yield problem("SLURM", f"sbatch is installed, and sinfo fails: {reason}", advice, needs.slurm)


def locale(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether text is UTF-8."""
    ended = machine.run([machine.python, "-P", "-c", ENCODINGS], 5.0)
    found = [str(name) for name in ended.answers().get("e", [])]
    if found and all(name.lower().replace("-", "") == "utf8" for name in found):
        yield ok("text", "UTF-8")
    else:
        shown = " and ".join(dict.fromkeys(found)) or ended.last_error
        yield warning("text", f"is {shown}, not UTF-8; prompts in other scripts may not print", "export LC_ALL=C.UTF-8")
