"""Savings that do not change the update: packed rows, skipped rows without a gradient, log-probs without logits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composed import built
from little import ENDS, SHAPE
from tables import table
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from training.updating import train_step
from transformers import AutoConfig, AutoModelForCausalLM

from grpocli.algorithm.metrics import EXTREMES, MEANS_OVER_COMPUTED
from grpocli.config.schema import Train
from grpocli.errors import ConfigError
from grpocli.models import flex_attention
from grpocli.models import shared_prompt_attention as attention
from grpocli.training import logprobs, packing
from grpocli.training.optim import AdamW
from grpocli.training.packing import FlexPacked, MicroBatch, Packed, Padded
from grpocli.training.policy import Policy, Reference
from grpocli.training.trials import choose_layout, find_head, pack
from grpocli.training.update import Updater
from grpocli.types import Row, Sampling

GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128} | {
    f"{place}_pdrop": 0.0 for place in ("attn", "resid", "embd")
}
OPTIONS: dict[str, dict[str, Any]] = {"gpt2": GPT2, "granite": {"logits_scaling": 8.0}, "gemma2": {"head_dim": 8}}
ALGORITHMS = {
    "grpo": ("algorithm=grpo",),
    "no kl": ("algorithm=grpo", "algorithm/kl=none"),
    "dapo": ("algorithm=dapo",),
    "drgrpo": ("algorithm=drgrpo", "algorithm.aggregate.length=10"),
    "dgpo": ("algorithm=dgpo",),
    "bonus": ("algorithm=dapo", "algorithm/entropy=bonus", "algorithm.entropy.coefficient=0.1"),
    "top entropy": ("algorithm=dapo", "algorithm/tokens=top_entropy"),
    "of micro-batches": ("algorithm=dapo", "algorithm.aggregate.scope=micro_batch"),
}
GROUPS = {
    "ragged": [(7, [(3, 1.0), (9, -0.5), (1, -0.5)]), (12, [(5, 0.7), (5, -0.7)]), (1, [(20, 1.0), (2, 0.2), (6, -1)])],
    "one row with a signal": [(6, [(4, 0.0), (7, 0.9), (3, 0.0)]), (9, [(5, 0.0), (2, 0.0)])],
    "no signal": [(6, [(4, 0.0), (7, 0.0)]), (9, [(5, 0.0), (2, 0.0)])],
    "a row without tokens": [(5, [(0, 1.0), (3, -1.0)])],
    "about one length": [(2, [(7, 1.0), (6, -0.5), (6, -0.5)]), (1, [(9, 0.5), (9, -0.5)])],
}


def fresh(kind: str = "llama", **options: Any) -> Any:
    """A little model of a type that transformers knows, with random weights."""
    sizes = ({} if kind == "gpt2" else SHAPE) | ENDS | OPTIONS.get(kind, {}) | options
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@cache
def model_of(name: str = "llama") -> Any:
    torch.manual_seed(0)
    made = fresh(name)
    for parameter in made.parameters():
        parameter.data *= 3.0  # far from uniform
    return made


def rows_of(groups: list[tuple[int, list[tuple[int, float]]]]) -> list[Row]:
    """A row for each (tokens, advantage) of groups with prompts of so many tokens."""
    noise = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 40, (n,), generator=noise).tolist()

    rows = []
    for group, (n_prompt, completions) in enumerate(groups):
        prompt = ids(n_prompt)
        rows += [Row(prompt, ids(n), [1] * n, advantage, group, [-3.0] * n) for n, advantage in completions]
    return rows


def updated(
    model, world, rows, overrides, packed=True, skips=True, at_head=True, layout: type[Packed] = Packed, **train: int
) -> SimpleNamespace:
    """The metrics of the second of two steps, the weights after it, and the gradients of all updates."""
    mine = copy.deepcopy(model)
    optim = AdamW(lr=0.02, max_grad_norm=0.0)  # plain gradient descent: AdamW would enlarge rounding errors
    descent = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    wrapped, optimizer = world.parallel.prepare(mine, torch.float32, lambda model: descent(model.parameters()))
    gradients: list[torch.Tensor] = []
    parameters = list(mine.parameters())
    optimizer.register_step_pre_hook(lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in parameters])))
    policy = Policy(mine, wrapped, torch.float32, world.parallel)
    policy.packed = layout
    algorithm = built(*overrides)
    reference = Reference(copy.deepcopy(model), policy) if algorithm.needs_reference else None
    if packed:
        assert pack(policy, reference)
    policy.at_head = at_head
    kind = Updater if skips else Everything
    up = kind(world, policy, reference, algorithm, optim, optimizer, Train(**train), Sampling(30), 10)
    first = [copy.copy(row) for row in rows_of(GROUPS["ragged"])]
    train_step(up, first, n_groups=3)
    metrics = train_step(up, [copy.copy(row) for row in rows], n_groups=1 + max(row.group for row in rows))
    weights = torch.cat([p.detach().flatten() for p in parameters])
    return SimpleNamespace(metrics=metrics, weights=weights, gradients=gradients)


class Everything(Updater):
    """An updater that computes rows without a gradient, too."""

    def is_computed(self, row: Row) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm", "groups"),
    table(
        [
            ("llama", "dapo", "ragged"),
            ("gpt2", "grpo", "ragged"),
            ("qwen2", "dapo", "one row with a signal"),
            ("llama", "dapo", "a row without tokens"),
            ("qwen2", "no kl", "ragged"),
            ("llama", "drgrpo", "about one length"),
            ("gpt2", "dgpo", "ragged"),
            ("llama", "bonus", "ragged"),
            ("qwen2", "top entropy", "about one length"),
            ("gpt2", "dapo", "no signal"),
            ("llama", "grpo", "no signal"),
        ],
        fast=4,
    ),
)
def test_savings_change_nothing(world, name: str, algorithm: str, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_TOKENS", 8)  # several blocks for a prompt, with and without masks
    rows, overrides, model = rows_of(GROUPS[groups]), ALGORITHMS[algorithm], model_of(name)
    windows = {"micro_batch_tokens": 22, "minibatches": 2}
    plain = updated(model, world, rows, overrides, packed=False, skips=False, at_head=False, **windows)
    skipped = 0
    for savings in ((True, False, False), (False, False, True), (False, True, False), (True, True, True)):
        one = updated(model, world, rows, overrides, *savings, **windows)
        torch.testing.assert_close(one.weights, plain.weights, rtol=0, atol=1e-5)
        assert_same_gradients(one, plain)
        assert one.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5, abs=1e-6)
        skipped = one.metrics["tokens/skipped"]
        left_out = {*EXTREMES, *(MEANS_OVER_COMPUTED if skipped else ())}
        for metric in plain.metrics.keys() - left_out:
            if not metric.startswith("tokens/"):
                assert one.metrics[metric] == pytest.approx(plain.metrics[metric], rel=1e-4, abs=1e-5), metric
    skips_zeros = algorithm in ("no kl", "dapo", "drgrpo", "dgpo")
    assert (skipped > 0) == any(not row.mask or (row.advantage == 0 and skips_zeros) for row in rows)


def assert_same_gradients(one: SimpleNamespace, other: SimpleNamespace) -> None:
    for found, expected in zip(one.gradients, other.gradients, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("layout", [Packed, FlexPacked])
def test_a_longer_row_makes_the_other_micro_batches_no_less_even(layout: type[Packed]) -> None:
    short = [Row([3], [5] * 19, [1] * 19, 1.0, group, [-3.0] * 19) for group in range(1000)]
    sizes = sorted(map(layout.size, layout.pack([*short, Row([3], [5] * 30000, [], 1.0, 1000, [])], 8192)))
    assert len(sizes) == 4
    assert sizes[-2] - sizes[0] <= 1024


@pytest.mark.parametrize(("name", "groups"), [("qwen2", "ragged"), ("gpt2", "a row without tokens")])
def test_the_gpu_attention_gives_the_same_update(world, name: str, groups: str, monkeypatch) -> None:
    """On a GPU keys are repeated for the heads that share them where there is a mask."""
    monkeypatch.setattr(attention, "MIN_TOKENS", 8)
    rows, model = rows_of(GROUPS[groups]), model_of(name)
    plain = updated(model, world, rows, ALGORITHMS["grpo"], packed=False, skips=False)
    monkeypatch.setattr(Packed, "build", partial(Packed.build, on_cpu=False))
    sdpa = Mock(side_effect=attention.gpu_sdpa)
    monkeypatch.setattr(attention, "gpu_sdpa", sdpa)
    assert_same_gradients(updated(model, world, rows, ALGORITHMS["grpo"]), plain)
    masks = [call.args[3] for call in sdpa.call_args_list]
    assert {None if mask is None else mask.dtype for mask in masks} == {None, torch.float32}


@pytest.mark.parametrize(("name", "groups"), [("llama", "ragged"), ("gpt2", "about one length")])
def test_flex_attention_gives_the_same_update(world, name: str, groups: str, monkeypatch) -> None:
    monkeypatch.setattr(flex_attention, "TILE", 16)
    rows, model = rows_of(GROUPS[groups]), model_of(name)
    plain = updated(model, world, rows, ALGORITHMS["grpo"], packed=False, skips=False)
    one = updated(model, world, rows, ALGORITHMS["grpo"], layout=FlexPacked)
    computed = [row for row in rows if row.advantage]
    assert one.metrics["tokens/padding"] == FlexPacked.size(computed) - Packed.distinct(computed)
    assert_same_gradients(one, plain)


@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_over_micro_batches_counts_every_row(world, masked: bool) -> None:
    """No row is skipped, because the mean depends on which rows share a micro-batch."""
    rows, overrides = rows_of(GROUPS["one row with a signal"]), ALGORITHMS["of micro-batches"]
    if masked:
        rows = [replace(row, mask=[0] * len(row.mask)) for row in rows]
    plain, one = (updated(model_of(), world, rows, overrides, skips=skips) for skips in (False, True))
    assert one.metrics == plain.metrics
    assert one.weights.equal(plain.weights)
    assert one.weights.isfinite().all()
    assert one.metrics["tokens/skipped"] == 0


@pytest.mark.parametrize("name", ["granite", "cohere", "gemma2"])
def test_a_model_that_scales_or_caps_its_logits_computes_all_logits(world, name: str) -> None:
    """In bfloat16, too: the check is exact, where log-probs would be too coarse to compare."""
    torch.manual_seed(0)
    coarse, plain, scaled = fresh(name).bfloat16(), fresh().bfloat16(), fresh(name)
    assert not find_head(Policy(coarse, coarse, torch.bfloat16, world.parallel), world)
    assert find_head(Policy(plain, plain, torch.bfloat16, world.parallel), world)
    policy = Policy(scaled, scaled, torch.float32, world.parallel)
    assert not find_head(policy, world)
    pack(policy, None, world)
    ids = [5, 6, 7, 8, 9, 10]
    row = Row(ids[:2], ids[2:], [1] * 4, 1.0, 0, [-3.0] * 4)
    batch = MicroBatch.build([row], torch.device("cpu"), policy.layout(Sampling(1)))
    assert policy.scores(batch, Sampling(1))[0][0].tolist() == pytest.approx(policy.score(ids)[1:], abs=1e-5)


def over_all_rows(query, key, value, segments, call):
    """A wrong attention, in which tokens attend to earlier rows."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()


