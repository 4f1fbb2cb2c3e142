"""Fixtures that several folders of tests share: a random little model, folders for caches, commands run in process."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the libraries are first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of little models two threads are slower, and spin while others work
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait for others leave the core to them

import pytest
import torch
from isolation import isolated


def pytest_configure(config: pytest.Config) -> None:
    """How long an example of hypothesis' takes depends on what else runs; where TRL is compared with, it is missing."""
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
    """Modules and collected tests stay until the end, so garbage collections during tests need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report all that is frozen as leaked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"selected by -m: {config.getoption('markexpr')} (`make test-all` runs every test)")


@pytest.fixture(scope="session")
def little_model():
    """A two-layer Llama with random weights, large enough for its choices to be far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def each_file_is_isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Its fixtures and tests leave nothing of a user's code to the next file that this process tests."""
    with isolated(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def each_test_is_isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test leaves nothing of a user's code to the next one, and keeps what the fixtures of its file imported."""
    with isolated(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for runs in which it does not matter, so that the built-in model is made once; pytest-xdist's workers
    share it too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def grpocli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; the exit code, and what it printed to stdout and stderr."""
    from grpocli.cli import main

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(argv))
        said = capsys.readouterr()
        return int(exit_.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; needs permission to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no right to mount a small file system here: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def exhaust(things: Iterator[object]) -> None:
    for _ in things:
        pass


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system of one MiB that is full."""
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        exhaust(file.write(b"x" * 65536) for _ in range(1000))
    return small_disk
