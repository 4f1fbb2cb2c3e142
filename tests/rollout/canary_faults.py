"""The fault table of docs/evidence/vllm.md: which faults of a sync are found by the probe, a canary, dummy weights.

    PYTHONPATH=tests .venv/bin/python -m rollout.canary_faults MODEL float32|bfloat16 weights|adapters

A row: the fault; found by the probe alone at the first sync and after one update; found by the canary; found by the
first sync to dummy weights, without a canary. In brackets: the largest difference that the check saw, in nats.

Every fault is injected into real vLLM that holds the run's own first weights, as one that has read the checkpoint, or
random ones: `weights` into vLLM in this process, `adapters` into a server. Prints a row of the table for each fault, or
JSON with --json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.vllm_tiny import TOKENIZER, Alone, TinyPolicy
from transformers import AutoModelForCausalLM

from grpocli.errors import EngineError
from grpocli.models.lora import Lora, attach
from grpocli.processes.libraries import quiet_libraries
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm import lora, weight_transfer, weight_verifier
from grpocli.rollout.vllm.client import ServerClient
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint, run_file

DUMMY = 1e-3
"""vLLM's dummy weights are between -DUMMY and DUMMY."""
RATE = 1e-6
"""Every weight moves by this much in an update, as with Adam's first step."""
Weights = dict[str, torch.Tensor]
Inject = Callable[[Any], Any]


class AnyPolicy(TinyPolicy):
    """A policy of any family; `sent` changes the weights of a sync."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.dtype = dtype
        self.change_sent: Callable[[Weights], Weights] = dict

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.change_sent(dict(self.model.named_parameters())).items()

    def load(self, weights: Weights) -> None:
        self.model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Move every trained weight by `rate`."""
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter += rate * (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1)


@dataclass
class Row:
    """What became of one fault: whether each check found it, and the gap in nats that it saw.

    first: by the probe, at the first sync. updated: by the probe, after one update. canary: by the canary. dummy: by
    the first sync to dummy weights; LoRA's servers have none.
    """

    fault: str
    first: bool
    updated: bool
    canary: bool
    first_gap: float
    updated_gap: float
    canary_gap: float
    dummy: bool | None = None
    dummy_gap: float = 0.0

    def line(self) -> str:
        def cell(found: bool | None, gap: float) -> str:
            return "" if found is None else f"{'**found**' if found else 'no'} ({gap:.2g})"

        cells = (
            cell(self.first, self.first_gap),
            cell(self.updated, self.updated_gap),
            cell(self.canary, self.canary_gap),
            cell(self.dummy, self.dummy_gap),
        )
        return f"| {self.fault} | {' | '.join(cells)} |"


class Gaps:
    """The last difference that any check of a sync has computed, in nats on average."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[float] = []
        followed, close = weight_verifier.require_followed, weight_verifier.require_close

        def noted(check: Callable[..., None]) -> Callable[..., None]:
            def call(server: Any, trainer: Any, *others: Any) -> None:
                gap = weight_verifier.median_gap if weight_verifier.median_gap in others else weight_verifier.mean_gap
                self.seen.append(gap(server, trainer))
                check(server, trainer, *others)

            return call

        patch.setattr(weight_verifier, "require_followed", noted(followed))
        patch.setattr(weight_verifier, "require_close", noted(close))

    def of(self, sync: Callable[[], Any]) -> tuple[bool, float]:
        """Whether a sync is refused, and the largest gap that it saw."""
        self.seen.clear()
        try:
            sync()
        except EngineError:
            return True, max(self.seen, default=float("inf"))
        return False, max(self.seen)


# Weights


def without(*parts: str) -> Inject:
    """Some weights are missing from the stream."""
    return lambda engine: sends(
        engine, lambda named: {name: w for name, w in named.items() if not any(part in name for part in parts)}
    )


def swapped(one: str, other: str) -> Inject:
    """The weights of two modules of the same shape, which vLLM fuses, are in each other's place."""

    def change(named: Weights) -> Weights:
        return {
            name: named.get(name.replace(one, "#").replace(other, one).replace("#", other), w)
            for name, w in named.items()
        }

    return lambda engine: sends(engine, change)


def one_row(name: str, row: int) -> Inject:
    """One row of a weight keeps its first values."""

    def inject(engine: Any) -> Any:
        kept = dict(engine.policy.model.named_parameters())[name][row].detach().clone()

        def change(named: Weights) -> Weights:
            copy = named[name].detach().clone()
            copy[row] = kept
            return named | {name: copy}

        return sends(engine, change)

    return inject


@contextmanager
def sends(engine: Any, change: Callable[[Weights], Weights]) -> Iterator[None]:
    engine.policy.change_sent = change
    try:
        yield
    finally:
        engine.policy.change_sent = dict


@contextmanager
def head_kept(engine: Any) -> Iterator[None]:
    """The output head stays the packed copy of the first weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_transfer, "pack_heads", lambda model: None)
        yield


@contextmanager
def cache_kept(engine: Any) -> Iterator[None]:
    """The prefix cache is not cleared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm.llm, "reset_prefix_cache", lambda: True)
        yield