def nothing(query, key, value, segments, call):
    return torch.zeros_like(query).transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(over_all_rows, torch.bfloat16), (nothing, torch.float32)]
)  # in bfloat16, zero attention differs by less than rounding in an untrained model
def test_a_wrong_attention_is_detected_in_an_untrained_model(
    world, monkeypatch: pytest.MonkeyPatch, wrong: Any, dtype: torch.dtype
) -> None:
    """Its log-probs are nearly the same for any attention."""
    model = fresh().to(dtype)
    policy = Policy(model, model, dtype, world.parallel)
    assert pack(policy, None, world)
    monkeypatch.setattr(attention, "_attend", wrong)
    assert not pack(policy, None, world)
    assert model.config._attn_implementation == "sdpa"


def test_token_metrics_are_means_over_computed_tokens(world) -> None:
    """An update without such tokens does not lower the mean; a step without any has no such metric."""
    rows, model = rows_of(GROUPS["one row with a signal"]), model_of()
    half = updated(model, world, rows, ALGORITHMS["dapo"], minibatches=2)
    whole = updated(model, world, [r for r in rows if r.group == 0], ALGORITHMS["dapo"])
    assert half.metrics["entropy"] == pytest.approx(whole.metrics["entropy"], rel=0.2)  # the first step differs
    none = updated(model, world, rows_of(GROUPS["no signal"]), ALGORITHMS["dapo"])
    assert not none.metrics.keys() & set(MEANS_OVER_COMPUTED)
    assert none.metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("at_head", [True, False])
