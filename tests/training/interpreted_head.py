"""The kernels of a GPU's output head, run on a CPU by Triton's interpreter, beside float64.

`test_head_kernels.py` runs these tests in a process of their own, whose triton is imported with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from grpocli.models import head
from grpocli.models.head import Float32Head
from grpocli.training import logprobs
from grpocli.types import Sampling

ROWS, HIDDEN, VOCABULARY = 7, 24, 4100  # neither a block of 4,096 nor one of 2,048 divides the vocabulary


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that torch has for GPUs only are computed in float64."""
    monkeypatch.setattr(head, "mm_into_float32", lambda a, b: (a.double() @ b.double()).float())

    def add(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor, beta: int) -> None:
        sum_NM.copy_(a_NK.double() @ b_KM.double() + (sum_NM.double() if beta else 0.0))

    monkeypatch.setattr(logprobs, "add_product_", add)


def exact(logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """Log-probs, entropies, whether the ids are the most probable ones, and normalizers."""
    logits_NV = logits_NV.double() / temperature
    normalizer_N = logits_NV.logsumexp(-1)
    chosen_N = logits_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)
    entropy_N = torch.special.entr(logits_NV.softmax(-1)).sum(-1)
    return [chosen_N - normalizer_N, entropy_N, (chosen_N >= logits_NV.amax(-1)).double(), normalizer_N]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 4096, VOCABULARY, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_logits(temperature: float, vocabulary: int, dtype: torch.dtype) -> None:
    """Logits are read in their dtype and summed in float32. The chosen token is at either end, or the top."""
    torch.manual_seed(0)
    logits_NV = (5 * torch.randn(ROWS, vocabulary)).to(dtype)
    ids_N = torch.randint(0, vocabulary, (ROWS,))
    ids_N[0], ids_N[1], ids_N[2] = 0, vocabulary - 1, logits_NV[2].argmax()
    logits_NV[3, vocabulary // 2 :] = -torch.inf if vocabulary > 1 else 0.0  # a block of it, too
    ids_N[3] = 0
    logits_NV[4, [0, -1]] = 40.0  # a tie
    ids_N[4] = vocabulary - 1
    found = logprobs._kernel_scores(logits_NV, ids_N, temperature)
    torch.testing.assert_close(found.double(), torch.stack(exact(logits_NV, ids_N, temperature)), rtol=1e-5, atol=1e-5)
    assert found[2, 2] == found[2, 4] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_head_equals_float64(pieces: bool, temperature: float, wide: bool, dtype: torch.dtype, monkeypatch) -> None:
    """Hidden states and weights of a dtype; gradients of both, in one piece or in pieces with remainders."""
    if pieces:
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", ROWS * 100)
    torch.manual_seed(1)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    if wide:
        layer.__class__ = Float32Head
    hidden_NH = (4 * torch.randn(ROWS, HIDDEN)).to(dtype).requires_grad_()
    with torch.no_grad():
        layer.weight.mul_(5)
    ids_N = torch.randint(0, VOCABULARY, (ROWS,))
    advantages_N = torch.randn(ROWS)
    targets = logprobs.Targets(ids_N, None, Sampling(1, temperature), on_cpu=False)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32), logprobs.scoring(layer, targets):
        found = layer(hidden_NH)
    (found[..., 0] * advantages_N).sum().backward()

    own_NH, own_VH = (t.detach().to(dtype).double().requires_grad_() for t in (hidden_NH, layer.weight))
    logits_NV = own_NH @ own_VH.T
    rounds = dtype != torch.float32 and not wide
    if rounds:  # as the product writes them
        logits_NV = logits_NV + (logits_NV.to(dtype).double() - logits_NV).detach()
    expected = exact(logits_NV, ids_N, temperature)
    (expected[0] * advantages_N).sum().backward()
    torch.testing.assert_close(found.double(), torch.stack(expected[:3], -1), rtol=1e-5, atol=1e-4)
    assert hidden_NH.grad is not None and layer.weight.grad is not None and own_NH.grad is not None  # noqa: PT018
    for one, other in ((hidden_NH.grad, own_NH.grad), (layer.weight.grad, own_VH.grad)):
        error = (one.double() - other).norm() / other.norm()
        assert error < (2**-7 if rounds or one.dtype == dtype != torch.float32 else 2e-5)  # the interpreter truncates
