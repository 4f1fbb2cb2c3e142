"""The shm transport's files and the proof after a sync, without a server."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from grpocli.errors import EngineError
from grpocli.rollout.vllm import sync as vllm_sync
from grpocli.rollout.vllm.endpoint import Endpoint
from grpocli.rollout.vllm.sync import TOLERANCE, WeightSync, compare, probe
from grpocli.rollout.vllm.weights import buckets, checked_path, weights_folder, write

WEIGHTS = {
    "a": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).T,
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "big": torch.randn(100, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_hold_the_weights_cast_as_torch_casts(tmp_path: Path, dtype: torch.dtype) -> None:
    size = write(tmp_path / "w", list(WEIGHTS.items()), dtype)
    assert size == sum(t.numel() for t in WEIGHTS.values()) * dtype.itemsize
    with safe_open(tmp_path / "w", framework="pt") as file:
        assert set(file.keys()) == set(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            read = file.get_tensor(name)
            assert read.dtype == dtype
            assert torch.equal(read, tensor.to(dtype))
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write(tmp_path / "w", list(WEIGHTS.items()), torch.float32)


@pytest.mark.parametrize("size", [1, 64, 200, 2900, 10**9])
def test_buckets_are_in_order_and_bounded(size: int) -> None:
    made = list(buckets(WEIGHTS.items(), torch.float32, size))
    assert [name for bucket in made for name, _ in bucket] == list(WEIGHTS)
    assert all(len(b) == 1 or sum(t.numel() * 4 for _, t in b) <= size for b in made)
    assert (len(made) == 1) == (size == 10**9)


def test_paths_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "good").write_text("")
    (tmp_path / "secret").write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert checked_path("good", folder) == folder / "good"
    for name in (
        "../secret",
        "sub/../good",
        str(tmp_path / "secret"),
        "link",
        "sub",
        "missing",
        "",
        ".",
        "..",
        5,
        None,
    ):
        with pytest.raises(ValueError, match="not "):
            checked_path(name, folder)  # type: ignore[arg-type]


def test_no_folder_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPOCLI_SHM_DIR", raising=False)
    with pytest.raises(RuntimeError, match="GRPOCLI_SHM_DIR"):
        weights_folder()


@pytest.mark.parametrize("vocabulary", [8, 97, 32_000, 151_936])
def test_probe_is_fixed_and_spread(vocabulary: int) -> None:
    tokens = probe(vocabulary)
    assert tokens == probe(vocabulary)
    assert len(tokens) == 32
    assert all(0 <= token < vocabulary for token in tokens)
    assert len(set(tokens)) >= min(vocabulary, 32) // 2
    assert max(tokens) - min(tokens) > vocabulary // 2


@pytest.mark.parametrize(
    ("server", "agrees"),
    [
        ([-1.0, -2.0, -3.0], True),
        ([-1.09, -2.09, -3.09], True),
        ([-1.0, -2.0, -3.25], True),
        ([-1.2, -2.2, -3.2], False),
        ([-1.0, -2.0, -4.2], False),
        ([-1.0, math.nan, -3.0], False),
        ([-1.0, -math.inf, -3.0], False),
    ],
)
def test_compare(server: list[float], agrees: bool) -> None:
    trainer = [-1.0, -2.0, -3.0]
    if agrees:
        compare(server, trainer, 0.1, version=4)
        return
    with pytest.raises(EngineError, match=r"sync to version 4: .*on the server and -2\.00000 in the trainer"):
        compare(server, trainer, 0.1, version=4)


def test_one_wild_token_is_refused_even_where_the_mean_is_fine() -> None:
    with pytest.raises(EngineError, match=r"token 3, -2\.00000 against -1\.00000: 1\.00000"):
        compare([-1.0, -1.0, -2.0] + [-1.0] * 97, [-1.0] * 100, 0.05, version=1)


class Server:
    """Remembers what it was asked; fails where told to."""

    def __init__(self, folder: Path, fails: str = "", version: str | None = None) -> None:
        self.endpoint = Endpoint("http://x", "k", str(folder))
        self.calls: list[str] = []
        self.fails, self.version = fails, version

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == self.fails:
                raise EngineError(f"{name} failed")
            if name == "finish_update" and self.version is None:
                self.version = str(arguments[0])
            return {"weight_version": self.version, "score": [-1.0] * 31}.get(name)

        return call


class Pair:
    """Two processes as threads, with what they say to each other."""

    def __init__(self) -> None:
        self.box: Any = None
        self.meet = threading.Barrier(2, timeout=10)

    def world(self, rank: int) -> Any:
        def broadcast(item: Any) -> Any:
            if rank == 0:
                self.box = item
            self.meet.wait()
            got = self.box
            self.meet.wait()
            return got

        return SimpleNamespace(is_main=rank == 0, broadcast_object=broadcast)


def sync_for(server: Any, world: Any) -> WeightSync:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50))
    policy = SimpleNamespace(
        model=SimpleNamespace(config=config), weights=lambda: iter(WEIGHTS.items()), score=lambda ids: [-1.0] * 31
    )
    job = SimpleNamespace(dtype="float32")
    return WeightSync(server, SimpleNamespace(job=job, policy=policy, world=world), None)  # type: ignore[arg-type]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Any]:
    """Run a sync in two processes at once; what each returned or raised."""

    def run(server: Server) -> list[Any]:
        pair, results = Pair(), [None, None]

        def work(rank: int) -> None:
            try:
                results[rank] = sync_for(server, pair.world(rank))(3)  # type: ignore[call-overload]
            except EngineError as error:
                results[rank] = str(error)  # type: ignore[call-overload]

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    return run


def test_the_main_process_sends_and_all_learn_of_it(two: Any, tmp_path: Path) -> None:
    server = Server(tmp_path)
    expected = {"sync/bytes": 4.0 * sum(t.numel() for t in WEIGHTS.values())}
    assert two(server) == [expected, expected]
    update = ["start_update", "update", "finish_update", "reset_prefix_cache"]
    assert server.calls == ["init_transfer", "pause", *update, "resume", "weight_version", "score"]


@pytest.mark.parametrize("step", ["init_transfer", "start_update", "update", "finish_update", "score"])
def test_all_processes_fail_together_and_the_server_goes_on(two: Any, tmp_path: Path, step: str) -> None:
    server = Server(tmp_path, fails=step)
    assert two(server) == [f"{step} failed"] * 2
    assert ("pause" in server.calls) == ("resume" in server.calls)
    assert list(tmp_path.iterdir()) == []


def test_wrong_version_is_refused(two: Any, tmp_path: Path) -> None:
    server = Server(tmp_path, version="2")
    assert two(server) == ["after a sync the vLLM server has weight version 2, the trainer 3"] * 2


def test_full_memory_file_system(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vllm_sync, "write", full)
    first, second = two(Server(tmp_path))
    assert first == second
    assert f"cannot write weights to {tmp_path}: No space left" in first


def test_every_dtype_of_a_job_has_a_tolerance() -> None:
    assert set(TOLERANCE) >= {"float32", "bfloat16"}
    assert TOLERANCE["float32"] * vllm_sync.WORST == pytest.approx(1e-3)
