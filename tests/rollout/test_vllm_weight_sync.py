"""Weight syncs without a server: files, handles, order of calls, choice of a transport, and the check after it."""

from __future__ import annotations

import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from models.architectures import architecture
from rollout.vllm_tiny import Alone, two_worlds
from safetensors import safe_open
from training.test_processes import launched

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError, EngineError
from grpocli.launch.run import _vllm_fields
from grpocli.rollout import sync_config
from grpocli.rollout.vllm import transports
from grpocli.rollout.vllm.engine import make_synchronizer
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.rollout.vllm.transports import ARGUMENTS, BucketFile, MappedFiles, decode_handles, encode_handles
from grpocli.rollout.vllm.weight_sync import PolicyWeights, WeightSync, require_close

WEIGHTS = {
    "a": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).T,
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "big": torch.randn(100, 7),
}
SHAPES = [(name, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]


@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 0), (torch.bfloat16, 1000), (torch.float16, 0)])
def test_files_hold_the_weights_cast_as_torch_casts(tmp_path: Path, dtype: torch.dtype, room: int) -> None:
    file = BucketFile(tmp_path / "w", transports.file_size(SHAPES, dtype) + room)
    file.write(SHAPES, WEIGHTS.values(), dtype)
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o600
    read = dict(MappedFiles().tensors("w", tmp_path, keep=False))
    if not room:
        with safe_open(tmp_path / "w", framework="pt") as others:
            read |= {name: others.get_tensor(name) for name in others.keys()}  # noqa: SIM118 (it is not a dict)
    assert set(read) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor.to(dtype))


def test_only_floating_point_buffers_of_a_checkpoint_are_loaded_into_a_colocated_vllm() -> None:
    model = torch.nn.Linear(2, 3).bfloat16()
    model.register_buffer("bias_of_experts", torch.ones(4))
    model.register_buffer("frequencies", torch.ones(5), persistent=False)
    model.register_buffer("steps", torch.ones(1, dtype=torch.long))
    policy: Any = SimpleNamespace(model=model)
    sent = list(PolicyWeights(policy, torch.bfloat16).buffers())
    assert [(name, tensor.dtype) for name, tensor in sent] == [("bias_of_experts", torch.float32)]


@pytest.mark.parametrize("size", [1, 64, 200, 2900, 10**9])
def test_buckets_are_bounded_and_hold_all_weights(size: int) -> None:
    counts = [len(bucket) for bucket in transports.buckets(SHAPES, torch.float32, size)]
    assert sum(counts) == len(SHAPES)
    begins = [sum(counts[:i]) for i in range(len(counts))]
    filled = [sum(math.prod(s) * 4 for _, s in SHAPES[b : b + n]) for b, n in zip(begins, counts, strict=True)]
    assert all(n == 1 or bytes_ <= size for n, bytes_ in zip(counts, filled, strict=True))
    assert (len(counts) == 1) == (size == 10**9)


def test_paths_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "good").write_text("")
    (tmp_path / "secret").write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert transports.checked_path("good", folder) == folder / "good"
    for name in ("../secret", "sub/../good", str(tmp_path / "secret"), "link", "sub", "missing", "", "..", 5, ["good"]):
        with pytest.raises(ValueError, match="not "):
            MappedFiles().tensors(name, folder, keep=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("server", "agrees"),
    [
        ([-1.09, -2.09, -3.09], True),
        ([-1.0, -2.0, -3.25], True),
        ([-1.2, -2.2, -3.2], False),
        ([-1.0, -2.0, -4.2], False),
        ([-1.0, math.nan, -3.0], False),
    ],
)
def test_log_probs_outside_the_tolerance_are_refused(server: list[float], agrees: bool) -> None:
    message = r"sync to version 4: .*on the server and -2\.00000 in the trainer"
    with nullcontext() if agrees else pytest.raises(EngineError, match=message):
        require_close(server, [-1.0, -2.0, -3.0], 0.1, version=4)


