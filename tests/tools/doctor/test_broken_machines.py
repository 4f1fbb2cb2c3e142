"""`grpocli doctor` as a process on machines that are broken for real: mounts, limits, packages and networks.

Mounts and networks are private to the process (`unshare`), so this machine stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpocli_tools.doctor.machine import Finding

pytestmark = pytest.mark.survival

GRPOCLI = Path(sys.executable).with_name("grpocli")
SECONDS = 300
"""Every probe has a deadline below it, so a doctor that takes longer hangs."""
TYPED = re.compile(
    r"\b(pip install|export|unset|ulimit|cd|docker|mount|grpocli|python|ip link|apt|scontrol|nvidia-smi|top)\b|[\w./]+="
)
"""What an advice has to hold: a command or a key."""


@dataclass(frozen=True)
class Result:
    """What `grpocli doctor --json` said. findings: by name; of lines with the same name the worst."""

    code: int
    findings: Mapping[str, Finding]
    said: str

    def __getitem__(self, name: str) -> Finding:
        return self.findings[name]


def doctor(
    folder: Path, *words: str, before: str = "", within: Sequence[str] = (), command: Sequence[str | Path] = (GRPOCLI,)
) -> Result:
    """Run it in a folder. before: a line of the shell. within: a command that runs the shell, such as `unshare`."""
    online = "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"  # which tests/conftest.py sets
    script = f"{online}\n{before}\nexec {' '.join(map(str, command))} doctor --json {' '.join(words)}"
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
    return Result(ended.returncode, {one.name: one for one in worst}, ended.stdout)


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


def overlay(folder: Path, files: Mapping[str, str]) -> str:
    """A folder of packages that come before the installed ones, as the line of a shell."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"export PYTHONPATH={folder}"


@pytest.fixture(scope="module")
def without_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has every installed package but vLLM."""
    folder = tmp_path_factory.mktemp("without") / "venv"
    venv.create(folder, with_pip=False)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith("vllm"):
            (inside / package.name).symlink_to(package)
    return folder / "bin" / "python"


def test_no_vllm(tmp_path: Path, without_vllm: Path) -> None:
    found = doctor(tmp_path, "engine=vllm", command=(without_vllm, "-P", "-m", "grpocli"))
    assert (found["vLLM"].status, found["torch"].status) == ("error", "ok")
    assert found["vLLM"].detail == "not installed; engine=vllm needs it"


METADATA = {"torch-2.5.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.5.0\n"}
NO_LIBRARY = 'raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")\n'
CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        (METADATA, "warning", "2.5.0 is installed, and "),
        ({"torch/__init__.py": NO_LIBRARY}, "error", "libcudart.so.12"),
        ({"torch/__init__.py": CRASH}, "error", "SIGSEGV"),
    ],
    ids=["of another version", "that cannot be imported", "that crashes"],
)
def test_another_torch(files: dict[str, str], status: str, said: str, tmp_path: Path) -> None:
    found = doctor(tmp_path, before=f"ulimit -c 0; {overlay(tmp_path / 'over', files)}")
    assert (found["torch"].status, said in found["torch"].detail) == (status, True)
    assert "pip install" in found["torch"].advice


def test_a_torch_beside_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
    assert doctor(tmp_path)["torch"].status == "ok"


FULL = "mount -t tmpfs -o size=256k tmpfs {0}; cd {0}; cat /dev/zero > full 2>/dev/null || true"
SMALL = "mount -t tmpfs -o size=8m tmpfs {0}; cd {0}; export TMPDIR={0}"
SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
HOME = "mount -t tmpfs -o ro tmpfs {0}; export HOME={0}; unset XDG_CACHE_HOME HF_HOME GRPOCLI_CACHE; cd /tmp"
SILENT = "ip link set lo up; echo nameserver 127.0.0.53 > {0}/conf; mount --bind {0}/conf /etc/resolv.conf"


@pytest.mark.parametrize(
    ("before", "within", "words", "wanted"),
    [
        (FULL, ("--mount",), (), {"working folder": "error", "runs": "error"}),
        (SMALL, ("--mount",), (), {"runs": "error", "temporary": "error"}),
        (SHM, ("--mount",), (), {"/dev/shm": "warning"}),
        (SHM, ("--mount",), ("engine=vllm",), {"/dev/shm": "error"}),
        (HOME, ("--mount",), (), {"cache": "error", "hub cache": "warning"}),
        ("true", ("--net",), (), {"hub": "warning"}),
        (SILENT, ("--net", "--mount"), (), {"hub": "warning"}),
    ],
)
def test_mounts_and_networks(
    before: str, within: tuple[str, ...], words: tuple[str, ...], wanted: dict[str, str], tmp_path: Path
) -> None:
    found = doctor(tmp_path, *words, before=before.format(tmp_path), within=unshare(*within))
    assert {name: found[name].status for name in wanted} == wanted


def test_few_open_files_and_commands_that_hang(tmp_path: Path) -> None:
    """A limit, and a driver and a SLURM controller that do not answer."""
    for name in ("nvidia-smi", "sinfo", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 1000\n")
        (tmp_path / name).chmod(0o755)
    found = doctor(tmp_path, before=f"ulimit -n 64; export PATH={tmp_path}:$PATH")
    assert (found["open files"].status, found["open files"].advice) == ("error", "ulimit -n 65536")
    for name in ("GPUs", "SLURM"):
        assert (found[name].status, "did not end in time" in found[name].detail) == ("warning", True)
