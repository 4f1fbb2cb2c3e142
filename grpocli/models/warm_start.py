"""The supervised phase of model=tiny, and Muon, its optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from grpocli.models.loading import Progress
from grpocli.tasks.prompts import tokenize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from grpocli.tasks.task import Example

BATCH = 256
MUON_LR, ADAMW_LR = 0.04, 0.005
WARM_UP = 0.05  # share of the steps
NOISE_UP = 0.7  # share of the steps over which noise rises; noise from the start would take half as many steps again
THREADS = 1  # so that the bytes do not depend on the number of cores; a second thread would save a third of the time
IGNORED = -100
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that drives singular values towards 1
ITERATIONS = 5


@dataclass(frozen=True, slots=True)
class WarmStartBatch:
    """Problems of one prompt length."""

    prompts_NP: Tensor
    answers_NT: Tensor
    """With an end token, padded with IGNORED."""
    heard_NT: Tensor
    """Tokens of a tool in the answers, which are not learned."""
    exact: bool
    """Whether the answers stay as they are."""
    share: float
    """Of all examples."""

    @property
    def n_learned(self) -> int:
        """Number of tokens that are learned."""
        return int(((self.answers_NT != IGNORED) & ~self.heard_NT).sum())

    @classmethod
    def of(cls, examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, share: float) -> WarmStartBatch:
        end: Any = tokenizer.eos_token_id
        tool, model = tokenizer.convert_tokens_to_ids(["<system>", "<assistant>"])
        answers = [[*ids, end] for ids in tokenizer([e["answer"] for e in examples]).input_ids]
        longest = max(map(len, answers))
        padded = [ids + [IGNORED] * (longest - len(ids)) for ids in answers]
        prompts = tokenize([e["prompt"] for e in examples], tokenizer, tools=examples[0].get("tools", ()))
        answers_NT = torch.tensor(padded)
        is_tool_NT, is_model_NT = answers_NT == tool, answers_NT == model
        heard_NT = is_tool_NT.cumsum(1) > is_model_NT.cumsum(1) - is_model_NT.int()
        return cls(torch.tensor(prompts), answers_NT, heard_NT, bool(is_tool_NT.any()), share)


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    steps: int,
    noise: float,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place on the answers of examples; a share of digits that rises to `noise` is random."""
    kinds = kinds_of(examples, tokenizer)
    n_learned = sum(kind.n_learned for kind in kinds)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    generator = torch.Generator().manual_seed(seed)
    optimizers = _optimizers(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    for step in range(steps):
        noise_now = noise * min(1.0, step / (NOISE_UP * steps))
        for kind in kinds:
            chosen = torch.randint(len(kind.prompts_NP), (round(BATCH * kind.share),), generator=generator)
            answers_BT = corrupt(kind.answers_NT[chosen], digits, 0 if kind.exact else noise_now, generator)
            loss = _loss(model, kind.prompts_NP[chosen], answers_BT, kind.heard_NT[chosen])
            (kind.n_learned / n_learned * loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lr in optimizers:
            rise = min(1.0, (step + 1) / (WARM_UP * steps))
            optimizer.param_groups[0]["lr"] = lr * (rise * (1 - step / steps))
            optimizer.step()
            optimizer.zero_grad()
        if progress:
            progress((step + 1) / steps, "warm start of the built-in model")
    torch.set_num_threads(threads)


def kinds_of(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> list[WarmStartBatch]:
    """The examples without tools, with tools, and with a call."""
    kinds: dict[tuple[bool, bool], list[Example]] = defaultdict(list)
    for example in examples:
        kinds["tools" in example, "<system>" in example["answer"]].append(example)
    return [WarmStartBatch.of(kind, tokenizer, len(kind) / len(examples)) for kind in kinds.values()]


def corrupt(answers_BT: Tensor, digits: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """The answers with each digit replaced by a random one with probability `noise`."""
    hit_BT = torch.rand(answers_BT.shape, generator=generator) < noise
    random_BT = digits[torch.randint(len(digits), answers_BT.shape, generator=generator)]
    return torch.where(hit_BT & torch.isin(answers_BT, digits), random_BT, answers_BT)


def _loss(model: LlamaForCausalLM, prompts_BP: Tensor, answers_BT: Tensor, heard_BT: Tensor) -> Tensor:
    """Cross-entropy of the model's tokens in the answers, in nats per token."""
    ids = torch.cat([prompts_BP, answers_BT.clamp(min=0)], 1)
    logits_BTV = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=answers_BT.shape[1]).logits
    targets_BT = answers_BT.masked_fill(heard_BT, IGNORED)
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)


def _optimizers(model: LlamaForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for embedding and norms, each with its peak learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    adamw = torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0)
    return [(Muon(matrices, MUON_LR), MUON_LR), (adamw, ADAMW_LR)]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): steps along the orthogonalised momentum; matrices of one shape are batched.

    It learns the warm start in a third of AdamW's steps, in float32 (README.md).
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the current gradients."""
        (group,) = self.param_groups
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            by_shape[matrix.shape].append(matrix)
        for matrices in by_shape.values():
            self._step(matrices, group["lr"], group["momentum"])

    def _step(self, matrices: list[Tensor], lr: float, momentum: float) -> None:
        gradients = torch.stack([m.grad for m in matrices if m.grad is not None])
        state = self.state[matrices[0]]
        average = state.setdefault("momentum", torch.zeros_like(gradients))
        average.lerp_(gradients, 1 - momentum)
        directions = orthogonalise(gradients.lerp(average, momentum))
        rows, columns = matrices[0].shape
        for matrix, direction in zip(matrices, directions, strict=True):
            matrix.add_(direction, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices with singular values of about 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result
