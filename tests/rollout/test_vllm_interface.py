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
OURS = "grpocli/rollout/vllm"
VERSIONS = ("0.32.0", "0.33.0")
"""One of each minor version in pyproject.toml's range."""

TRANSFER = "vllm.distributed.weight_transfer"
ENGINE = f"{TRANSFER}.base.WeightTransferEngine"
NCCL = f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine"
FACTORY = f"{TRANSFER}.factory.WeightTransfer"
RELOAD = "vllm.model_executor.model_loader.reload"
PACKING = " ".join(transports.packing(1))
CALLS = {
    ENGINE: "config vllm_config device model",
    f"{ENGINE}.parse_update_info": "update_dict",
    f"{TRANSFER}.base.ParamMeta": "name dtype shape",
    f"{FACTORY}EngineFactory.register_engine": "name module_path_or_cls class_name",
    f"{FACTORY}TrainerFactory.trainer_init": "init_info client source",
    f"{TRANSFER}.ipc_engine.IPCTrainerInitInfo": " ".join(["rank", *PACKING.split()[:2]]),
    f"{TRANSFER}.ipc_engine.IPCWeightTransferUpdateInfo": "ipc_handles ipc_handles_pickled",
    f"{TRANSFER}.nccl_common.NCCLWeightTransferInitInfo": f"rank_offset world_size nccl_unique_id_b64 {PACKING}",
    f"{TRANSFER}.nccl_common.uid_init_process_group": "nccl_unique_id_bytes rank world_size device",
    NCCL: f"client source {PACKING}",
    f"{RELOAD}.initialize_layerwise_reload": "model",
    f"{RELOAD}.layerwise.finalize_layerwise_processing": "model model_config",
    f"{RELOAD}.layerwise.get_layerwise_info": "layer",
    "vllm.model_executor.model_loader.mtp_validation.disable_mtp_completeness_check": "",
    "vllm.LLM.generate": "prompts sampling_params use_tqdm",
    "vllm.LLM.init_weight_transfer_engine": "request",
    "vllm.LLM.start_weight_update": "",
    "vllm.LLM.update_weights": "request",
    "vllm.LLM.finish_weight_update": "weight_version",
    "vllm.LLM.get_weight_version": "",
    "vllm.LLM.reset_prefix_cache": "",
    "vllm.LLM.sleep": "level",
    "vllm.LLM.wake_up": "tags",
    "vllm.sampling_params.StructuredOutputsParams": "regex json",
}
"""Functions, methods and classes, and the names of the arguments that grpocli gives them."""

NAMES = {
    ENGINE: "model model_config device",
    NCCL: "send_weights shutdown model_update_group",
    f"{TRANSFER}.ipc_engine.IPCTrainerWeightTransferEngine": "send_weights _all_gather_and_merge_handles",
    f"{FACTORY}EngineFactory": "_registry",
    "vllm.distributed.device_communicators": "pynccl_wrapper.NCCLLibrary.ncclGetUniqueId shm_broadcast.sched_yield",
    "vllm.distributed.parallel_state": "_WORLD GroupCoordinator.destroy destroy_distributed_environment",
    "vllm.model_executor.layers.fused_moe": "modular_kernel.FusedMoEExperts.process_weights_after_loading "
    "unquantized_fused_moe_method.UnquantizedFusedMoEMethod.moe_kernel",
    "vllm.model_executor.layers.vocab_parallel_embedding": "VocabParallelEmbedding.quant_method "
    "UnquantizedEmbeddingMethod.process_weights_after_loading",
    f"{RELOAD}.types.LayerReloadingInfo": "loaded_weights",
    "vllm.platforms.interface.Platform": "is_cpu import_kernels device_type",
    "vllm.entrypoints.openai": "api_server",
    "vllm.LLM": "llm_engine",
    "vllm.v1.engine": "llm_engine.LLMEngine.engine_core core_client.EngineCoreClient.shutdown",
}
"""Further attributes and modules that grpocli reads, calls or replaces."""

ONLY = {
    "0.32": (f"{TRANSFER}.base.WeightSource.metadata", "vllm.entrypoints.launchers.cli_args.make_arg_parser"),
    "0.33": (f"{TRANSFER}.base.WeightSource.iter_full", "vllm.entrypoints.common.cli_args.make_arg_parser"),
}
"""What only one minor version has and grpocli, or its tests, use in that one."""

TEXTS = {
    "entrypoints/rl/online/api_router": (
        *("init_info", "update_info", "weight_version", "new_version", "world_size", "/weight_info"),
        *("mode: Annotated[PauseMode", "clear_cache: Annotated[bool"),
    ),
    "entrypoints/serve/dev/cache/api_router": ("reset_running_requests",),
    "entrypoints/serve/lora/protocol": ("lora_name", "lora_path"),
    "entrypoints/scale_out/token_in_token_out/protocol": ("weight_versions", "prompt_logprobs"),
    "v1/metrics/loggers": ('"vllm:generation_tokens"', '"vllm:prompt_tokens"'),
}
"""Words of requests, answers and metrics, by file."""


@cache
def nodes(folder: str, files: str = "*.py") -> list[ast.AST]:
    """What the Python files of a folder consist of."""
    return [node for path in sorted((ROOT / folder).rglob(files)) for node in ast.walk(ast.parse(path.read_text()))]


def texts(tree: list[ast.AST], pattern: str) -> set[str]:
    """The strings that match."""
    strings = {str(node.value) for node in tree if isinstance(node, ast.Constant)}
    return {text for text in strings if re.fullmatch(pattern, text)}