def test_gradients_repeat_to_the_bit(at_head: bool, request: pytest.FixtureRequest) -> None:
    """This includes a token that predicts many others, whose gradients threads could sum in any order."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    torch.manual_seed(0)
    large = fresh(hidden_size=96, intermediate_size=192)
    policy = Policy(large, large, torch.float32)
    assert pack(policy, None)
    policy.at_head = at_head
    rows = [Row([3, 4, 5], [6, 7, k % 30], [1] * 3, 1.0, 0, [-3.0] * 3) for k in range(320)]
    found = []
    for _ in range(8):
        batch = MicroBatch.build(rows, torch.device("cpu"), Packed)
        logp = policy.scores(batch, Sampling(3))[0]
        weights = torch.linspace(-1, 1, logp.numel()).view(logp.shape)
        gradients = torch.autograd.grad((logp * weights * batch.mask).sum(), list(large.parameters()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert all(one.equal(found[0]) for one in found)


@pytest.mark.parametrize("sampling", [Sampling(1, 0.7), Sampling(1, 0.0), Sampling(1, top_p=0.9, top_k=20)])
def test_log_probs_at_the_head_equal_those_of_logits(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, numbers in (("LOGITS_AT_ONCE", 40 * 5), ("IN_CACHE", 16 * 5), ("COLUMNS", 16)):  # with remainders
        monkeypatch.setattr(logprobs, name, numbers)
    hidden, model = torch.randn(23, 32, requires_grad=True), model_of()
    weight = model.get_output_embeddings().weight
    ids = torch.randint(0, 40, (23,), generator=torch.Generator().manual_seed(3))
    found = []
    with logprobs.scoring(model.get_output_embeddings(), logprobs.Targets(ids, None, sampling)):
        found.append(model.get_output_embeddings()(hidden).unbind(-1))
    found.append(logprobs.of_logits(hidden @ weight.T, logprobs.Targets(ids, None, sampling)))
    gradients = [torch.autograd.grad((logp * torch.arange(23.0)).sum(), (hidden, weight)) for logp, *_ in found]
    for one, other in [*zip(*found, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation has created."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize(("sampling", "packed"), [(Sampling(1), True), (Sampling(1, top_p=0.9), False)])
def test_logits_of_all_tokens_are_never_in_memory(monkeypatch, packed: bool, sampling: Sampling) -> None:
    """This holds for the forward and the backward; only the gradient of the head is as large as its weight."""
    vocabulary, tokens = 5000, 200
    for name, numbers in (("LOGITS_AT_ONCE", 10 * vocabulary), ("COLUMNS", vocabulary // 25)):
        monkeypatch.setattr(logprobs, name, numbers)
    wide = fresh(vocab_size=vocabulary)
    policy = Policy(wide, wide, torch.float32)
    assert pack(policy, None)
    row = Row([3, 4], [5] * tokens, [1] * tokens, 1.0, 0, [-3.0] * tokens)
    batch = MicroBatch.build([row], torch.device("cpu"), *([Packed] if packed else []))
    with Largest() as largest:
        policy.scores(batch, sampling)[0].sum().backward()
    assert largest.numbers == vocabulary * SHAPE["hidden_size"] < vocabulary * tokens


def test_only_a_sliding_window_longer_than_every_row_is_packed() -> None:
    """Packed attention has no sliding windows."""
    sliding = fresh("qwen2", use_sliding_window=True, sliding_window=80, max_window_layers=0)
    policy = Policy(sliding, sliding, torch.float32)
    assert not pack(policy, None, longest=81)
    assert policy.layout(Sampling(1)) is Padded
    assert sliding.config._attn_implementation == "sdpa"
    rows = rows_of(GROUPS["ragged"])
    found = []
    for packed in (False, True):
        assert not packed or pack(policy, None, longest=80)
        batch = MicroBatch.build(rows, torch.device("cpu"), policy.layout(Sampling(1)))
        found.append(policy.scores(batch, Sampling(1))[0][batch.mask.bool()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sliding", "lengths"), [(False, (5, 5)), (True, (5, 3))])
def test_padded_rows_have_the_masks_that_transformers_makes(
    sliding: bool, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, though transformers is not left to ask whether the mask hides a token."""
    plain = fresh("qwen2", use_sliding_window=sliding, sliding_window=4, max_window_layers=0)
    rows = [Row([3, 4, 5], [6] * n, [1] * n, 1.0, k, [-3.0] * n) for k, n in enumerate(lengths)]
    found = []
    for block in (attention.masks_without_waiting, lambda _: nullcontext()):
        monkeypatch.setattr(packing, "masks_without_waiting", block)
        found.append(packing.Padded.build(rows, torch.device("cpu")).forward(plain))
    assert torch.equal(*found)


