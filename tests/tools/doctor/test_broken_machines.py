"""`grpocli doctor` as a process on machines that are broken for real: mounts, limits, packages and networks.

Mounts and networks are private to the process (`unshare`), so this machine stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpocli_tools.doctor.machine import Finding

pytestmark = [pytest.mark.processes, pytest.mark.survival]

GRPOCLI = Path(sys.executable).with_name("grpocli")
SECONDS = 300
"""Every probe has a deadline below it, so a doctor that takes longer hangs."""
TYPED = re.compile(
    r"\b(pip install|export|unset|ulimit|cd|docker|mount|grpocli|python|ip link|apt|scontrol|nvidia-smi|top)\b|[\w./]+="
)
"""What an advice has to hold: a command or a key."""


def doctor(folder: Path, *words: str, before: str, within: Sequence[str] = ()) -> dict[str, Finding]:
    """What `grpocli doctor --json` says in a folder: {name: its worst finding}.

    before: a line of the shell. within: a command that runs the shell, such as `unshare`.
    """
    online = "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"  # which tests/conftest.py sets
    script = f"{online}\n{before}\nexec {GRPOCLI} doctor --json {' '.join(words)}"
    ended = subprocess.run([*within, "sh", "-ec", script], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert "Traceback" not in ended.stderr, ended.stderr
    lines = [Finding(**one) for one in json.loads(ended.stdout)]
    for one in lines:
        assert "Traceback" not in one.detail
        assert "this check" not in one.detail, one  # it failed or hung
        if one.status in ("warning", "error"):
            assert TYPED.search(one.advice), one
    worst = sorted(lines, key=lambda one: ("-", "ok", "warning", "error").index(one.status))
    assert ended.returncode == any(one.status == "error" for one in lines)
    return {one.name: one for one in worst}


def unshare(*options: str) -> list[str]:
    """The prefix of a command with namespaces of its own; skips the test where the kernel refuses them."""
    command = ["unshare", *options]
    try:
        refused = subprocess.run([*command, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if os.geteuid() or refused.returncode:
        pytest.skip(f"{' '.join(command)} needs root: {refused.stderr.strip() or 'this user is another'}")
    return command


def test_few_open_files_commands_that_hang_and_a_torch_beside_the_working_folder(tmp_path: Path) -> None:
    """A limit, a driver and a SLURM controller that do not answer, and a file that is not imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
    for name in ("nvidia-smi", "sinfo", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 1000\n")
        (tmp_path / name).chmod(0o755)
    found = doctor(tmp_path, before=f"ulimit -n 64; export PATH={tmp_path}:$PATH")
    assert found["torch"].status == "ok"
    assert (found["open files"].status, found["open files"].advice) == ("error", "ulimit -n 65536")
    for name in ("GPUs", "SLURM"):
        assert (found[name].status, "did not end in time" in found[name].detail) == ("warning", True)


CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
SILENT = "ip link set lo up; echo nameserver 127.0.0.53 > {0}/conf; mount --bind {0}/conf /etc/resolv.conf"
HOME = "mount -t tmpfs -o ro tmpfs {0}/home; export HOME={0}/home; unset XDG_CACHE_HOME HF_HOME GRPOCLI_CACHE"
FULL = "mount -t tmpfs -o size=256k tmpfs {0}/full; cd {0}/full; cat /dev/zero > full 2>/dev/null || true"


def test_a_torch_that_crashes_a_full_disk_mounts_and_a_network(tmp_path: Path) -> None:
    """A small /dev/shm, a network that does not answer, a home that cannot be written, and a full working folder."""
    for name in ("home", "full", "over/torch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "over" / "torch" / "__init__.py").write_text(CRASH)
    before = "; ".join([f"ulimit -c 0; export PYTHONPATH={tmp_path}/over", SHM, SILENT, HOME, FULL]).format(tmp_path)
    found = doctor(tmp_path, "engine=vllm", before=before, within=unshare("--net", "--mount"))
    wanted = dict.fromkeys(("working folder", "runs", "/dev/shm", "cache", "torch"), "error")
    wanted |= dict.fromkeys(("hub", "hub cache"), "warning")
    assert {name: found[name].status for name in wanted} == wanted
    assert "SIGSEGV" in found["torch"].detail
    assert "pip install" in found["torch"].advice