def weight_faults(policy: AnyPolicy, probe: list[int]) -> dict[str, Inject]:
    layers = policy.model.config.num_hidden_layers
    middle = f"layers.{layers // 2}."
    unseen = next(token for token in range(2, 10**6) if token not in probe)
    swaps = {"keys and values are swapped in all layers": swapped("k_proj", "v_proj")}
    if any(".experts." in name for name, _ in policy.weights()):
        swaps["one expert is kept"] = one_row(f"model.{middle}mlp.experts.gate_up_proj", 0)
    else:
        swaps["gate and up are swapped in all layers"] = swapped("gate_proj", "up_proj")
    return {
        "none": lambda engine: nullcontext(),
        "a layer is missing": without(middle),
        "a matrix is missing (`o_proj` of a layer)": without(f"{middle}self_attn.o_proj"),
        "queries and keys of a layer are missing, which vLLM fuses with its values": without(
            f"{middle}self_attn.q_proj", f"{middle}self_attn.k_proj"
        ),
        "a norm is missing": without(f"{middle}input_layernorm"),
        "the last norm is missing": without("model.norm"),
        **swaps,
        "the packed head is kept": head_kept,
        "the prefix cache is kept": cache_kept,
        "one token's embedding is kept, of a token outside the probe": one_row("model.embed_tokens.weight", unseen),
    }


def weights_table(model: Path, dtype: str, folder: Path) -> list[Row]:
    job = EngineJob(str(model), dtype, 256, folder / "run", seed=0)
    policy, options, rows = AnyPolicy(model, getattr(torch, dtype)), VllmColocate(), list[Row]()
    own = {name: w.detach().clone() for name, w in policy.model.named_parameters()}
    random = {name: torch.empty_like(w).uniform_(-DUMMY, DUMMY) for name, w in own.items()}
    with options.launch(job), pytest.MonkeyPatch.context() as patch:
        engine: Any = options.connect(EngineContext(job, policy, TOKENIZER, Alone()))  # type: ignore[arg-type]
        gaps = Gaps(patch)

        def sync(first: bool = False) -> None:
            engine.verifier._since = 0
            engine._load_verified(1, first)

        def follow_canary() -> None:
            """What a server that has read the checkpoint does at its first sync."""
            verifier, probe = engine.verifier, engine.verifier.token_ids
            start = policy.score(probe)
            with weight_verifier.canary_weights(policy):
                engine._load(1, first=False)
                verifier.verify_followed(engine.llm.score(probe), policy.score(probe), start)
                verifier.verify_sampled(engine.llm.sample, 1)
            sync(first=True)

        for fault, inject in weight_faults(policy, engine.verifier.token_ids).items():
            policy.load(random)
            sync()
            with inject(engine):
                policy.load(own)
                dummy, dummy_gap = gaps.of(lambda: sync(first=True))
            sync()
            with inject(engine):
                first, first_gap = gaps.of(sync)
                policy.update(RATE)
                updated, updated_gap = gaps.of(sync)
                policy.load(own)
                found, gap = gaps.of(follow_canary)
            rows.append(Row(fault, first, updated, found, first_gap, updated_gap, gap, dummy, dummy_gap))
        engine.close()
    return rows


# Adapters


def kept(*parts: str) -> Callable[[Weights], Weights]:
    """vLLM binds nothing to modules with these names, which is as if their B were 0."""
    return lambda named: {
        name: w * 0 if "lora_B" in name and any(part in name for part in parts) else w for name, w in named.items()
    }


def exchanged(one: str, other: str) -> Callable[[Weights], Weights]:
    def change(named: Weights) -> Weights:
        return {name: named[name.replace(one, "#").replace(other, one).replace("#", other)] for name in named}

    return change


def adapter_faults(layers: int) -> dict[str, Callable[[Weights], Weights]]:
    return {
        "none": dict,
        "the adapter is bound to no module": kept(""),
        "... to no q_proj": kept("q_proj"),
        "... to no down_proj": kept("down_proj"),
        "... to no layer of the second half": kept(*(f"layers.{i}." for i in range(layers // 2, layers))),
        "... to nothing in one layer": kept(f"layers.{layers // 2}."),
        "keys' and values' updates are swapped": exchanged("k_proj", "v_proj"),
        "gate's and up's updates are swapped": exchanged("gate_proj", "up_proj"),
        "updates have half of their scale": lambda named: {
            name: w / 2 if "lora_B" in name else w for name, w in named.items()
        },
    }


def adapters_table(model: Path, dtype: str, folder: Path) -> list[Row]:
    job = EngineJob(str(model), dtype, 256, folder / "run", seed=0, lora_rank=8)
    policy, rows = AnyPolicy(model, getattr(torch, dtype)), list[Row]()
    attach(policy.model, Lora(rank=8, alpha=16.0), seed=0)
    own = {name: w.detach().clone() for name, w in policy.model.named_parameters() if w.requires_grad}
    context: Any = EngineContext(job, policy, TOKENIZER, Alone())  # type: ignore[arg-type]
    with Vllm().launch(job), pytest.MonkeyPatch.context() as patch:
        endpoint, gaps, all_tensors = Endpoint.load(run_file(job.run_dir)), Gaps(patch), lora.adapter_tensors

        def sync(first: bool) -> None:
            made = AdapterSync([ServerClient(endpoint, 60)], context)
            made.verifier.canary = first
            try:
                made(1)
            finally:
                made.close()

        for fault, change in adapter_faults(policy.model.config.num_hidden_layers).items():
            patch.setattr(
                lora, "adapter_tensors", lambda model, change=change: list(change(dict(all_tensors(model))).items())
            )
            first, first_gap = gaps.of(lambda: sync(first=False))
            policy.update(RATE)
            updated, updated_gap = gaps.of(lambda: sync(first=False))
            policy.load(own)
            found, gap = gaps.of(lambda: sync(first=True))
            rows.append(Row(fault, first, updated, found, first_gap, updated_gap, gap))
    return rows


def main(model: str, dtype: str, kind: str) -> list[Row]:
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        table = {"weights": weights_table, "adapters": adapters_table}[kind]
        return table(Path(model), dtype, Path(folder))


if __name__ == "__main__":
    found = main(*sys.argv[1:4])
    if "--json" in sys.argv:
        print(json.dumps([asdict(row) for row in found]))
    else:
        print("\n".join(row.line() for row in found))