def methods(owner: Any, decorated: str = "") -> dict[str, list[str]]:
    """The arguments of a class's methods."""
    found = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: arguments(node) for node in found if decorated in " ".join(map(ast.unparse, node.decorator_list))
    }


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> VllmFiles:
    try:
        return VllmFiles(request.param)
    except (OSError, SubprocessError) as error:
        reason = f"the files of vLLM {request.param} cannot be read from the package index: {error}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def test_every_minor_version_in_the_range_is_compared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (Requirement(line) for line in extras["vllm"])
    assert tuple(v for v in (f"0.{n}.0" for n in range(100)) if wanted.specifier.contains(v)) == VERSIONS


def test_every_name_exists(vllm: VllmFiles) -> None:
    tree = nodes("grpocli")
    imported = {
        f"{node.module}.{one.name}"
        for node in (*tree, *nodes("bench"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for one in node.names
    }
    read = {ast.unparse(node) for node in tree if isinstance(node, ast.Attribute)}  # after `import vllm`
    imported |= {name for name in read if re.fullmatch(r"vllm\.\w+", name)}
    assert len(imported) > 20
    named = {f"{owner}.{name}" for owner, names in NAMES.items() for name in names.split()}
    assert [name for name in sorted({*imported, *named, *ONLY[vllm.minor]}) if not vllm.find(name)] == []


def test_every_call_has_its_arguments(vllm: VllmFiles) -> None:
    lacking = {name: set(given.split()) - {*vllm.arguments(name)} for name, given in CALLS.items()}
    assert lacking == {name: set() for name in CALLS}


def test_our_transfers_define_what_vllm_calls(vllm: VllmFiles) -> None:
    """Every abstract method of the base class, with its arguments."""
    ours = {node.name: methods(node) for node in nodes(OURS) if isinstance(node, ast.ClassDef)}
    abstract = methods((vllm.find(ENGINE) or [None, None])[1], "abstractmethod")
    assert len(abstract) > 4
    for name in ("ShmWeightTransfer", "InProcessWeightTransfer"):
        assert abstract.items() <= (ours["LoaderWeightTransfer"] | ours[name]).items()


@pytest.mark.parametrize("engine", ["nccl", "ipc"])
def test_our_source_and_client_have_what_vllm_calls(vllm: VllmFiles, engine: str) -> None:
    found = vllm.find(f"{TRANSFER}.{engine}_engine.{engine.upper()}TrainerWeightTransferEngine")
    assert found
    attributes = [node for node in ast.walk(found[1]) if isinstance(node, ast.Attribute)]
    used = {(ast.unparse(node.value).rpartition(".")[2], node.attr) for node in attributes}
    parts = {"source": transports.WeightSource, "client": transports.TransferClient}
    assert any(owner == "client" for owner, _ in used)
    assert [(owner, name) for owner, name in used if owner in parts and not hasattr(parts[owner], name)] == []


def options(vllm: VllmFiles) -> set[str]:
    """The options of vLLM's server."""
    homes = ["vllm.EngineArgs", "vllm.AsyncEngineArgs", ONLY[vllm.minor][1].replace("make_arg_parser", "FrontendArgs")]
    fields = {name for home in homes if (found := vllm.find(home)) for name in vllm.fields(*found)}
    added = re.compile(r'add_argument\(\s*"(?:--)?([a-z_-]+)"')
    files = [text for name, text in vllm.texts.items() if "args" in name]
    return fields | {word.replace("-", "_") for text in files for word in added.findall(text)}


def routes(vllm: VllmFiles) -> set[str]:
    served = re.compile(r'(?:\.(?:get|post)|Mount)\(\s*"(/[^"]*)"')
    return {route for name, text in vllm.texts.items() if "/entrypoints/" in name for route in served.findall(text)}


def test_every_argument_option_route_and_variable_exists(vllm: VllmFiles) -> None:
    job = EngineJob("/m", "bfloat16", 64, Path(), seed=0, lora_rank=8, head_dtype="float32", revision="main")
    ngram = {"speculative_config": {"method": "ngram"}}
    given = Vllm(vllm_args=ngram, data_parallel=2, quantization="fp8", enforce_eager=True)
    words = [word for cpu in (False, True) for word in server.command(server.ServerSpec(job, 1, 64), given, cpu)]
    flags = {word[2:].partition("=")[0].removeprefix("no-") for word in words if word.startswith("--")}
    flags |= {*RESERVED, *lora.lora_flags(8, "bfloat16", cpu=True)}
    plain = EngineJob("/m", "bfloat16", 64, Path(), seed=0, head_dtype="float32")
    llm = {name for cpu in (False, True) for name in colocate.arguments(VllmColocate(), plain, 2, cpu)}
    sampling = client.sampling_params(Request([0], 1, seed=0), Sampling(4, regex="a"), [])
    calls = [*nodes(OURS, "client.py"), *nodes(OURS, "external.py")]
    asked = {text.partition("?")[0] for text in texts(calls, r"/[a-z][a-z_0-9/]*(\?.*)?")}
    variables = texts(nodes("grpocli"), "VLLM_[A-Z0-9_]+")
    assert min(len(flags), len(asked), len(variables)) > 10
    assert {name.replace("-", "_") for name in flags} - options(vllm) == set()
    assert llm - {*vllm.arguments("vllm.EngineArgs"), *vllm.arguments("vllm.LLM")} == set()
    assert {*sampling, "prompt_logprobs", "ignore_eos"} - {*vllm.arguments("vllm.SamplingParams")} == set()
    assert asked - routes(vllm) == set()
    assert variables - texts([*ast.walk(vllm.tree("vllm.envs"))], ".*") == set()


def test_every_message_exists(vllm: VllmFiles) -> None:
    words = [*TEXTS.items(), *([("v1/engine/core", (client.PAUSED,))] if vllm.minor == "0.33" else [])]
    assert [word for file, some in words for word in some if word not in vllm.texts[f"vllm/{file}.py"]] == []
