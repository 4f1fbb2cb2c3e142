"""`grpocli plan`: sizes, sharding, exit codes, and a comparison with a real run."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from little import ENDS, SHAPE
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from grpocli.composition.compose import build_run, compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.models.head import Float32Head
from grpocli.training.logprobs import Targets, scoring
from grpocli.types import Sampling
from grpocli_tools.plan import times
from grpocli_tools.plan.model_size import PUBLIC, find_model_size
from grpocli_tools.plan.plan import Plan, make_plan
from grpocli_tools.plan.resources import GIB, DeviceOptions
from grpocli_tools.plan.times import COMPUTE, COSTS, TrainingStep
from grpocli_tools.plan.trace import AllocationTracker

SMALL = LlamaConfig(
    **SHAPE
    | ENDS
    | {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    | {"max_position_embeddings": 2048, "tie_word_embeddings": True}
)
PUBLISHED = {  # parameters of one model of each family and form
    "deepseekmath-7b-instruct": 6_910_365_696,
    "gemma3-1b": 999_885_952,
    "llama3.1-8b": 8_030_261_248,
    "olmo2-1b": 1_484_916_736,
    "olmo3-7b": 7_298_011_136,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
}


@functools.cache
def planned(*overrides: str, **asked: Any) -> Plan:
    return make_plan(build_run(compose(list(overrides))), DeviceOptions(**asked))


def update(plan: Plan, name: str) -> float:
    """Bytes of one item on a trainer's device during the update, or 0."""
    return sum(item.update for item in plan.devices[0].items if item.name == name)


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model folder that only has a config."""
    folder = tmp_path_factory.mktemp("config_only")
    SMALL.save_pretrained(folder)
    return ["model=hf", f"model.path={folder}"]


@pytest.fixture(scope="module")
def on_gpus(config_only: list[str]) -> list[str]:
    return [*config_only, "engine=transformers", "hardware.device=cuda", "hardware.processes=4"]


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_models_of_the_config_group_have_their_published_size(model: str) -> None:
    assert find_model_size(build_run(compose([f"model={model}"])).model).parameters == PUBLISHED[model]


def test_a_token_goes_to_few_of_the_experts_of_a_mixture() -> None:
    size = find_model_size(build_run(compose(["model=qwen3-30b-a3b"])).model)
    per_layer = 3 * 2048 * 768
    assert size.idle == 48 * (128 - 8) * per_layer


@pytest.mark.parametrize(("gpus", "servers"), [(1, 0), (8, 1)])
def test_the_engine_is_that_of_a_run_with_as_many_gpus(config_only: list[str], gpus: int, servers: int) -> None:
    """A short run samples with transformers only where it has a single GPU (`AutoEngine.for_run`)."""
    short = ("engine=auto", "hardware.device=cuda", "train.steps=1", "eval.problems=0")
    assert planned(*config_only, *short, devices=gpus).resources.servers == servers


def computing(plan: Plan) -> float:
    """Seconds of training on its devices, without a host that keeps them waiting."""
    return TrainingStep.of(plan).demand().part(*COMPUTE).seconds(COSTS[plan.resources.kind])


@pytest.mark.survival
def test_the_host_bounds_the_training_of_a_small_model_on_a_gpu(config_only: list[str]) -> None:
    """A CPU does not wait for a host."""
    small = planned(*config_only, "engine=transformers", "hardware.device=cuda")
    assert small.work.seconds["training: compute"] == TrainingStep.of(small).host_seconds() > 3 * computing(small)
    large = planned("model=qwen2.5-7b", "task=arithmetic", "engine=transformers", "hardware.device=cuda")
    assert large.work.seconds["training: compute"] == computing(large) > TrainingStep.of(large).host_seconds()
    on_cpu = planned(*config_only, "engine=transformers", "hardware.device=cpu")
    assert on_cpu.work.seconds["training: compute"] == computing(on_cpu)


def test_sizes_equal_those_of_the_model_in_memory(config_only: list[str]) -> None:
    model = LlamaForCausalLM(SMALL)
    size = find_model_size(build_run(compose(config_only)).model)
    assert size.parameters == size.trained == sum(p.numel() for p in model.parameters())
    assert size.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert size.outside == SMALL.vocab_size * SMALL.hidden_size + SMALL.hidden_size
    assert (size.layers, size.tied) == (3, True)
    out = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in out.past_key_values.layers)
    assert size.cache_per_token * 3 == cached


@pytest.mark.slow
def test_lora_trains_only_its_updates(config_only: list[str]) -> None:
    from grpocli.models.lora import Lora, attach

    model = attach(LlamaForCausalLM(SMALL), Lora(rank=4), seed=0)
    size = find_model_size(build_run(compose([*config_only, "model.lora.rank=4"])).model)
    assert size.trained == size.adapter == sum(p.numel() for p in model.parameters() if p.requires_grad)
    plan, full = planned(*config_only, "model.lora.rank=4"), planned(*config_only)
    assert update(plan, "optimizer") == 8 * size.adapter
    assert update(full, "reference model") == 4 * full.size.parameters
    assert update(plan, "reference model") == 0, "the base model is its own reference"


@pytest.mark.slow
def test_sharding_divides_state_by_processes(on_gpus: list[str]) -> None:
    given = [*on_gpus, "engine=vllm", "train.micro_batch_tokens=1024", "model.dtype=float32"]
    ddp, zero3, fsdp2 = (planned(*given, f"hardware.parallel={kind}") for kind in ("ddp", "zero3", "fsdp2"))
    assert ddp.micro_batches > 1, "with one process, gradients replace activations"
    size = 4 * ddp.size.parameters
    assert [update(ddp, n) for n in ("weights", "gradients", "optimizer")] == [size, size, 2 * size]
    for plan in (zero3, fsdp2):
        assert [update(plan, n) for n in ("weights", "gradients", "optimizer")] == [size / 4, size / 4, size / 2]
        assert update(plan, "reference model") == size / 4
        assert update(plan, "gathered weights") > 0
        assert update(plan, "cast weights") == 0


@pytest.mark.survival
def test_gradient_checkpointing_and_smaller_micro_batches_save_activations(config_only: list[str]) -> None:
    plain = planned(*config_only)
    checked = planned(*config_only, "train.gradient_checkpointing=true")
    assert update(checked, "activations") < update(plain, "activations") / 4
    half = planned(*config_only, f"train.micro_batch_tokens={plain.rows.tokens // 2}")
    assert update(half, "activations") == pytest.approx(update(plain, "activations") / 2, rel=0.02)


@pytest.mark.slow
def test_flops_are_six_for_each_parameter_and_token(config_only: list[str]) -> None:
    plan = planned(*config_only, "algorithm=drgrpo", "rollout.max_prompt_tokens=1", "rollout.max_completion_tokens=31")
    expected = 6 * plan.size.parameters * plan.work.tokens
    assert plan.work.forward + plan.work.backward == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_a_shared_gpu_holds_trainer_and_server(config_only: list[str]) -> None:
    plan = planned(*config_only, "engine=vllm", "engine.gpu_memory_utilization=0.5", "hardware.device=cuda", memory=40)
    _, server = plan.devices
    assert plan.resources.shared
    assert server.memory == 20 * GIB
    assert update(plan, "vLLM") == 20 * GIB
    apart = planned(*config_only, "engine=vllm", "hardware.device=cuda", memory=40, devices=8)
    assert (apart.resources.trainers, apart.resources.shared) == (7, False)
    assert update(apart, "vLLM") == 0


@pytest.mark.survival
def test_a_real_run_needs_the_planned_memory(tmp_path: Path) -> None:
    """Compares resident memory minus that of a small run, which has the libraries too."""
    from grpocli.models.tiny import make_tokenizer

    LlamaForCausalLM(SMALL).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    run = [
        *("model=hf", f"model.path={tmp_path}/model", "model.dtype=float32", "hardware.device=cpu"),
        *("eval.problems=0", "train.steps=1", "rollout.group_size=16", "rollout.max_prompt_tokens=10"),
    ]
    small = ["rollout.prompts_per_step=1", "rollout.max_completion_tokens=2", "train.micro_batch_tokens=16"]
    large = ["rollout.prompts_per_step=16", "rollout.max_completion_tokens=54", "train.micro_batch_tokens=16384"]
    measured = _peak(tmp_path, *run, *large) - _peak(tmp_path, *run, *small)
    expected = _tensors(planned(*run, *large)) - _tensors(planned(*run, *small))
    assert expected > 0.4 * GIB
    assert expected == pytest.approx(measured, rel=0.2)


def _tensors(plan: Plan) -> float:
    items = [item for item in plan.devices[0].items if item.name != "libraries"]
    return max(sum(item.update for item in items), sum(item.generation for item in items))


MEASURE = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(ended.returncode)
"""
"""Runs in a small process, since the peak of a child starts at that of its parent."""