def flex_attention_as_on_a_gpu(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its unfused form, which has a backward pass on a CPU."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_kernel", lambda: kernel)
    monkeypatch.setattr(Packed, "build", classmethod(partial(Packed.build.__func__, on_cpu=False)))  # type: ignore[attr-defined]


def run_with_flex(attention: str | None) -> Any:
    return SimpleNamespace(
        train=SimpleNamespace(packed=True),
        rollout=SimpleNamespace(longest_row=64, sampling=Sampling(30)),
        algorithm=SimpleNamespace(supervised=False),
        model=SimpleNamespace(attention=attention, compile=False, lora=SimpleNamespace(rank=0)),
    )


def transposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    return torchs.flex_attention(query, key, value, **how).flip(2)


def with_other_gradients(query: Any, key: Any, value: Any, **how: Any) -> Any:
    return torchs.flex_attention(query, key.detach() * 0.5 + key * 0.5, value, **how)


@pytest.mark.parametrize("kernel", [torchs.flex_attention, with_other_gradients, transposed])
def test_attention_is_sdpas_where_the_default_kernel_is_wrong(world, kernel: Any, monkeypatch) -> None:
    """As on a GPU; in an untrained model, whose log-probs hardly depend on attention."""
    flex_attention_as_on_a_gpu(kernel, monkeypatch)
    policy = Policy(model := fresh(), model, torch.bfloat16, world.parallel)
    policy.packed = FlexPacked
    notes = list(choose_layout(run_with_flex(attention=None), world, policy, None))
    assert policy.packs
    assert policy.layout(Sampling(1)) is (Packed if notes else FlexPacked)
    assert len(notes) == (kernel is not torchs.flex_attention)
    if notes:
        with pytest.raises(ConfigError) as caught:
            list(choose_layout(run_with_flex("flex_attention"), world, policy, None))
        assert caught.value.key == "model.attention"


