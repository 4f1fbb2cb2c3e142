"""What grpocli uses of vLLM, compared with the Python files of each supported minor version."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import pytest
from packaging.requirements import Requirement
from rollout.vllm_files import VllmFiles, arguments

from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import client, colocate, lora, server, transports
from grpocli.rollout.vllm.config import RESERVED
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.types import Request, Sampling

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OURS = ROOT / "grpocli" / "rollout" / "vllm"
VERSIONS = ("0.32.0", "0.33.0")
"""One of each minor version in pyproject.toml's range."""

TRANSFER = "vllm.distributed.weight_transfer"
ENGINE = f"{TRANSFER}.base.WeightTransferEngine"
GATHER = "_all_gather_and_merge_handles"
PACKING = tuple(transports.packing(1))
CALLS: dict[str, tuple[str, ...]] = {
    f"{ENGINE}": ("config", "vllm_config", "device", "model"),
    f"{ENGINE}.parse_update_info": ("update_dict",),
    f"{TRANSFER}.base.ParamMeta": ("name", "dtype", "shape"),
    f"{TRANSFER}.factory.WeightTransferEngineFactory.register_engine": ("name", "module_path_or_cls", "class_name"),
    f"{TRANSFER}.factory.WeightTransferTrainerFactory.trainer_init": ("init_info", "client", "source"),
    f"{TRANSFER}.ipc_engine.IPCTrainerInitInfo": ("rank", *PACKING[:2]),
    f"{TRANSFER}.ipc_engine.IPCWeightTransferUpdateInfo": ("ipc_handles", "ipc_handles_pickled"),
    f"{TRANSFER}.nccl_common.NCCLWeightTransferInitInfo": (
        *("rank_offset", "world_size", "nccl_unique_id_b64"),
        *PACKING,
    ),
    f"{TRANSFER}.nccl_common.uid_init_process_group": ("nccl_unique_id_bytes", "rank", "world_size", "device"),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine": ("client", "source", *PACKING),
    "vllm.model_executor.model_loader.reload.initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_processing": ("model", "model_config"),
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": ("layer",),
    "vllm.model_executor.model_loader.mtp_validation.disable_mtp_completeness_check": (),
    "vllm.LLM.generate": ("prompts", "sampling_params", "use_tqdm"),
    "vllm.LLM.init_weight_transfer_engine": ("request",),
    "vllm.LLM.start_weight_update": (),
    "vllm.LLM.update_weights": ("request",),
    "vllm.LLM.finish_weight_update": ("weight_version",),
    "vllm.LLM.get_weight_version": (),
    "vllm.LLM.reset_prefix_cache": (),
    "vllm.LLM.sleep": ("level",),
    "vllm.LLM.wake_up": ("tags",),
    "vllm.sampling_params.StructuredOutputsParams": ("regex", "json"),
}
"""Functions, methods and classes, and the names of the arguments that grpocli gives them."""