def _peak(folder: Path, *overrides: str) -> int:
    """Peak bytes of the process of a whole run."""
    command = [sys.executable, "-m", "grpocli", "train", *overrides, f"hydra.run.dir={folder}/run-{len(overrides[-3])}"]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # glibc by default keeps much of the freed memory
    ended = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout) * 1024


@pytest.mark.survival
def test_four_bits_and_the_states_of_optimizers_are_counted(config_only: list[str]) -> None:
    """The bytes are those of the loaded model; products need one whole weight at a time."""
    lora = [*config_only, "model.lora.rank=4", "model.dtype=bfloat16"]
    plain, nf4 = planned(*lora), planned(*lora, "model.quantization=nf4", "optim=adamw_8bit")
    linear = sum(p.numel() for name, p in LlamaForCausalLM(SMALL).named_parameters() if "proj" in name)
    rest = plain.size.parameters - plain.size.adapter - linear
    assert nf4.size.quantized == linear
    assert update(nf4, "weights") == linear * 0.5625 + rest * 2 + plain.size.adapter * 4
    assert update(plain, "weights") == 4 * plain.size.parameters
    assert update(nf4, "cast weights") < update(plain, "cast weights") / 10, "only LoRA's weights are cast"
    assert update(nf4, "backward") >= 2 * nf4.size.widest
    sizes = {name: update(planned(*config_only, f"optim={name}"), "optimizer") for name in ("adamw", "muon", "sgd")}
    assert sizes["adamw"] == 8 * LlamaForCausalLM(SMALL).num_parameters()
    assert sizes["muon"] == sizes["adamw"] - 4 * linear
    assert sizes["sgd"] == 0
    small = update(planned(*config_only, "optim=adamw_8bit"), "optimizer")
    assert 0.25 * sizes["adamw"] < small < 0.26 * sizes["adamw"]