class Server:
    """Loads weights from its folder, records calls, fails on demand."""

    def __init__(self, folder: Path, fails: str = "", version: str | None = None, scores: float = -1.0) -> None:
        self.endpoint = Endpoint("http://x", "k", str(folder))
        self.prepared = False
        self.lost: EngineError | None = None
        self.calls: list[str] = []
        self.infos: list[dict[str, Any]] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.fails, self.version, self.scores = fails, version, scores
        self._files = MappedFiles()

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._call("init_transfer")
        self.prepared = True
        self.infos.append(info)
        self._files.forget()

    def update(self, info: dict[str, Any]) -> None:
        self._call("update")
        self.infos.append(info)
        if "file" in info:
            tensors = self._files.tensors(info["file"], Path(self.endpoint.shm_dir), info["keep"])
            self.loaded |= {name: tensor.clone() for name, tensor in tensors}

    def finish_update(self, version: int) -> None:
        self._call("finish_update")
        if self.version is None or self.version.startswith("v"):
            self.version = f"v{version}"

    def weight_version(self) -> int | str:
        self._call("weight_version")
        number = str(self.version).removeprefix("v")
        return int(number) if number.isdecimal() else number

    def score(self, token_ids: list[int], first: bool) -> list[float]:
        self._call("score first" if first else "score")
        return [self.scores] * 31

    def world_size(self) -> int:
        return 2

    def pause(self, mode: str) -> None:
        self._call(f"pause {mode}")

    def __getattr__(self, name: str) -> Any:
        if name not in ("start_update", "abandon_update", "reset_prefix_cache", "resume"):
            raise AttributeError(name)
        return lambda **_: self._call(name)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise EngineError(f"{name} failed")


ALONE = Alone()


def sync_for(servers: Any, world: Any = ALONE, *, in_flight: bool = False, **options: Any) -> WeightSync:
    return make_synchronizer(servers, context(world, in_flight=in_flight, **options))


def context(world: Any = ALONE, *, transport: str = "shm", in_flight: bool = False, **options: Any) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50))
    policy = SimpleNamespace(
        model=SimpleNamespace(config=config, parameters=lambda: iter(WEIGHTS.values())),
        weights=lambda: iter(WEIGHTS.items()),
        score=lambda ids: [-1.0] * (len(ids) - 1),
    )
    job = SimpleNamespace(lora_rank=0, dtype="float32", transport=transport, quantized=False, gpus=(), max_tokens=40)
    sync = sync_config.ShmSyncConfig(**options)
    return SimpleNamespace(job=job, policy=policy, world=world, sync=sync, in_flight=in_flight)


@pytest.fixture
def two() -> Any:
    """Runs a sync in two processes at once; returns each one's result or error."""

    def run(server: Server, **options: Any) -> list[Any]:
        def work(world: Any) -> Any:
            try:
                return sync_for([server], world, **options)(3)
            except EngineError as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, two_worlds()))

    return run


UPDATE = ["start_update", "update", "finish_update", "reset_prefix_cache", "weight_version"]


@pytest.mark.parametrize(
    ("model", "words", "dummy"),
    [
        ("llama", [], True),
        ("glm4_moe", [], False),  # its expert biases are buffers, which a sync to servers does not send
        ("llama", ["model.lora.rank=4"], False),
        ("llama", ["engine.base_url=http://x:1"], False),
        ("llama", ["engine.vllm_args={speculative-config:{method:ngram,num_speculative_tokens:4}}"], False),
        ("llama", ["engine.vllm_args={load-format:auto}"], False),
    ],
)
def test_which_runs_start_servers_with_random_weights(
    model: str, words: list[str], dummy: bool, tmp_path: Path
) -> None:
    architecture(model).build_config().save_pretrained(tmp_path)
    run = build_run(compose(["engine=vllm", "model=hf", f"model.path={tmp_path}", *words]))
    fields = _vllm_fields(run, str(tmp_path), "float32", SimpleNamespace(), training=True)  # type: ignore[arg-type]
    assert fields.get("dummy", False) == dummy