NAMES = (
    *(f"{ENGINE}.{name}" for name in ("model", "model_config", "device")),
    *(f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine.{name}" for name in ("send_weights", "shutdown")),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine.model_update_group",
    *(f"{TRANSFER}.ipc_engine.IPCTrainerWeightTransferEngine.{name}" for name in ("send_weights", GATHER)),
    f"{TRANSFER}.factory.WeightTransferEngineFactory._registry",
    "vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.ncclGetUniqueId",
    "vllm.distributed.device_communicators.shm_broadcast.sched_yield",
    "vllm.distributed.parallel_state._WORLD",
    "vllm.distributed.parallel_state.GroupCoordinator.destroy",
    "vllm.distributed.parallel_state.destroy_distributed_environment",
    "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEExperts.process_weights_after_loading",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.moe_kernel",
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding.quant_method",
    "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.loaded_weights",
    *(f"vllm.platforms.interface.Platform.{name}" for name in ("is_cpu", "import_kernels", "device_type")),
    "vllm.entrypoints.openai.api_server",
    "vllm.LLM.llm_engine",
    "vllm.v1.engine.llm_engine.LLMEngine.engine_core",
    "vllm.v1.engine.core_client.EngineCoreClient.shutdown",
)
"""Further attributes and modules that grpocli reads, calls or replaces."""

ONLY = {
    "0.32": (f"{TRANSFER}.base.WeightSource.metadata", "vllm.entrypoints.launchers.cli_args.make_arg_parser"),
    "0.33": (f"{TRANSFER}.base.WeightSource.iter_full", "vllm.entrypoints.common.cli_args.make_arg_parser"),
}
"""What only one minor version has and grpocli, or its tests, use in that one."""

RL = "vllm/entrypoints/rl/online/api_router.py"
TEXTS = {
    "": [
        *((RL, word) for word in ("init_info", "update_info", "weight_version", "new_version")),
        *(
            (RL, word)
            for word in ("world_size", "mode: Annotated[PauseMode", "clear_cache: Annotated[bool", "/weight_info")
        ),
        ("vllm/entrypoints/serve/dev/cache/api_router.py", "reset_running_requests"),
        ("vllm/entrypoints/serve/lora/protocol.py", "lora_name"),
        ("vllm/entrypoints/serve/lora/protocol.py", "lora_path"),
        ("vllm/entrypoints/scale_out/token_in_token_out/protocol.py", "weight_versions"),
        ("vllm/entrypoints/scale_out/token_in_token_out/protocol.py", "prompt_logprobs"),
        ("vllm/v1/metrics/loggers.py", '"vllm:generation_tokens"'),
        ("vllm/v1/metrics/loggers.py", '"vllm:prompt_tokens"'),
    ],
    "0.33": [("vllm/v1/engine/core.py", client.PAUSED)],
}
"""Words of requests, answers and metrics, by file; "": in every version."""


@cache
def nodes(folder: str) -> list[ast.AST]:
    """What the Python files of a folder consist of."""
    return [node for path in sorted((ROOT / folder).rglob("*.py")) for node in ast.walk(ast.parse(path.read_text()))]


def texts(tree: ast.AST) -> list[str]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> VllmFiles:
    try:
        return VllmFiles(request.param)
    except (OSError, SubprocessError) as error:
        reason = f"the files of vLLM {request.param} cannot be read from the package index: {error}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def minor(vllm: VllmFiles) -> str:
    return vllm.version.rpartition(".")[0]


def test_every_minor_version_in_the_range_is_compared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (Requirement(line) for line in extras["vllm"])
    supported = [f"0.{number}.0" for number in range(100) if wanted.specifier.contains(f"0.{number}.0")]
    assert tuple(supported) == VERSIONS


def test_every_import_exists(vllm: VllmFiles) -> None:
    imported = {
        f"{node.module}.{one.name}"
        for node in (*nodes("grpocli"), *nodes("bench"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for one in node.names
    }
    imported |= {
        ast.unparse(node)  # after `import vllm`
        for node in nodes("grpocli")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vllm"
    }
    assert len(imported) > 20
    assert [name for name in sorted(imported) if not vllm.find(name)] == []


def test_every_name_exists(vllm: VllmFiles) -> None:
    assert [name for name in (*NAMES, *ONLY[minor(vllm)]) if not vllm.find(name)] == []


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_its_arguments(vllm: VllmFiles, name: str) -> None:
    known = vllm.arguments(name)
    assert [argument for argument in CALLS[name] if argument not in known] == []


def test_our_transfers_define_what_vllm_calls(vllm: VllmFiles) -> None:
    """Every abstract method of the base class, with its arguments."""
    ours = {
        node.name: node
        for node in ast.parse((OURS / "weight_transfer.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    found = vllm.find(ENGINE)
    assert found
    assert isinstance(found[1], ast.ClassDef)
    abstract = [
        node
        for node in found[1].body
        if isinstance(node, ast.FunctionDef) and any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
    ]
    assert len(abstract) > 4
    for name in ("ShmWeightTransfer", "InProcessWeightTransfer"):
        methods = {
            node.name: arguments(node)
            for owner in ("LoaderWeightTransfer", name)
            for node in ours[owner].body
            if isinstance(node, ast.FunctionDef)
        }
        assert {node.name: methods.get(node.name) for node in abstract} == {
            node.name: arguments(node) for node in abstract
        }


@pytest.mark.parametrize("engine", ["nccl", "ipc"])
def test_our_source_and_client_have_what_vllm_calls(vllm: VllmFiles, engine: str) -> None:
    found = vllm.find(f"{TRANSFER}.{engine}_engine.{engine.upper()}TrainerWeightTransferEngine")
    assert found
    used = {
        (ast.unparse(node.value).rpartition(".")[2], node.attr)
        for node in ast.walk(found[1])
        if isinstance(node, ast.Attribute)
    }
    parts = {"source": transports.WeightSource, "client": transports.TransferClient}
    assert any(owner == "client" for owner, _ in used)
    missing = [(owner, name) for owner, name in used if owner in parts and not hasattr(parts[owner], name)]
    assert missing == []


def test_every_route_exists(vllm: VllmFiles) -> None:
    files = [OURS / name for name in ("client.py", "external.py")]
    ours = {
        text.partition("?")[0]
        for path in files
        for text in texts(ast.parse(path.read_text()))
        if re.fullmatch(r"/[a-z][a-z_0-9/]*(\?.*)?", text)
    }
    routes = re.compile(r'(?:\.(?:get|post)|Mount)\(\s*"(/[^"]*)"')
    theirs = {route for name, text in vllm.texts.items() if "/entrypoints/" in name for route in routes.findall(text)}
    assert len(ours) > 15
    assert ours - theirs == set()


def options(vllm: VllmFiles) -> set[str]:
    """The options of vLLM's server."""
    homes = [vllm.find(name) for name in ("vllm.EngineArgs", "vllm.AsyncEngineArgs")]
    homes += [vllm.find(f"{name.rpartition('.')[0]}.FrontendArgs") for name in ONLY[minor(vllm)][1:]]
    found = {
        name for home in homes if home and isinstance(home[1], ast.ClassDef) for name in vllm.fields(home[0], home[1])
    }
    added = re.compile(r'add_argument\(\s*"(?:--)?([a-z_-]+)"')
    literal = {word for name, text in vllm.texts.items() if "args" in name for word in added.findall(text)}
    return found | {word.replace("-", "_") for word in literal}


def test_every_option_of_the_server_exists(vllm: VllmFiles) -> None:
    job = EngineJob("/m", "bfloat16", 64, Path(), seed=0, lora_rank=8, head_dtype="float32", revision="main")
    given = Vllm(
        vllm_args={"speculative_config": {"method": "ngram"}}, data_parallel=2, quantization="fp8", enforce_eager=True
    )
    words = [word for cpu in (False, True) for word in server.command(server.ServerSpec(job, 1, 64), given, cpu)]
    ours = {word[2:].partition("=")[0].removeprefix("no-") for word in words if word.startswith("--")}
    named = {*ours, *RESERVED, *lora.lora_flags(8, "bfloat16", cpu=True)}
    assert len(ours) > 20
    assert {name.replace("-", "_") for name in named} - options(vllm) == set()


def test_every_argument_of_llm_exists(vllm: VllmFiles) -> None:
    job = EngineJob("/m", "bfloat16", 64, Path(), seed=0, head_dtype="float32")
    ours = {name for cpu in (False, True) for name in colocate.arguments(VllmColocate(), job, 2, cpu)}
    assert ours - {*vllm.arguments("vllm.EngineArgs"), *vllm.arguments("vllm.LLM")} == set()


def test_every_sampling_parameter_exists(vllm: VllmFiles) -> None:
    sampling = Sampling(4, regex="a")
    ours = {*client.sampling_params(Request([0], 1, seed=0), sampling, []), "prompt_logprobs", "ignore_eos"}
    assert ours - set(vllm.arguments("vllm.SamplingParams")) == set()


def test_every_environment_variable_exists(vllm: VllmFiles) -> None:
    ours = {
        node.value
        for node in nodes("grpocli")
        if isinstance(node, ast.Constant) and re.fullmatch("VLLM_[A-Z0-9_]+", str(node.value))
    }
    known = set(texts(vllm.tree("vllm.envs")))
    assert len(ours) > 10
    assert ours - known == set()


def test_every_message_exists(vllm: VllmFiles) -> None:
    words: list[Any] = TEXTS[""] + TEXTS.get(minor(vllm), [])
    assert [(file, word) for file, word in words if word not in vllm.texts[file]] == []
