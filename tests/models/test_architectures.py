"""The table of architectures in docs/models.md, cell by cell.

The law is that a completion's log-probs do not depend on the completions beside it: packed rows must not reach each
other through attention, convolutions or recurrent states, nor padding the rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.running import metrics, run_here
from models.architectures import ARCHITECTURES, LAYERS, MARKS, PAGE, architecture, section
from safetensors.torch import load_file

from grpocli.distributed.world import World
from grpocli.errors import ConfigError
from grpocli.models.loading import HuggingFace, load_model
from grpocli.models.lora import Lora, attach, lora_layers, merged
from grpocli.rollout.vllm.server import caches_prefixes
from grpocli.rollout.vllm.weight_sync import PolicyWeights
from grpocli.training.packing import FlexPacked, MicroBatch, Padded
from grpocli.training.policy import Policy
from grpocli.training.trials import find_head, pack
from grpocli.types import Row, Sampling

KINDS = ("qwen3", "qwen3_moe", "qwen3_5_text", "gemma3_text", "lfm2")
"""An architecture of each kind: dense, mixture, recurrent, sliding window, convolutional."""
every_architecture = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            one.model_type,
            marks=[
                pytest.mark.skipif(not one.installed, reason=f"needs transformers {one.since}"),
                *([] if one.model_type in KINDS else [pytest.mark.survival]),
            ],
        )
        for one in ARCHITECTURES
    ],
)
LONGEST = 64


def rows() -> list[Row]:
    """Two completions of one prompt, and one of each of two others; some are longer than the sliding window."""
    noise = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(7, 100, (n,), generator=noise).tolist()

    made = []
    for group, (prompt, lengths) in enumerate([(5, (4, 30)), (17, (11,)), (9, (40,))]):
        prompt_ids = ids(prompt)
        made += [Row(prompt_ids, ids(n), [1] * n, 1.0, group, [0.0] * n) for n in lengths]
    return made


def chosen_policy(model: Any, world: World) -> Policy:
    """A policy with the layout of rows that a run chooses."""
    policy = Policy(model, model, torch.float32, world.parallel)
    find_head(policy, world)
    pack(policy, None, world, LONGEST)
    return policy


@every_architecture
def test_rows_do_not_depend_on_their_neighbours(name: str, world: World) -> None:
    policy, all_rows = chosen_policy(architecture(name).build(), world), rows()
    alone = [policy.score(row.prompt_ids + row.completion_ids)[len(row.prompt_ids) - 1 :] for row in all_rows]
    assert torch.cat([torch.tensor(logp) for logp in alone]).std() > 0.1
    for layout in {policy.layout(Sampling(1)), Padded, *([FlexPacked] if policy.packs else [])}:
        for beside in (all_rows, all_rows[::-1], all_rows[2:], all_rows[1:2]):
            batch = MicroBatch.build(beside, torch.device("cpu"), layout)
            found = policy.scores_without_gradient(batch, Sampling(1)).logp
            for row, logp in zip(beside, found, strict=True):
                expected = alone[all_rows.index(row)]
                assert logp[: len(expected)].tolist() == pytest.approx(expected, abs=5e-5), layout.__name__


@every_architecture
def test_rows_are_packed_where_the_table_says_so(name: str, world: World) -> None:
    one = architecture(name)
    assert chosen_policy(one.build(), world).packs == (one.rows == "packed")
    if one.has_window:
        wide = replace(one, config=one.config | {"sliding_window": 2 * LONGEST})
        assert chosen_policy(wide.build(), world).packs == (one.rows == "window")


def test_packed_rows_of_a_recurrent_layer_would_leak(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a run refuses them, also where a config does not list the kinds of layers."""
    from grpocli.models import shared_prompt_attention as attention

    monkeypatch.setattr(attention, "supports", lambda config, longest: True)
    for name in ("qwen3_5_text", "lfm2", "granitemoehybrid", "gemma3_text"):
        assert not chosen_policy(architecture(name).build(), world).packs, name


@every_architecture
def test_training_mode_computes_the_same(name: str, world: World) -> None:
    """Otherwise the trainer's log-probs would not be the sampler's."""
    policy = chosen_policy(architecture(name).build(), world)
    batch = MicroBatch.build(rows(), torch.device("cpu"), policy.layout(Sampling(1)))
    before = policy.scores_without_gradient(batch, Sampling(1)).logp
    policy.model.train()
    assert policy.scores(batch, Sampling(1)).logp.equal(before)


