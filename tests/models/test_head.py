"""model.head_dtype=float32: the literal product in float32, in every path to a log-prob, and nothing in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composed import refused
from little import ENDS, SHAPE
from torch.nn.functional import linear
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from grpocli.models import lora
from grpocli.models.head import Float32Head, parts_, product, widen_head
from grpocli.models.loading import HuggingFace, choose_head_dtype, load_model
from grpocli.models.lora import Lora
from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.training import logprobs
from grpocli.training.packing import MicroBatch, Packed, Padded
from grpocli.training.policy import BaseReference, Policy, Reference
from grpocli.training.trials import find_head, pack
from grpocli.types import Request, Row, Sampling

LONG = SHAPE | ENDS | {"max_position_embeddings": 1200}
ROWS = [
    Row([3, 4, 5], [6, 7, 8, 9], [1] * 4, 1.0, 0, [-3.0] * 4),
    Row([3, 4, 5], [10, 11], [1] * 2, 1.0, 0, [-3.0] * 2),
    Row([7, 8, 9, 10, 11], [12, 13, 14], [1] * 3, -1.0, 1, [-3.0] * 3),
]
BFLOAT16 = torch.bfloat16


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LONG, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def widened(model: Any) -> Any:
    return widen_head(copy.deepcopy(model))


def straight_through(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor rounded to bfloat16, in float32; its gradient is that of the unrounded one."""
    return tensor + (tensor.to(BFLOAT16).float() - tensor).detach()


