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

from grpocli_tools.doctor.checkup import Finding

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
    command = (without_vllm, "-P", "-m", "grpocli")
    found = doctor(tmp_path, command=command)
    assert (found["vLLM"].status, found["torch"].status) == ("-", "ok")
    needed = doctor(tmp_path, "engine=vllm", command=command)
    assert needed["vLLM"].status == "error"
    assert needed["vLLM"].detail == "not installed; engine=vllm needs it"
    assert "pip install '.[vllm" in needed["vLLM"].advice


def test_a_torch_of_another_version(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.5.0\n"
    found = doctor(tmp_path, before=overlay(tmp_path / "over", {"torch-2.5.0.dist-info/METADATA": metadata}))
    assert found["torch"].status == "warning"
    assert "2.5.0 is installed, and " in found["torch"].detail
    assert re.search(r"pip install 'torch[=<>]", found["torch"].advice)


@pytest.mark.parametrize("words", [(), ("engine=vllm", "hardware.parallel=zero3", "hardware.processes=2")])
def test_a_torch_that_cannot_be_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    library = 'raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")\n'
    found = doctor(tmp_path, *words, before=overlay(tmp_path / "over", {"torch/__init__.py": library}))
    assert found["torch"].status == "error"
    assert "libcudart.so.12" in found["torch"].detail
    assert "pip install --force-reinstall --no-deps torch==" in found["torch"].advice
    assert found["vLLM"].status == ("error" if words else "warning")
    assert "libcudart.so.12" in found["vLLM"].detail


def test_a_torch_that_crashes(tmp_path: Path) -> None:
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    found = doctor(tmp_path, before=f"ulimit -c 0; {overlay(tmp_path / 'over', {'torch/__init__.py': crash})}")
    assert (found["torch"].status, "SIGSEGV" in found["torch"].detail) == ("error", True)


def test_a_torch_beside_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
    assert doctor(tmp_path)["torch"].status == "ok"


def test_a_full_disk(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o size=256k tmpfs {tmp_path}; cd {tmp_path}; cat /dev/zero > full 2>/dev/null || true"
    found = doctor(tmp_path, before=fill, within=unshare("--mount"))
    assert (found["working folder"].status, found["runs"].status) == ("error", "error")
    assert "No space left on device" in found["runs"].detail
    assert "hydra.run.dir=FOLDER" in found["runs"].advice


def test_a_disk_with_little_room_which_also_holds_temporary_files(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}; cd {tmp_path}; export TMPDIR={tmp_path}"
    found = doctor(tmp_path, before=mount, within=unshare("--mount"))
    for name in ("runs", "temporary"):
        assert found[name].status == "error"
        assert "8 MiB free, and the run needs 200 MiB" in found[name].detail
    assert found["temporary"].advice.startswith("export TMPDIR=")


@pytest.mark.parametrize(("words", "status"), [((), "warning"), (("engine=vllm",), "error")])
def test_a_tiny_dev_shm(tmp_path: Path, words: tuple[str, ...], status: str) -> None:
    shm = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    found = doctor(tmp_path, *words, before=shm, within=unshare("--mount"))
    assert found["/dev/shm"].status == status
    assert "1 MiB of 1 MiB free" in found["/dev/shm"].detail
    assert "--shm-size=" in found["/dev/shm"].advice


def test_no_network(tmp_path: Path) -> None:
    found = doctor(tmp_path, within=unshare("--net"))
    assert (found["hub"].status, found["loopback"].status) == ("warning", "error")
    assert "HTTPS_PROXY=" in found["hub"].advice
    assert "ip link set lo up" in found["loopback"].advice


def test_a_name_server_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    silent = f"ip link set lo up; mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    found = doctor(tmp_path, before=silent, within=unshare("--net", "--mount"))
    assert (found["hub"].status, found["loopback"].status) == ("warning", "ok")


def test_few_open_files(tmp_path: Path) -> None:
    found = doctor(tmp_path, before="ulimit -n 64")
    assert found["open files"].status == "error"
    assert found["open files"].advice == "ulimit -n 65536"


def test_a_home_that_is_read_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    mount = f"mount -t tmpfs -o ro tmpfs {home}; export HOME={home}; unset XDG_CACHE_HOME HF_HOME GRPOCLI_CACHE"
    found = doctor(tmp_path, before=mount, within=unshare("--mount"))
    assert found["cache"].status == "error"
    assert "export GRPOCLI_CACHE=FOLDER" in found["cache"].advice
    assert (found["home"].status, found["hub cache"].status) == ("warning", "warning")
    assert found["runs"].status == "ok"


def test_commands_that_hang(tmp_path: Path) -> None:
    """A driver and a SLURM controller that do not answer."""
    for name in ("nvidia-smi", "sinfo", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 1000\n")
        (tmp_path / name).chmod(0o755)
    found = doctor(tmp_path, before=f"export PATH={tmp_path}:$PATH")
    for name in ("GPUs", "SLURM"):
        assert found[name].status == "warning"
        assert "no answer within 10 s" in found[name].detail


def test_nothing_in_the_environment(tmp_path: Path) -> None:
    found = doctor(tmp_path, command=("env", "-i", GRPOCLI))
    assert (found["torch"].status, found["runs"].status) == ("ok", "ok")


def test_a_token_is_not_printed(tmp_path: Path) -> None:
    found = doctor(tmp_path, before="export HF_TOKEN=hf_not_to_be_seen")
    assert found["hub token"].status == "ok"
    assert "hf_not_to_be_seen" not in found.said