def test_processes_that_share_micro_batches_exchange_heads(on_gpus: list[str]) -> None:
    """The same micro-batches, of one process and of two that share them."""
    given = [*on_gpus, "algorithm=drgrpo", "rollout.prompts_per_step=64", "hardware.parallel=ddp"]
    alone = planned(*given, "train.micro_batch_tokens=2048")
    shared = planned(*given, "train.micro_batch_tokens=1024", "hardware.context_parallel=2")
    assert shared.rows == alone.rows
    for name in ("activations", "logits", "peak"):
        assert getattr(shared.traced, name) == getattr(alone.traced, name) // 2
    assert shared.traced.casts == alone.traced.casts
    one, two = (TrainingStep.of(plan).demand().part("linear", "attention", "logits") for plan in (alone, shared))
    assert one == two, "each process computes as much as before"
    of_a_token = 2 * 2 * (4 + 2) * 64 * 3  # bytes; queries, keys, values and output; heads, size, layers
    exchanged = of_a_token * alone.work.tokens / 4 * 2 / 2  # of four processes; forward and backward; half stays
    before, after = (plan.work.seconds["training: network"] for plan in (alone, shared))
    assert after - before == pytest.approx(COSTS["cuda"].network * exchanged / alone.resources.link)


class LogitTraffic(TorchDispatchMode):
    """Counts the bytes of logits that operations read and write, beside the factors of products."""

    def __init__(self, logits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logits, self.bytes = logits, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        reads = args if name in ("grpocli::score_rows", "grpocli::differentiate_logits", "sub_", "_to_copy") else ()
        written = {"grpocli::differentiate_logits": args[0]} | dict.fromkeys(("mm", "_to_copy", "sub_"), made)
        tensors = (*reads, written.get(name))
        self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.numel() == self.logits)
        return made


