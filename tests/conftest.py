"""Fixtures for all tests: a small random model, cache folders, commands in this process."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the libraries are first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads are slower for small models, and spin
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the core to others

import pytest
import torch
from hydra.plugins.config_source import ConfigResult
from isolation import isolated
from little import ENDS, SHAPE

from grpocli.composition.hydra_sources import CheckedFiles

# `make test &` and nohup start it with these ignored, which runs then go on to ignore
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


parsed: dict[tuple[str, Path, int], ConfigResult] = {}
load_config = CheckedFiles.load_config


def load_once(source: CheckedFiles, config_path: str) -> ConfigResult:
    """A YAML file's config for Hydra. Each file is parsed once, since tests compose it thousands of times."""
    file = Path(source.path, source._normalize_file_name(config_path))
    key = (source.provider, file, file.stat().st_mtime_ns if file.is_file() else 0)
    if key not in parsed:
        parsed[key] = load_config(source, config_path)
    return copy.deepcopy(parsed[key])  # Hydra changes it


CheckedFiles.load_config = load_once  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """hypothesis has no deadline for an example, because the machine may be busy. Environments for TRL lack it."""
    with suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("busy", deadline=None)
        settings.load_profile("busy")


LONG = ("vllm", "processes", "survival")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that the workers of pytest-xdist end at about the same time."""
    rank = {path: len(LONG) for path in (item.path for item in items)}
    for item in items:
        ranks = [LONG.index(marker.name) for marker in item.iter_markers() if marker.name in LONG]
        rank[item.path] = min([rank[item.path], *ranks])
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
    items.sort(key=lambda item: rank[item.path])


def pytest_collection_finish() -> None:
    """Modules and collected tests stay until the end, so garbage collections during tests can skip them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries report all frozen objects as leaks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"selected by -m: {config.getoption('markexpr')} (`make test-all` runs every test)")


@pytest.fixture(scope="module")
def world():
    """This process alone."""
    from grpocli.distributed.world import World
    from grpocli.hardware import Single

    return World(Single(device="cpu"))


@pytest.fixture(scope="session")
def little_model():
    """A two-layer Llama with random weights, large enough for its choices to be far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = SHAPE | ENDS | {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def each_file_is_isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolates test files from each other, with their fixtures."""
    with isolated(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def each_test_is_isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolates the tests of a file from each other."""
    with isolated(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that tests share, also in pytest-xdist's workers, so that the built-in model is made once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for this test."""
    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def grpocli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; returns the exit code, asserted to be `code`, stdout and stderr."""
    from grpocli.cli import main

    def run(*argv: str, code: int | None = None) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(argv))
        output = capsys.readouterr()
        assert code in (None, exit_.value.code or 0), output.err
        return int(exit_.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of one MiB, or of the size that a test asks for; needs permission to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '1m')}", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no right to mount a small file system here: {error}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def exhaust(things: Iterator[object]) -> None:
    for _ in things:
        pass


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system of one MiB that is full."""
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        exhaust(file.write(b"x" * 65536) for _ in range(1000))
    return small_disk