@every_architecture
def test_lora_updates_the_layers_of_the_table(name: str, world: World) -> None:
    plain = architecture(name).build()
    names = [parameter for parameter, _ in plain.named_parameters()]
    policy = chosen_policy(attach(architecture(name).build(), Lora(rank=4), seed=0), world)
    layers = dict(lora_layers(policy.model))
    assert {layer.rpartition(".")[2] for layer in layers} == set(architecture(name).lora)
    batch = MicroBatch.build(rows(), torch.device("cpu"), policy.layout(Sampling(1)))
    (policy.scores(batch, Sampling(1)).logp * batch.mask).sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.model.parameters() if p.requires_grad and p.grad is not None)
    # in the model's last layer Gemma 3n's gates are 0 at random weights
    gradients = {n: layer.lora_B["default"].weight.grad for n, layer in layers.items()}
    without = {n.rpartition(".")[2] for n, found in gradients.items() if found is None or not found.abs().sum() > 0}
    assert without <= set(LAYERS["per_layer"] if name == "gemma3n_text" else ())
    assert [n for n, _ in merged(policy.model, policy.model.named_parameters())] == names


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "gate"]])
def test_lora_on_experts_is_refused(targets: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules.*names experts or routers .*leave them out"):
        attach(architecture("qwen3_moe").build(), Lora(rank=4, target_modules=targets), seed=0)


def test_a_cap_on_attention_is_kept(tmp_path: Path) -> None:
    """sdpa would leave Gemma 2's out; transformers 5.24 refuses it."""
    capped = replace(architecture("gemma2"), config=architecture("gemma2").config | {"attn_logit_softcapping": 0.5})
    part, ids = HuggingFace(path=str(capped.save(tmp_path))), torch.arange(7, 40)[None]
    model = load_model(part, str(tmp_path))
    found = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (found - model(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize(("name", "stacked"), [("qwen3_moe", True), ("mixtral", False), ("granitemoehybrid", False)])
def test_vllm_gets_weights_under_names_that_it_knows(name: str, stacked: bool, tmp_path: Path) -> None:
    """vLLM's loader takes a stack of experts, but not modules that transformers has renamed."""
    folder = architecture(name).save(tmp_path)
    model = load_model(HuggingFace(path=str(folder)), str(folder))
    weights = PolicyWeights(Policy(model, model, torch.float32), torch.float32)
    sent = dict(weights.stream())
    assert [tuple(one) for one in weights.shapes()] == [(one, tuple(tensor.shape)) for one, tensor in sent.items()]
    if stacked:
        assert sent.keys() == dict(model.named_parameters()).keys()
        return
    saved = load_file(folder / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(tensor.equal(saved[one]) for one, tensor in sent.items())


@pytest.mark.parametrize(
    ("name", "kept"), [("qwen3", True), ("gemma3_text", True), ("qwen3_next", False), ("lfm2", False)]
)
def test_vllm_on_a_cpu_keeps_no_prompts_of_recurrent_layers(name: str, kept: bool, tmp_path: Path) -> None:
    architecture(name).build_config().save_pretrained(tmp_path)
    assert caches_prefixes(str(tmp_path), cpu=True) == kept
    assert caches_prefixes(str(tmp_path), cpu=False)


RUN = (
    *("task=arithmetic", "reward=[format]", "reward.format.pattern='.*[02468]'"),
    *("train.steps=2", "eval.problems=0", "model.dtype=float32", "rollout.prompts_per_step=2", "rollout.group_size=4"),
    *("rollout.max_completion_tokens=12", "rollout.max_prompt_tokens=64"),
)


def assert_samples_are_the_trainers(name: str, folder: Path, *overrides: str) -> None:
    """In a run of two steps: the second one samples with changed weights."""
    path, run = architecture(name).save(folder / "model"), folder / "run"
    given = ("model=hf", f"model.path={path}", "optim.lr=0.001", f"hydra.run.dir={run}", *overrides)
    assert run_here("train", *RUN, *given) == 0
    errors = [step["token_mult_prob_error"] for step in metrics(run)]
    assert len(errors) == 2
    assert max(errors) < 1.001


@pytest.mark.survival
@every_architecture
def test_two_steps_with_transformers(name: str, tmp_path: Path) -> None:
    lora = ["model.lora.rank=4"] if name in ("qwen3_moe", "lfm2") else []
    assert_samples_are_the_trainers(name, tmp_path, "engine=transformers", *lora)


@pytest.mark.survival
@pytest.mark.vllm
@pytest.mark.parametrize("name", [one.model_type for one in ARCHITECTURES if one.vllm_tested])
def test_two_steps_with_vllm(name: str, tmp_path: Path) -> None:
    assert_samples_are_the_trainers(name, tmp_path, "engine=vllm")


def test_the_page_has_the_table() -> None:
    first, last = MARKS
    assert PAGE.read_text().split(first)[1].split(last)[0] == section()
    assert {one.rows for one in ARCHITECTURES if one.has_window} <= {"window", "padded"}
