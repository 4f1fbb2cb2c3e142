"""Safetensors files that several processes write, and read in parts; weights that one process of a machine reads."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpocli.distributed import sharded_safetensors as shards
from grpocli.distributed.fsdp2 import LOADING, loading_on_local_rank0

TENSORS = {f"w{k}": torch.arange(k, k + 12.0).view(3, 4) for k in range(10)} | {"count": torch.tensor(7)}


@dataclass
class OneOf:
    """A world of one of several processes, which run one after the other."""

    rank: int
    size: int

    def gather_objects(self, items: list[Any]) -> list[Any]:
        return items


def written(folder: Path, size: int, **options: Any) -> list[dict[str, str]]:
    """The index that each of `size` processes returns."""
    worlds: list[Any] = [OneOf(rank, size) for rank in range(size)]
    return [shards.write(iter(TENSORS.items()), folder, "model", world, **options) for world in worlds]


@pytest.mark.parametrize(("size", "full"), [(1, 100), (2, 48), (3, 100), (3, 2**31)])
def test_every_tensor_is_written_once(tmp_path, monkeypatch, size: int, full: int) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", full)
    by_rank = written(tmp_path, size)
    names = [name for files in by_rank for name in files]
    assert sorted(names) == sorted(TENSORS)
    files = {name: file for one in by_rank for name, file in one.items()}
    assert all(shards.writer(file, size) == rank for rank, one in enumerate(by_rank) for file in one.values())
    for name, tensor in TENSORS.items():
        assert load_file(tmp_path / files[name])[name].equal(tensor)
    per_file = -(-full // 48)
    wanted = [k // per_file + 1 for k in range(10)]
    assert [files[f"w{k}"] for k in range(10)] == [f"model-{n:05}.safetensors" for n in wanted]
    assert all(by_rank) == (size == 1 or full < 2**31)  # every process writes a part


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4)])
def test_rows_and_flat_parts_equal_those_of_the_whole_tensor(tmp_path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    world: Any = OneOf(0, 1)
    files = shards.write([("t", tensor)], tmp_path, "s", world)
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": files}))
    with shards.reading(tmp_path / "index.json") as stored:
        assert stored["t"].shape == shape
        assert stored["t"].whole().equal(tensor)
        for start in range(tensor.numel() + 2 if shape else 0):
            for end in range(start, tensor.numel() + 5):
                assert stored["t"].flat(start, end).equal(tensor.flatten()[start:end]), (start, end)
        for start in range(shape[0] + 1 if shape else 0):
            assert stored["t"].rows(start, start + 1).equal(tensor[start : start + 1])


def test_floats_are_cast_and_counters_are_not(tmp_path) -> None:
    (files,) = written(tmp_path, 1, dtype=torch.bfloat16)
    saved = load_file(tmp_path / files["w1"])
    assert saved["w1"].dtype == torch.bfloat16
    assert saved["count"].equal(TENSORS["count"])


def test_transformers_loads_a_model_in_many_files(tmp_path, monkeypatch, little_model) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 20_000)
    world: Any = OneOf(0, 1)
    files = shards.write(little_model.named_parameters(), tmp_path, "model", world)
    assert len(set(files.values())) > 2
    shards.write_index(files, tmp_path / "model.safetensors.index.json")
    little_model.config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(loaded.get_parameter(name).equal(p) for name, p in little_model.named_parameters())


def resident() -> int:
    """The memory of this process in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_weights_that_are_not_read_use_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers creates them so in all processes but the first."""
    for name in LOADING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    weight, before = torch.empty(2**26, device="meta"), resident()
    with loading_on_local_rank0():
        assert {name: os.environ[name] for name in LOADING} == LOADING
        here = torch.zeros_like(weight, device="cpu")
    assert not LOADING.keys() & os.environ.keys()
    assert here.nbytes == 2**28
    assert resident() - before < here.nbytes / 4
    assert torch.zeros_like(here[:9]).eq(0).all()
