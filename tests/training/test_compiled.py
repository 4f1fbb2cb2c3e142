"""model.compile: compiled layers give the same update, and are compiled once for micro-batches of any size."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models.architectures import architecture
from torch.nn.attention import flex_attention as torchs
from training.test_packing import GROUPS, flex_attention_as_on_a_gpu, fresh, rows_of

from grpocli.composition.compose import build_run, compose
from grpocli.distributed.world import World
from grpocli.models.loading import checkpoint_activations
from grpocli.models.lora import Lora, attach
from grpocli.training import trials
from grpocli.training.packing import FlexPacked, MicroBatch, Packed
from grpocli.training.policy import BaseReference, Policy, Reference
from grpocli.training.trials import LARGE, compile_layers, pack, takes_compiled
from grpocli.types import Row, Sampling


@pytest.fixture
def graphs() -> Iterator[Any]:
    """torch's counters of compilations, after forgetting earlier ones."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield counters["stats"]
    torch.compiler.reset()


def a_policy(kind: str) -> tuple[Policy, Reference]:
    torch.manual_seed(0)
    model = fresh()
    initial = copy.deepcopy(model)
    if "lora" in kind:
        model = attach(model, Lora(rank=4), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        checkpoint_activations(model)
    policy = Policy(model, model, torch.float32)
    reference = BaseReference(policy) if "lora" in kind else Reference(initial, policy)
    policy.packed = wanted = FlexPacked if "flex" in kind else Packed
    assert pack(policy, reference)
    assert policy.packed is wanted
    return policy, reference


def results(policy: Policy, reference: Reference, rows: list[Row]) -> list[torch.Tensor]:
    """Log-probs under the policy and the reference, and gradients."""
    batch = MicroBatch.build(rows, torch.device("cpu"), policy.layout(Sampling(1)))
    policy.model.train()
    logp_BT = policy.scores(batch, Sampling(1)).logp * batch.mask
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad((logp_BT * torch.linspace(-1, 1, logp_BT.shape[1])).sum(), trained)
    return [logp_BT.detach(), reference.logp(batch, Sampling(1)) * batch.mask, *gradients]


@pytest.mark.survival
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
@pytest.mark.parametrize(
    ("kind", "backend", "expected_graphs"),
    [  # a layer's, not each layer's; with and without gradients, and of the reference
        ("packed", "inductor", 4 * 3),
        ("packed, flex_attention", "aot_eager", 3),
        ("lora and checkpointing", "eager", None),
    ],
)
def test_compiled_layers_give_the_same_and_are_compiled_once(
    kind: str, backend: str, expected_graphs: int | None, world: World, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "COMPILE_OPTIONS", trials.COMPILE_OPTIONS | {"backend": backend})
    if "flex" in kind:
        flex_attention_as_on_a_gpu(torchs.flex_attention, monkeypatch)
    policy, reference = a_policy(kind)
    sizes = [rows_of(groups)[:n] for groups in (GROUPS["ragged"], GROUPS["about one length"]) for n in (2, 3, 5)]
    sizes.append([Row([3, 4, 5], [7] * n, [1] * n, 1.0, 0, [0.0] * n) for n in (100, 300, 40)])
    expected = [results(policy, reference, rows) for rows in sizes]
    sampled = policy.score([3, 4, 5, 6])
    compile_layers(policy, reference, world)
    after_trial = graphs["unique_graphs"]
    if expected_graphs:
        assert after_trial == expected_graphs
    for rows, one in zip(sizes, expected, strict=True):
        for found, wanted in zip(results(policy, reference, rows), one, strict=True):
            assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert graphs["unique_graphs"] == after_trial
    assert policy.score([3, 4, 5, 6]) == sampled, "sampling is not compiled"


def test_a_mixture_of_experts_is_not_compiled(world: World) -> None:
    policy = Policy(mixture := architecture("qwen3_moe").build(), mixture, torch.float32)
    assert "mixture of experts" in compile_layers(policy, None, world)


def test_a_model_that_torch_cannot_compile_stays_eager(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(trials, "COMPILE_OPTIONS", trials.COMPILE_OPTIONS | {"backend": broken})
    policy, reference = a_policy("packed")
    rows = rows_of(GROUPS["ragged"])
    expected = results(policy, reference, rows)
    assert "cannot compile" in compile_layers(policy, reference, world)
    assert not policy.compiles
    assert all(map(torch.equal, results(policy, reference, rows), expected))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("overrides", "processes", "flex", "parameters", "experts", "expected"),
    [
        ((), 2, True, LARGE, False, True),
        ((), 2, True, LARGE - 1, False, False),
        ((), 2, False, LARGE, False, False),
        ((), 2, True, LARGE, True, False),
        (("hardware.parallel=fsdp2",), 2, True, LARGE, False, False),
        (("model.compile=true",), 2, False, 1, False, True),
    ],
)
def test_large_whole_models_are_compiled_unless_the_config_says_otherwise(
    overrides: tuple[str, ...], processes: int, flex: bool, parameters: int, experts: bool, expected: bool
) -> None:
    run = build_run(compose(["hardware.device=cuda", *overrides]))
    assert takes_compiled(run, processes, flex, parameters, experts) is expected