@pytest.mark.skipif(
    Version(torch.__version__).release < (2, 12), reason="torch 2.11 has no sum of products in float32 for fake tensors"
)
@pytest.mark.parametrize("wide", [False, True])
def test_the_bytes_of_logits_are_those_of_the_head(wide: bool) -> None:
    tokens, vocabulary = 64, 512
    with FakeTensorMode():
        head = torch.nn.Linear(16, vocabulary, bias=False, dtype=torch.bfloat16)
        head.__class__ = Float32Head if wide else torch.nn.Linear
        hidden = torch.ones(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        targets = Targets(torch.zeros(tokens, dtype=torch.long), None, Sampling(1), on_cpu=False)
        with scoring(head, targets), LogitTraffic(tokens * vocabulary) as forward:
            scores = head(hidden)
        with LogitTraffic(tokens * vocabulary) as backward:
            scores[..., 0].sum().backward()
    stated = [times.HEAD_FORWARD, times.HEAD_BACKWARD, times.WIDE_HEAD_FORWARD, times.WIDE_HEAD_BACKWARD]
    assert [one.bytes / (tokens * vocabulary) for one in (forward, backward)] == (stated[2:] if wide else stated[:2])


@pytest.mark.parametrize(
    ("overrides", "processes", "shared", "gpus"),
    [
        ([], 1, True, 1),
        (["engine.replicas=2"], 2, True, 2),
        (["hardware.processes=2"], 2, False, 3),
        (["engine=transformers", "hardware.processes=2"], 2, False, 2),
    ],
)
def test_the_fewest_gpus_of_a_run_are_assumed(overrides: list[str], processes: int, shared: bool, gpus: int) -> None:
    found = planned("hardware.device=cuda", "engine=vllm", *overrides).resources
    assert (found.trainers, found.shared, found.devices) == (processes, shared, gpus)


@pytest.mark.slow
def test_the_command_says_whether_a_run_fits_and_which_keys_to_change(grpocli, config_only: list[str]) -> None:
    code, out, _ = grpocli("plan", "--json", *config_only)
    (device,) = json.loads(out)["devices"]
    assert code == 0
    assert device["peak"] == max(sum(item[phase] for item in device["items"]) for phase in ("update", "generation"))
    on_gpu = [*config_only, "engine=transformers", "engine.max_rows=8", "algorithm=drgrpo", "--gpu", "L4"]
    for given, fits, said in (
        ([*config_only, "--memory", f"{device['peak'] / GIB / 0.97}"], True, "(3%). That is little"),
        ([*on_gpu, "train.micro_batch_tokens=2048"], True, "\n  train.micro_batch_tokens=8192: fits, "),
        ([*on_gpu, "--memory", "1.8"], False, "\n  train.gradient_checkpointing=true: fits, "),
    ):
        code, out, _ = grpocli("plan", *given)
        assert (code, ("It fits: " in out), said in out) == (int(not fits), fits, True), out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=hf", "model.path=EMPTY"], "model.path"),
        (["model=hf", "model.path=T5"], "model.path"),
        (["model=hf", "model.path=CONFIG", "model.lora.rank=4", "model.lora.target_modules=[nothing]"], "model"),
    ],
)
def test_a_model_that_cannot_be_planned_is_named(words, named: str, grpocli, tmp_path: Path, config_only) -> None:
    for name in ("EMPTY", "T5"):
        (tmp_path / name).mkdir()
    (tmp_path / "T5" / "config.json").write_text('{"model_type": "t5"}')
    given = [config_only[1] if word.endswith("=CONFIG") else word for word in words]
    code, out, err = grpocli("plan", *given)
    assert (code, out, named in err) == (2, "", True), err


def test_every_preset_stands_in_the_docs_and_has_public_sizes() -> None:
    files = [path for path in (Path(conf_dir()) / "model").glob("*.yaml") if path.stem not in ("hf", "tiny")]
    paths = {path.stem: match[1] for path in files if (match := re.search(r"(?m)^path: (\S+)$", path.read_text()))}
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert dict(re.findall(r"(?m)^\| `([\w.-]+)` \| ([\w.-]+/[\w.-]+) \|", page)) == paths
    assert set(json.loads(PUBLIC.read_text())) == set(paths.values())


