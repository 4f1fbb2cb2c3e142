"""The machine, attention, the output head and the layouts: small tensors and models with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from experiment import Measured, Setting, at_least, at_most, between, experiment, true
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from grpocli.training.packing import Layout
    from grpocli.training.policy import Policy
    from grpocli.types import Row

Scored = tuple[torch.Tensor, torch.Tensor]
MIB = 2**20


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return 1000 * (time.perf_counter() - began)


def typical_ms(call: Callable[[], object], device: str, times: int = 5) -> float:
    """The median after one call that does not count."""
    call()
    return statistics.median(milliseconds(call, device) for _ in range(times))


def added_mib(call: Callable[[], object]) -> float:
    """The largest memory that torch has allocated on the GPU during the call, beyond that before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the GPU's kernels that a call starts."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sorted({event.name for event in seen.events() if event.device_type.name == "CUDA"})


def has_kernel(names: Sequence[str], word: str) -> bool:
    return any(word in name.lower() for name in names)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference over the norm of `b`, in float64."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm())


def as_a_run(setting: Setting) -> str:
    """Set for the process what a run sets, cuDNN's attention off among it; the device's name."""
    from grpocli.distributed.world import World
    from grpocli.hardware import Single

    return str(World(Single(device=setting.device)).device)


@experiment(
    "machine",
    "what the GPU computes and moves, beside what the plan takes from its data sheet",
    true("bfloat16", "supports bfloat16", gpu=True),
    between("matmul_share", 0.6, 1.05, "share of the data sheet's bfloat16 rate in a product of 8,192", gpu=True),
    between("copy_share", 0.6, 1.05, "share of its memory bandwidth in a copy", gpu=True),
)
def capabilities(setting: Setting) -> Measured:
    from grpocli_tools.plan.resources import GPUS

    n = 256 if setting.small else 8192
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 255, (MIB if setting.small else 4096 * MIB,), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    rate = 2 * n**3 / typical_ms(lambda: a @ b, setting.device) / 1e9
    moved = 2 * source.numel() / typical_ms(lambda: target.copy_(source), setting.device) / 1e9
    found: Measured = {"tflops": rate, "terabytes_per_second": moved, "torch": torch.__version__}
    if setting.device == "cpu":
        return found
    properties = torch.cuda.get_device_properties(0)
    known = next((gpu for name, gpu in GPUS.items() if name in properties.name), None)
    if known:
        found |= {"matmul_share": rate / known.tflops, "copy_share": moved / known.bandwidth}
    return found | {
        "bfloat16": torch.cuda.is_bf16_supported(),
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gib": properties.total_memory / 2**30,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": str(torch.cuda.nccl.version()),
        "architectures": " ".join(torch.cuda.get_arch_list()),
    }


@experiment(
    "machine",
    "what grpocli sets when it makes its process group",
    true("cudnn_attention_off", "attention by cuDNN is off"),
    true("float32_exact", "float32 products are not made in TF32"),
)
def settings(setting: Setting) -> Measured:
    return {
        "device": as_a_run(setting),
        "cudnn_attention_off": not torch.backends.cuda.cudnn_sdp_enabled(),
        "float32_exact": torch.get_float32_matmul_precision() == "highest",
    }