def test_filler_fits_any_model(world) -> None:
    """This includes a model with fewer positions than filler tokens."""
    short = fresh("gpt2", n_positions=24)
    policy = Policy(short, short, torch.float32, world.parallel)
    policy.packs = attention.enable(short, 24)
    rows = [Row([3 + k % 30, 4], [5] * 17, [1] * 17, 1.0, k, [-3.0] * 17) for k in range(54)]
    layout = Packed.build(rows, torch.device("cpu"))
    assert layout.input_ids.shape[1] - 54 * 19 > 24
    batch = MicroBatch.build(rows, torch.device("cpu"), Packed)
    assert policy.scores(batch, Sampling(17))[0].isfinite().all()


def test_a_gpu_without_a_c_compiler_scores_with_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> None:
        raise CalledProcessError(1, "gcc")

    monkeypatch.setattr(logprobs, "_kernel_scores", compiled)
    monkeypatch.setattr(logprobs, "_has_kernels", logprobs._has_kernels.__wrapped__)
    with torch.device("meta"):
        head, hidden, ids = torch.nn.Linear(4, 9, bias=False), torch.zeros(1, 3, 4), torch.zeros(3, dtype=torch.long)
    with logprobs.scoring(head, logprobs.Targets(ids, None, Sampling(1))):
        assert head(hidden).shape == (1, 3, 3)