@pytest.mark.survival
def test_the_experts_of_a_mixture_are_traced(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=1, num_experts=8, num_experts_per_tok=2, vocab_size=128)
    config.save_pretrained(tmp_path)
    plans = [planned("model=hf", f"model.path={tmp_path}", f"model.dtype={d}") for d in ("bfloat16", "float32")]
    assert all(update(plan, "activations") > 0 for plan in plans)


@pytest.mark.survival
def test_products_and_heads_in_float32_take_time_and_memory(config_only: list[str]) -> None:
    """Products are up to 15 times slower on a GPU and twice on a CPU."""

    def plan(device: str, dtype: str, head: str) -> Plan:
        options = (*config_only, "engine=transformers", f"hardware.device={device}")
        return planned(*options, f"model.dtype={dtype}", f"model.head_dtype={head}")

    for device, most in (("cpu", 2.0), ("cuda", 1.5)):
        narrow, wide = (plan(device, "bfloat16", head) for head in ("null", "float32"))
        ratio = computing(plan(device, "float32", "null")) / computing(narrow)
        assert ratio == pytest.approx(2) if device == "cpu" else 1 < ratio < 15
        assert 1 < computing(wide) / computing(narrow) < most
        assert wide.traced.total < narrow.traced.total + 2**26, "no more than a piece of logits"
        sampled = [{i.name: i for i in p.devices[0].items}["weights to sample with"] for p in (wide, narrow)]
        assert sampled[0].generation - sampled[1].generation == 2 * SMALL.vocab_size * SMALL.hidden_size


@pytest.mark.slow
def test_layers_of_deep_models_are_extrapolated(config_only: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*config_only, "model.dtype=bfloat16"]
    whole = planned(*overrides)
    monkeypatch.setattr("grpocli_tools.plan.trace.TRACED_LAYERS", 2)
    assert planned(*overrides).traced.total == pytest.approx(whole.traced.total, rel=0.02)


def test_the_tracker_counts_live_bytes() -> None:
    old = torch.zeros(100)
    with AllocationTracker([old]) as tracker:
        old += 1
        one = old * 2
        view = one[:50]
        del one
        assert (tracker.live, tracker.peak) == (400, 400)
        del view
        two = old + 1
        assert (tracker.live, tracker.peak) == (400, 400)
    del two


@pytest.mark.slow
def test_episodes_double_the_kv_cache() -> None:
    def cache(*overrides: str) -> float:
        items = planned("engine=transformers", "task=calculator", *overrides).devices[0].items
        return sum(item.generation for item in items if item.name == "KV cache")

    assert cache() == 2 * cache("task.environment.turns=1") > 0


def test_a_repetition_penalty_is_traced_in_padded_rows(config_only: list[str]) -> None:
    plain, penalized = (
        planned(*config_only, "train.packed=false", f"rollout.repetition_penalty={penalty}") for penalty in (1, 1.1)
    )
    assert penalized.traced.activations == plain.traced.activations > 0
    assert penalized.traced.peak > plain.traced.peak


@pytest.mark.slow
def test_training_and_vllm_machines_are_separate_devices() -> None:
    machines = ["hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=3", "engine=vllm"]
    cpus = planned(*machines, "hardware.device=cpu", "hardware.devices_per_node=4", "engine.replicas=2")
    assert {device.name: device.count for device in cpus.devices} == {
        "each training machine": 2,
        "each vLLM machine": 3,
    }
    notes = {item.name: item.note for device in cpus.devices for item in device.items}
    assert (notes["libraries"], notes["vLLM: weights"].partition(";")[0]) == ("4 processes; measured", "2 processes")
    gpus = planned(*machines, "hardware.device=cuda", "engine.tensor_parallel=8")
    assert [device.count for device in gpus.devices] == [16, 24]
    assert (cpus.resources.servers, gpus.resources.servers) == (6, 3)


def test_compiled_layers_keep_less_and_wait_less(on_gpus: list[str]) -> None:
    eager, compiled = (planned(*on_gpus, "hardware.parallel=ddp", f"model.compile={on}") for on in ("false", "true"))
    assert compiled.traced.activations == int(0.6 * eager.traced.activations)
    assert TrainingStep.of(compiled).host_seconds() < TrainingStep.of(eager).host_seconds()