@experiment(
    "kernels",
    "cuDNN's plans: causal attention, forward and backward, at lengths 640, 641 and 642",
    at_least("new_length_with_ms", 20, "ms for a new length, attention by cuDNN allowed: why grpocli switches it off"),
    at_most("known_length_with_ms", 5, "ms for a known length, allowed"),
    at_most("new_length_without_ms", 5, "ms for a new length, switched off as grpocli does"),
    true("flash_without", "flash attention's kernel runs then"),
    needs=("gpu",),
)
def cudnn_plans(setting: Setting) -> Measured:
    def call(n: int) -> None:
        states = torch.randn(3, 1, 14, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        query, key, value = states.unbind()
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    found: Measured = {}
    for allowed, word in ((True, "with"), (False, "without")):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        call(512)
        new = [milliseconds(partial(call, n), "cuda") for n in (640, 641, 642)]
        known = [milliseconds(partial(call, n), "cuda") for n in (640, 641, 642)]
        names = kernels_of(lambda: call(640))
        found |= {f"new_length_{word}_ms": statistics.median(new), f"known_length_{word}_ms": statistics.median(known)}
        found |= {f"flash_{word}": has_kernel(names, "flash"), f"cudnn_{word}": has_kernel(names, "cudnn")}
        setting.save(found)
    return found


@experiment(
    "kernels",
    "the output head of 4,096 tokens and a vocabulary of 151,936: Triton's kernels beside torch's operations",
    at_least("speedup_forward", 2, "times as fast forward"),
    at_least("speedup", 2, "times as fast forward and backward"),
    at_most("mib_kernels_bfloat16", 1040, "MiB that both add; 985 by the plan, as before the kernels"),
    at_most("difference_bfloat16", 0.01, "largest difference of log-probs and entropies, nats"),
    at_most("gradient_bfloat16", 0.02, "relative difference of the gradients"),
    at_most("difference_float32", 1e-4, "`model.head_dtype=float32`: difference of log-probs and entropies"),
    at_most("gradient_float32", 1e-4, "`model.head_dtype=float32`: relative difference of the gradients"),
    needs=("gpu",),
)
def head_kernels(setting: Setting) -> Measured:
    from grpocli.models.head import Float32Head
    from grpocli.training import logprobs
    from grpocli.types import Sampling

    as_a_run(setting)
    n, hidden, vocabulary = (64, 64, 4000) if setting.small else (4096, 896, 151936)
    # the pieces that torch's operations had on a GPU
    logprobs.IN_CACHE, logprobs.COLUMNS = logprobs.LOGITS_AT_ONCE, logprobs.LOGITS_AT_ONCE // n
    found: Measured = {}
    states = torch.randn(n, hidden, device="cuda", requires_grad=True)
    ids, advantages = torch.randint(0, vocabulary, (n,), device="cuda"), torch.randn(n, device="cuda")
    for word, kind in (("bfloat16", torch.nn.Linear), ("float32", Float32Head)):
        head = kind(hidden, vocabulary, bias=False, device="cuda")
        scores, gradients = [], []
        for form, on_cpu in (("kernels", False), ("torch", True)):
            targets = logprobs.Targets(ids, None, Sampling(1, temperature=0.9), on_cpu=on_cpu)

            def score(head: torch.nn.Module = head, targets: logprobs.Targets = targets) -> torch.Tensor:
                with torch.autocast("cuda", torch.bfloat16), logprobs.scoring(head, targets):
                    return torch.as_tensor(head(states))

            def update(head: torch.nn.Module = head, score: Callable[[], torch.Tensor] = score) -> None:
                states.grad = head.weight.grad = None
                (score()[..., 0] * advantages).sum().backward()

            found |= {
                f"ms_forward_{form}_{word}": typical_ms(score, "cuda"),
                f"ms_{form}_{word}": typical_ms(update, "cuda"),
            }
            states.grad = head.weight.grad = None
            found[f"mib_{form}_{word}"] = added_mib(update)
            scores.append(score().detach())
            gradients.append(torch.cat([torch.as_tensor(t.grad).flatten() for t in (states, head.weight)]))
        found[f"difference_{word}"] = float((scores[0] - scores[1])[..., :2].abs().max())
        found[f"gradient_{word}"] = relative(*gradients)
        setting.save(found)
    for name, ms in (("speedup_forward", "ms_forward"), ("speedup", "ms")):
        found[name] = found[f"{ms}_torch_bfloat16"] / found[f"{ms}_kernels_bfloat16"]
    return found


def little_policy(device: str, dtype: str) -> Policy:
    """A Llama with random weights that are far from uniform; the same for every device and dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpocli.training.policy import Policy

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    model.to(device)
    return Policy(model, model, getattr(torch, dtype))


def random_rows(small: bool) -> list[Row]:
    """Groups with prompts and completions of different lengths."""
    import random

    from grpocli.types import Row

    draw, longest = random.Random(0), 40 if small else 400
    rows = []
    for group in range(4):
        prompt = [draw.randrange(1000) for _ in range(draw.randint(5, longest // 2))]
        for _ in range(4):
            ids = [draw.randrange(1000) for _ in range(draw.randint(1, longest))]
            rows.append(Row(prompt, ids, [1] * len(ids), draw.choice((-1.0, 1.0)), group, [-6.0] * len(ids)))
    return rows


def scored(policy: Policy, batches: Sequence[Sequence[Row]], layout: type[Layout]) -> Scored:
    """Log-probs of all rows, and the gradient of their sum weighted by advantages, in one tensor each."""
    from grpocli.training.packing import MicroBatch
    from grpocli.types import Sampling

    policy.model.zero_grad(set_to_none=True)
    logps = []
    for rows in batches:
        batch = MicroBatch.build(rows, policy.model.device, layout)
        logp_BT = policy.scores(batch, Sampling(1)).logp
        (logp_BT.where(batch.mask.bool(), 0.0) * batch.advantages.unsqueeze(1)).sum().backward()
        logps += [logp_BT.detach()[k, : len(row.completion_ids)].cpu() for k, row in enumerate(rows)]
    gradients = [p.grad.float().flatten().cpu() for p in policy.model.parameters() if p.grad is not None]
    return torch.cat(logps), torch.cat(gradients)


def beside(own: Scored, reference: Scored, dtype: str) -> Measured:
    """How far log-probs and gradients are from those of a reference: the figures of `AGREEMENT`."""
    apart = (own[0] - reference[0]).abs()
    return {
        f"logp_{dtype}": float(apart.max() if dtype == "float32" else apart.mean()),
        f"gradient_{dtype}": relative(own[1], reference[1]),
    }


AGREEMENT = (
    at_most("logp_float32", 1e-4, "float32: largest difference of log-probs, nats"),
    at_most("gradient_float32", 1e-4, "float32: relative difference of the gradient"),
    at_most("logp_bfloat16", 0.1, "bfloat16: mean difference of log-probs, nats"),
    at_most("gradient_bfloat16", 0.1, "bfloat16: relative difference of the gradient"),
)


@experiment("kernels", "the GPU's log-probs and gradients beside the CPU's in float32, packed rows", *AGREEMENT)
def equal_to_the_cpu(setting: Setting) -> Measured:
    from grpocli.training.packing import Packed
    from grpocli.training.trials import pack

    as_a_run(setting)
    rows, found = random_rows(setting.small), dict[str, Any]()
    reference = little_policy("cpu", "float32")
    assert pack(reference, None)
    exact = scored(reference, [rows], Packed)
    for dtype in ("float32", "bfloat16"):
        policy = little_policy(setting.device, dtype)
        assert pack(policy, None)
        found |= beside(scored(policy, [rows], Packed), exact, dtype)
        setting.save(found)
    return found


@experiment(
    "kernels",
    "packed rows beside padded ones, and one micro-batch beside four",
    true("agrees_float32", "float32: the trial at the start of a run packs"),
    true("agrees_bfloat16", "bfloat16: it packs"),
    *AGREEMENT[:2],
    at_most("gradient_bfloat16", 0.1, "bfloat16: the same"),
    at_most("split_float32", 1e-4, "float32: the gradient of four micro-batches beside that of one"),
)
def packed_and_padded(setting: Setting) -> Measured:
    from grpocli.training.packing import Packed, Padded
    from grpocli.training.trials import pack

    as_a_run(setting)
    rows, found = random_rows(setting.small), dict[str, Any]()
    groups = [[row for row in rows if row.group == group] for group in range(4)]
    for dtype in ("float32", "bfloat16"):
        policy = little_policy(setting.device, dtype)
        padded = scored(policy, groups, Padded)
        found[f"agrees_{dtype}"] = pack(policy, None)
        packed, split = (scored(policy, batches, Packed) for batches in ([rows], groups))
        found |= beside(packed, padded, dtype) | {f"split_{dtype}": relative(split[1], packed[1])}
        setting.save(found)
    return found


@experiment(
    "kernels",
    "packed rows by flex attention beside those by sdpa: a forward and a backward of a little model",
    *AGREEMENT,
    at_most("time_bfloat16", 1, "bfloat16: time over that of sdpa", gpu=True),
    seconds=110,
)
def flex_and_sdpa(setting: Setting) -> Measured:
    from grpocli.training.packing import FlexPacked, Packed
    from grpocli.training.trials import pack

    as_a_run(setting)
    rows, found = random_rows(setting.small), dict[str, Any]()
    for dtype in ("float32", "bfloat16"):
        both, ms = [], []
        for layout in (Packed, FlexPacked):
            policy = little_policy(setting.device, dtype)
            policy.packed = layout
            assert pack(policy, None)
            assert policy.packed is layout
            both.append(scored(policy, [rows], layout))
            ms.append(typical_ms(partial(scored, policy, [rows], layout), setting.device))
        found |= beside(both[1], both[0], dtype) | {f"ms_{dtype}": ms, f"time_{dtype}": ms[1] / ms[0]}
        setting.save(found)
    return found


@experiment(
    "kernels",
    "`model.head_dtype=float32`: products of bfloat16 matrices with float32 sums",
    at_most("error", 1e-5, "relative error beside float64"),
    at_most("slower", 2, "times as slow as the product in bfloat16", gpu=True),
)
def float32_head(setting: Setting) -> Measured:
    from grpocli.models.head import product

    n, on_cpu = 128 if setting.small else 4096, setting.device == "cpu"
    a, b = (torch.randn(n, n, device=setting.device).to(torch.bfloat16) for _ in range(2))
    plain = typical_ms(lambda: a @ b, setting.device)
    return {
        "error": relative(product(a, b, on_cpu), a.double() @ b.double()),
        "slower": typical_ms(lambda: product(a, b, on_cpu), setting.device) / plain,
    }
