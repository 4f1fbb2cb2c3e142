"""A tiny model that vLLM can serve, and an engine's view of the trainer, for tests with real vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpocli.rollout.sampling import first_occurrence, sampling_logits
from grpocli.types import Completion, Request, Sampling

VOCABULARY = 96
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11] * 40]


def requests(n: int = 4, seed: int = 0) -> list[Request]:
    return [Request(prompt, n, seed + i) for i, prompt in enumerate(PROMPTS)]


def build_model(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """A random Llama whose logits differ clearly, with a tokenizer of words w0 ... and the end token 1."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}  # of 32, vLLM's smallest on a CPU
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = LlamaConfig(**sizes, **heads, **tokens, tie_word_embeddings=tied, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(WordLevel(words, unk_token="w2"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="w2")
    tokenizer.save_pretrained(folder)
    return folder


class TinyPolicy:
    """A policy stand-in; `sent` replaces the weights of a sync."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.dtype = dtype
        self.sent: dict[str, torch.Tensor] | None = None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (self.sent or dict(self.model.named_parameters())).items()

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(token_ids)])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype != torch.float32):
            logp = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        return logp.gather(1, ids[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def change(self, seed: int, by: float = 0.1) -> None:
        """Change every parameter, as an optimizer would."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)


class Together:
    """A thread as a process: collective calls meet at a barrier."""

    device = torch.device("cpu")

    def __init__(self, rank: int, meeting: threading.Barrier, box: dict[int, Any]) -> None:
        self.rank, self.size, self.is_main = rank, meeting.parties, rank == 0
        self.meeting, self.box = meeting, box

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        self.box[self.rank] = list(items)
        self.meeting.wait(10)
        everyone = [item for rank in range(self.size) for item in self.box[rank]]
        self.meeting.wait(10)
        return everyone

    def broadcast_object(self, item: Any) -> Any:
        return self.gather_objects([item])[0]

    def barrier(self) -> None:
        self.meeting.wait(10)


class Alone(Together):
    """A world of one process."""

    def __init__(self) -> None:
        super().__init__(0, threading.Barrier(1), {})


def two_worlds() -> list[Together]:
    """The worlds of two processes, each for a thread."""
    meeting, box = threading.Barrier(2), dict[int, Any]()
    return [Together(rank, meeting, box) for rank in range(2)]


TOKENIZER: Any = SimpleNamespace(eos_token_id=1, chat_template=None)


@torch.no_grad()
def expected_logprobs(policy: TinyPolicy, prompt: list[int], token_ids: list[int], sampling: Sampling) -> list[float]:
    """The completion's log-probs by transformers, under the sampling distribution."""
    ids, n = torch.tensor([prompt + token_ids]), len(token_ids)
    logits_TV = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    seen_TV = first_occurrence(ids, torch.ones_like(ids), n, VOCABULARY) < torch.arange(n)[:, None]
    picked = torch.tensor(token_ids)
    logp_TV = sampling_logits(logits_TV, sampling, keep_N=picked, seen_NV=seen_TV).log_softmax(-1)
    return logp_TV.gather(1, picked[:, None])[:, 0].tolist()


def assert_right(policy: TinyPolicy, prompt: list[int], one: Completion, sampling: Sampling) -> None:
    """A completion's log-probs are those of transformers."""
    assert one.logprobs == pytest.approx(expected_logprobs(policy, prompt, one.token_ids, sampling), abs=1e-3)
