"""What grpocli uses of the installed vLLM and no test on a CPU calls: transfers between GPUs, options, variables."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import lora, server, transports
from grpocli.rollout.vllm.config import RESERVED
from grpocli.rollout.vllm.engine_parts import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

TRANSFER = "vllm.distributed.weight_transfer"
PACKING = tuple(transports.packing(1))
CALLS = {
    f"{TRANSFER}.base.ParamMeta": ("name", "dtype", "shape"),
    f"{TRANSFER}.factory.WeightTransferTrainerFactory.trainer_init": ("init_info", "client", "source"),
    f"{TRANSFER}.ipc_engine.IPCTrainerInitInfo": ("rank", *PACKING[:2]),
    f"{TRANSFER}.ipc_engine.IPCTrainerWeightTransferEngine._all_gather_and_merge_handles": ("handles",),
    f"{TRANSFER}.nccl_common.NCCLWeightTransferInitInfo": ("rank_offset", "world_size", "nccl_unique_id_b64", *PACKING),
    f"{TRANSFER}.nccl_common.uid_init_process_group": ("nccl_unique_id_bytes", "rank", "world_size", "device"),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine": ("client", "source", *PACKING),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine.shutdown": (),
    "vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.ncclGetUniqueId": (),
    "vllm.LLM.sleep": ("level",),
    "vllm.LLM.wake_up": ("tags",),
}
"""Functions, methods and classes, and the names of the arguments that grpocli gives them."""


def found(name: str) -> Any:
    """What a dotted name stands for: its module ends before the first class or function."""
    module = name[: re.search(r"\.(?=[A-Z]|uid_)", name).start()]  # type: ignore[union-attr]
    value = import_module(module)
    for part in name.removeprefix(f"{module}.").split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_its_arguments(name: str) -> None:
    assert set(CALLS[name]) <= set(inspect.signature(found(name)).parameters)


@pytest.mark.parametrize("engine", ["nccl", "ipc"])
def test_our_source_and_client_have_what_vllm_calls(engine: str) -> None:
    theirs = found(f"{TRANSFER}.{engine}_engine.{engine.upper()}TrainerWeightTransferEngine")
    used = re.findall(r"\b(source|client)\.(\w+)", inspect.getsource(theirs))
    parts = {"source": transports.WeightSource, "client": transports.TransferClient}
    assert "client" in dict(used)
    assert [(owner, name) for owner, name in used if not hasattr(parts[owner], name)] == []


def test_every_option_of_the_server_exists() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    job = EngineJob("/m", "bfloat16", 64, Path(), seed=0, lora_rank=8, head_dtype="float32", revision="main")
    given = Vllm(data_parallel=2, quantization="fp8", enforce_eager=True)
    words = [word for cpu in (False, True) for word in server.command(server.ServerSpec(job, 1, 64), given, cpu)]
    ours = {word[2:].partition("=")[0].removeprefix("no-") for word in words if word.startswith("--")}
    flags = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    known = {word.lstrip("-").replace("-", "_") for word in flags}
    assert len(ours) > 20
    named = {name.replace("-", "_") for name in {*ours, *RESERVED, *lora.lora_flags(8, "bfloat16", cpu=True)}}
    assert named - known - {"model_tag"} == set()


def test_every_environment_variable_exists() -> None:
    from vllm import envs

    files = (Path(transports.__file__).parents[2]).rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    ours = {text for text in texts if re.fullmatch("VLLM_[A-Z0-9_]+", text)}
    assert len(ours) > 10
    assert ours - set(re.findall(r"VLLM_\w+", inspect.getsource(envs))) == set()