def literal(model: Any, row: Row) -> torch.Tensor:
    """Log-probs of a row's completion: the body in bfloat16, then float32(h) float32(bfloat16(W))^T."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.autocast("cpu", dtype=BFLOAT16):
        hidden_LH = model.model(input_ids=ids).last_hidden_state[0]
    logits_LV = straight_through(hidden_LH) @ straight_through(model.lm_head.weight).T
    n = len(row.completion_ids)
    logp_LV = logits_LV[-n - 1 : -1].log_softmax(-1)
    return logp_LV.gather(1, ids[0, -n:, None]).squeeze(1)


def scored(policy: Policy, layout: type = Padded) -> torch.Tensor:
    batch = MicroBatch.build(ROWS, torch.device("cpu"), layout)
    return policy.scores(batch, Sampling(1))[0][batch.mask.bool()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [Padded, Packed])
def test_a_policy_has_the_literal_log_probs_and_gradients(tied: bool, layout: type) -> None:
    model = llama(tied)
    policy = Policy(widened(model), None, BFLOAT16)  # type: ignore[arg-type]
    policy.wrapped = policy.model
    if layout is Packed:
        assert pack(policy, None)
    found = scored(policy, layout)
    expected = torch.cat([literal(model, row) for row in ROWS])
    body = 0.0 if layout is Padded else 0.05  # packed attention rounds hidden states differently
    torch.testing.assert_close(found, expected, rtol=0, atol=body + 1e-5)
    found.sum().backward()
    expected.sum().backward()
    for (name, one), (_, other) in zip(policy.model.named_parameters(), model.named_parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 0.03 * other.grad.norm(), name  # the body's rounding
    if not tied and layout is Padded:
        torch.testing.assert_close(policy.model.lm_head.weight.grad, model.lm_head.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.7), Sampling(1, top_p=0.9)])
def test_pieces_of_the_head_are_exact(bias: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain heads are computed in pieces by `_Scores`, others by torch's autograd; with remainders."""
    for name, numbers in (("LOGITS_AT_ONCE", 40 * 5), ("IN_CACHE", 16 * 5), ("COLUMNS", 16)):
        monkeypatch.setattr(logprobs, name, numbers)
    torch.manual_seed(1)
    head: Any = torch.nn.Linear(32, 40, bias=bias)
    head.__class__ = Float32Head
    hidden_NH = torch.randn(23, 32, requires_grad=True)
    ids_N = torch.randint(0, 40, (23,))
    with torch.autocast("cpu", dtype=BFLOAT16), logprobs.scoring(head, logprobs.Targets(ids_N, None, sampling)):
        found = head(hidden_NH).unbind(-1)
    parameters = [straight_through(parameter) for parameter in head.parameters()]
    logits_NV = linear(straight_through(hidden_NH), *parameters)
    expected = logprobs.of_logits(logits_NV, logprobs.Targets(ids_N, None, sampling))
    inputs = (hidden_NH, *head.parameters())
    gradients = [torch.autograd.grad((logp * torch.arange(23.0)).sum(), inputs) for logp, *_ in (found, expected)]
    for one, other in [*zip(found, expected, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_products_are_in_float32_and_a_gpu_takes_a_gradient_in_two_parts() -> None:
    torch.manual_seed(2)
    wide_NV, weight_VH = torch.randn(7, 300), torch.randn(300, 5).to(BFLOAT16)
    for factor in (wide_NV.to(BFLOAT16), wide_NV):
        with torch.autocast("cpu", dtype=BFLOAT16):
            found = product(factor, weight_VH, on_cpu=True)
        torch.testing.assert_close(found, (factor.double() @ weight_VH.double()).float(), rtol=1e-5, atol=1e-5)
    high, low = parts_(wide_NV.clone(), BFLOAT16)
    assert high.dtype == low.dtype == BFLOAT16
    assert ((high.double() + low.double() - wide_NV).abs() <= 2.0**-16 * wide_NV.abs()).all()


def test_float32_is_the_same_to_the_bit() -> None:
    model = llama()
    plain, wide = Policy(model, model, torch.float32), widened(model)
    wide = Policy(wide, wide, torch.float32)
    found = [scored(plain), scored(wide)]
    assert found[0].equal(found[1])
    for logp in found:
        logp.sum().backward()
    pairs = zip(plain.model.parameters(), wide.model.parameters(), strict=True)
    assert all(one.grad.equal(other.grad) for one, other in pairs)
    request, sampling = [Request([3, 4, 5], 3, seed=0)], Sampling(8)
    drawn = [TransformersEngine(policy, [1], 8, None).generate(request, sampling) for policy in (plain, wide)]
    assert drawn[0] == drawn[1]


def test_sampling_agrees_with_training() -> None:
    model = widened(llama())
    policy = Policy(model, model, BFLOAT16)
    [completions] = TransformersEngine(policy, [1], 8, None).generate([Request([3, 4, 5], 4, seed=0)], Sampling(12))
    one = completions[0]
    row = Row([3, 4, 5], one.token_ids, [1] * len(one.token_ids), 1.0, 0, one.logprobs)
    torch.testing.assert_close(torch.tensor(one.logprobs), literal(model, row), rtol=0, atol=0.1)


def test_score_is_the_literal_one() -> None:
    model = llama()
    row = Row([3], [4, 5, 6, 7], [1] * 4, 1.0, 0, [0.0] * 4)
    wide = widened(model)
    found = torch.tensor(Policy(wide, wide, BFLOAT16).score([3, 4, 5, 6, 7]))
    torch.testing.assert_close(found, literal(model, row), rtol=0, atol=1e-5)
    narrow = torch.tensor(Policy(model, model, BFLOAT16).score([3, 4, 5, 6, 7]))
    assert not torch.allclose(narrow, found, rtol=0, atol=1e-3)


def test_a_model_that_caps_its_logits_caps_them_in_float32(world) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    config = Gemma2Config(**LONG, head_dim=8, final_logit_softcapping=5.0)
    model = widen_head(Gemma2ForCausalLM(config).eval())
    policy = Policy(model, model, BFLOAT16)
    assert not find_head(policy, world)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad(), policy.autocast():
        logits = model(input_ids=ids).logits
        hidden = model.model(input_ids=ids).last_hidden_state
    assert logits.dtype == torch.float32
    raw = hidden.to(BFLOAT16).float() @ model.lm_head.weight.to(BFLOAT16).float().T
    torch.testing.assert_close(logits, torch.tanh(raw / 5) * 5, rtol=0, atol=1e-5)
    assert scored(policy).isfinite().all()


@pytest.mark.parametrize("modules", ["all-linear", ["lm_head", "q_proj"]])
def test_lora_starts_as_the_base_model(modules: Any) -> None:
    """Also where the head itself has an update, whose base layer multiplies in float32."""
    model = widened(llama(tied=False))
    full = scored(Policy(model, model, BFLOAT16)).detach()
    adapted = lora.attach(copy.deepcopy(model), Lora(rank=4, target_modules=modules), seed=0)
    policy = Policy(adapted, adapted, BFLOAT16)
    tolerance = 0 if modules == "all-linear" else 1e-5  # torch's autograd sums logits in another order
    torch.testing.assert_close(scored(policy), full, rtol=0, atol=tolerance)
    batch = MicroBatch.build(ROWS, torch.device("cpu"))
    reference = BaseReference(policy).logp(batch, Sampling(1))[batch.mask.bool()]
    torch.testing.assert_close(reference, full, rtol=0, atol=tolerance)
    copied = Reference(copy.deepcopy(model), policy).logp(batch, Sampling(1))[batch.mask.bool()]
    assert copied.equal(full)


def test_loading_widens_the_head_and_keeps_one_tied_parameter(tmp_path) -> None:  # type: ignore[no-untyped-def]
    llama().save_pretrained(tmp_path)
    part = HuggingFace(path=str(tmp_path), head_dtype="float32", dtype="bfloat16")
    model = load_model(part, str(tmp_path))
    assert type(model.lm_head) is Float32Head
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in Policy(model, model, BFLOAT16).weights()]
    assert names == [name for name, _ in llama().named_parameters()]
    model.save_pretrained(tmp_path / "again")
    assert load_model(part, str(tmp_path / "again")).lm_head.weight.equal(model.lm_head.weight)
    for dtype, head_dtype in (("float32", "float32"), ("bfloat16", None)):
        plain = load_model(HuggingFace(path=str(tmp_path), head_dtype=head_dtype, dtype=dtype), str(tmp_path))
        assert type(plain.lm_head) is torch.nn.Linear


def test_the_head_of_a_dtype() -> None:
    part = HuggingFace(path="m", head_dtype="float32")
    assert [choose_head_dtype(part, dtype) for dtype in ("float32", "bfloat16")] == [None, "float32"]
    assert choose_head_dtype(HuggingFace(path="m", head_dtype=None), "bfloat16") is None
    model = llama()
    model.lm_head.__class__ = type("Other", (torch.nn.Linear,), {})
    for refuse in (lambda: widen_head(model), lambda: HuggingFace(path="m", head_dtype="float16")):
        with refused("model.head_dtype"):
            refuse()