BYTES = 4 * sum(t.numel() for t in WEIGHTS.values())


def test_the_main_process_sends_and_all_get_the_result(two: Any, tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert [result["sync/bytes"] for result in two(server)] == [BYTES, BYTES]
    assert server.calls == ["weight_version", "pause wait", "init_transfer", *UPDATE, "resume", "score"]


@pytest.mark.parametrize(
    "step", ["pause wait", "init_transfer", "start_update", "update", "finish_update", "weight_version", "score"]
)
def test_all_processes_fail_together(two: Any, tmp_path: Path, step: str) -> None:
    server = Server(tmp_path, fails=step)
    assert two(server) == [f"{step} failed"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_flight", [True, False])
def test_servers_with_partial_weights_hold_their_requests(tmp_path: Path, in_flight: bool) -> None:
    """One of two servers dies during a bucket: the other resumes after the next sync, or when the run ends."""
    dies, lives = Server(tmp_path, fails="update"), Server(tmp_path)
    sync = sync_for([dies, lives], in_flight=in_flight)
    with pytest.raises(EngineError, match="update failed"):
        sync(1)
    assert lives.calls[-2:] == ["start_update", "update"]
    assert "resume" not in lives.calls
    dies.fails = ""
    sync(1)
    assert lives.calls[-3:] == ["weight_version", "resume", "score first" if in_flight else "score"]
    lives.fails = "finish_update"
    with pytest.raises(EngineError, match="finish_update failed"):
        sync(2)
    dies.lost = EngineError("gone")
    dies.calls.clear()
    sync.release()
    assert lives.calls[-2:] == ["abandon_update", "resume"]
    assert dies.calls == [], "a lost server is not called"


@pytest.mark.parametrize("kept", [True, False], ids=["in memory", "on disk"])
def test_every_sync_updates_every_server_and_leaves_no_file(tmp_path: Path, kept: bool, monkeypatch) -> None:
    """Three servers, two of which share a folder; four buckets, so that files are rewritten while others load."""
    monkeypatch.setattr(transports, "in_memory", lambda folder: kept)
    monkeypatch.setattr(transports, "buckets", lambda shapes, *_: [shapes[:1], shapes[1:3], shapes[3:4], shapes[4:]])
    made: list[Path] = []
    monkeypatch.setattr(transports, "BucketFile", lambda path, size: made.append(path) or BucketFile(path, size))
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    for folder in set(folders):
        folder.mkdir()
    servers = [Server(folder) for folder in folders]
    sync = sync_for(servers)
    values = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    sync.weights.policy.weights = lambda: iter(values.items())  # type: ignore[method-assign]
    for version in range(3):
        for tensor in values.values():
            tensor += 1.0
        assert sync(version)["sync/bytes"] == BYTES
        for server in servers:
            assert list(server.loaded) == list(WEIGHTS)
            assert all(torch.equal(server.loaded[name], tensor) for name, tensor in values.items())
        assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert len(made) == (2 * transports.SLOTS if kept else 3 * 2 * 4)
    assert [server.calls.count("init_transfer") for server in servers] == [1, 1, 1]


def test_one_wrong_server_of_two_is_found(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"-1\.50000 on the server and -1\.00000 in the trainer"):
        sync_for([Server(tmp_path), Server(tmp_path, scores=-1.5)])(1)


def test_space_is_reserved_before_any_update_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial update would be worse than none, and the space of the first file is released."""
    monkeypatch.setattr(transports, "in_memory", lambda folder: True)
    room, real = iter([True, True, False]), os.posix_fallocate

    def reserve(descriptor: int, offset: int, size: int) -> None:
        if not next(room):
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    servers = [Server(folder) for folder in folders]
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    sync = sync_for(servers)
    monkeypatch.setattr(sync.transport, "bucket_bytes", 64)
    with pytest.raises(EngineError, match=f"cannot write weights to {folders[0]}: No space left"):
        sync(1)
    assert all("start_update" not in server.calls for server in servers)
    assert [path for folder in folders for path in folder.iterdir()] == []


# Sharded policies


@pytest.mark.processes
@pytest.mark.survival
def test_sharded_weights_are_gathered_in_lockstep(tmp_path: Path) -> None:
    """Two processes hold half of every parameter each: one sync succeeds, another fails in the middle."""
    launched(str(Path(__file__).with_name("sharded_sync.py")), 2, tmp_path / "logs", str(tmp_path))
    whole, loaded = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "loaded"))
    assert list(loaded) == list(whole)
    assert all(torch.equal(loaded[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    assert [(tmp_path / f"failed_{rank}").read_text() for rank in range(2)] == ["update failed"] * 2


# The choice of a transport

PLACES = {
    "cpu": sync_config.locate_servers("cpu"),
    "other GPUs": sync_config.locate_servers("cuda", ["http://localhost:8000"]),
    "the same GPUs": sync_config.locate_servers("cuda", shared=True),
    "some of them": sync_config.locate_servers("cuda", shared=None),
    "another machine": sync_config.locate_servers("cuda", ["http://node2:8000"]),
    "rollout nodes": sync_config.locate_servers("cuda", nodes=1),
}


@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        (sync_config.AutoSyncConfig(), ["shm", "nccl", "ipc", "shm", "nccl", "nccl"]),
        (sync_config.ShmSyncConfig(), ["shm"] * 6),
        (sync_config.NcclSyncConfig(), [None, "nccl", None, None, "nccl", "nccl"]),
        (sync_config.IpcSyncConfig(), [None, "ipc", "ipc", None, None, None]),
    ],
)
def test_the_transport_suits_the_machine(part: sync_config.SyncConfig, chosen: list[str | None]) -> None:
    """None: refused."""
    for place, expected in zip(PLACES.values(), chosen, strict=True):
        if expected:
            assert part.choose(place) == expected
            continue
        with pytest.raises(ConfigError, match="sync=shm") as caught:
            part.choose(place)
        assert caught.value.key == "sync"


# GPU transports: only messages are tested

HANDLE = (
    *(torch.Tensor, torch.Size([3, 2]), (2, 1), 0, torch.storage.TypedStorage, torch.uint8, 1, b"\x00\xffhandle"),
    *(1 << 34, 64, False, b"counter", 8, b"event", True),
)


def test_ipc_handles_survive_json() -> None:
    assert len(HANDLE) == ARGUMENTS
    travelled = json.loads(json.dumps(encode_handles({"GPU-1": HANDLE})))
    assert decode_handles(travelled) == {"GPU-1": HANDLE}


@pytest.mark.parametrize("part", [{"name": "os.system"}, {"bytes": "%%"}, {"ints": [1, "2"]}, {"ints": [True]}, "text"])
def test_other_values_are_refused_as_ipc_handles(part: Any) -> None:
    good = encode_handles({"GPU-1": HANDLE})["GPU-1"]
    with pytest.raises(ValueError, match=r"IPC handle|base64|Invalid|Non-base64"):
        decode_handles({"GPU-1": [part, *good[1:]]})
    with pytest.raises(ValueError, match=f"has {ARGUMENTS} parts"):
        decode_handles({"GPU-1": good[:-1]})


def test_workers_of_several_servers_are_one_group(tmp_path: Path) -> None:
    servers: list[Any] = [Server(tmp_path), Server(tmp_path)]
    client = transports.TransferClient()
    client.begin(servers, 7)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    assert [server.infos for server in servers] == [[{"rank_offset": r, "world_size": 5}] for r in (1, 3)]
    client.start_weight_update()
    client.update_weights({"names": ["a"], "ipc_handles": {"GPU-1": HANDLE}, "ipc_handles_pickled": None})
    client.finish_weight_update()
    client.check()
    for server in servers:
        assert server.calls == ["init_transfer", "start_update", "update", "finish_update"]
        assert server.infos[1] == {"names": ["a"], "ipc_handles": encode_handles({"GPU-1": HANDLE})}
        assert server.weight_version() == 7


class Handing:
    """vLLM's trainer engine for CUDA IPC: the main process passes on what all have gathered. rank: of this process."""

    def __init__(self, client: Any, rank: int, began: list[int]) -> None:
        self.client, self.rank, self.began = client, rank, began

    def send_weights(self) -> None:
        self.began.append(self.rank)
        gathered = self._all_gather_and_merge_handles([{f"GPU-{self.rank}": (*HANDLE[:6], self.rank, *HANDLE[7:])}])
        if self.rank == 0:
            self.client.update_weights({"ipc_handles": gathered[0]})
            self.client.finish_weight_update()

    def _all_gather_and_merge_handles(self, handles: list[Any]) -> list[Any]:
        return handles


@pytest.mark.vllm
@pytest.mark.parametrize("fails", ["", "weight_version", "update", "finish_update"])
def test_every_process_releases_its_bucket_after_a_failed_sync(
    fails: str, two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps an exported block until its reader has released it. No process begins a transfer to a lost server."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    released: list[Any] = []
    monkeypatch.setattr(transports, "release", released.append)
    began: list[int] = []
    monkeypatch.setattr(
        WeightTransferTrainerFactory, "trainer_init", lambda info, client, source: Handing(client, info.rank, began)
    )
    server = Server(tmp_path, fails=fails)
    results = two(server, transport="ipc")
    assert [result == f"{fails} failed" for result in results] == [bool(fails)] * 2
    assert sorted(began) == ([] if fails == "weight_version" else [0, 1])
    assert sorted(arguments[6] for arguments in released) == ([0, 1] if fails.endswith("update") else [])


def test_a_broadcast_that_failed_is_aborted_once(tmp_path: Path) -> None:
    """The kernel would wait forever, and block everything that frees GPU memory."""
    server: Any = Server(tmp_path)
    server.prepared = True
    transport = transports.NcclTransport(PolicyWeights(context().policy, torch.bfloat16), 64)
    transport._engine = engine = Mock()
    engine.send_weights.side_effect = RuntimeError("NCCL error")
    with pytest.raises(EngineError, match="NCCL error"):
        transport.send([server], iter(()), 1)
    transport.close()
    assert engine.mock_calls == [call.send_weights(), call.shutdown()]


def test_a_wait_for_the_weights_has_the_deadline_of_the_transfer(tmp_path: Path, monkeypatch) -> None:
    """It would wait forever for a kernel that an earlier transfer has left hanging."""
    computed, server = threading.Event(), Server(tmp_path)
    server.prepared = True
    monkeypatch.setattr(transports, "DEADLINE", 0.2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # which may ask torch.cuda
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: computed.wait(60))
    weights = PolicyWeights(context().policy, torch.bfloat16)
    for transport in (transports.NcclTransport(weights, 64), transports.IpcTransport(weights, 64, 0)):
        transport._engine = Mock()
        with pytest.raises(EngineError, match=r"waited 0\.2 s for the weights"):
            transport.send([server], iter(()), 1)
    computed.set()


@pytest.mark.vllm
def test_the_worker_refuses_pickled_handles() -> None:
    from grpocli.rollout.vllm.weight_transfer import JsonIpcUpdate

    fields = {"names": ["a"], "dtype_names": ["uint8"], "shapes": [[3, 2]], "tensor_sizes": [6]}
    update = JsonIpcUpdate(**fields, ipc_handles=encode_handles({"GPU-1": HANDLE}))
    assert update.ipc_handles == {"GPU-1": HANDLE}
    with pytest.raises(ValueError, match="JSON only"):
        JsonIpcUpdate(**fields, ipc_handles_pickled="gASVAA==")
