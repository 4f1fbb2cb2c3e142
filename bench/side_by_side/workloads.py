"""Workloads: models with random weights, prompts, and completions that are given or sampled.

Both trainers read this file in their own environments, so it needs transformers only.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FIRST_WORD = 3
"""Ids below this are special. A token's text is `t` and its id, so a prompt has the same tokens for both trainers."""
LAST_WORD = 400

LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 2048}
QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 32768}
MODELS = {
    "0.4M": LLAMA
    | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "smollm2-135m": LLAMA
    | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "wide head": LLAMA
    | {"vocab_size": 152000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "long rows": LLAMA
    | {"vocab_size": 32000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32768},
    "qwen2.5-0.5b": QWEN2
    | {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen2.5-1.5b": QWEN2
    | {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Workload:
    """A step of `groups` prompts of `prompt` tokens with `rows` completions each.

    longest: tokens of a completion: of every one, or of a few if `skewed` (log-normal lengths). constant: share of
    groups whose rewards are all equal. sampled: each trainer samples itself, up to `longest` tokens. engine:
    grpocli's engine. times: multiplies the number of steps if they are short. rate: learning rate. micro_batch:
    grpocli's train.micro_batch_tokens.
    """

    about: str
    model: str = "smollm2-135m"
    groups: int = 2
    rows: int = 8
    prompt: int = 12
    longest: int = 64
    skewed: bool = False
    constant: float = 0.0
    sampled: bool = False
    engine: str = "transformers"
    times: int = 1
    rate: float = 1e-5
    micro_batch: int = 8192

    def lengths(self, step: int) -> list[int]:
        """Lengths of the step's completions, group by group."""
        draw, n = random.Random(step), self.groups * self.rows
        if not self.skewed:
            return [self.longest] * n
        drawn = (int(draw.lognormvariate(0, 0.8) * self.longest / 6) for _ in range(n))
        return [max(1, min(self.longest, length)) for length in drawn]

    def needed(self, step: int) -> tuple[int, int]:
        """The number of distinct tokens with a gradient, prompts once; and those of completions among them."""
        flat = int(self.constant * self.groups)
        lengths = self.lengths(step)[flat * self.rows :]
        return (self.groups - flat) * self.prompt + sum(lengths), sum(lengths)

    def pairs(self, step: int) -> float:
        """The number of pairs of needed tokens of which one attends to the other."""
        flat = int(self.constant * self.groups)
        lengths = self.lengths(step)[flat * self.rows :]
        return (self.groups - flat) * self.prompt**2 / 2 + sum(n * self.prompt + n**2 / 2 for n in lengths)

    def flops(self, step: int) -> float:
        """FLOPs of matrix products with weights, forward and backward, for the needed tokens; without attention."""
        sizes: dict[str, Any] = MODELS[self.model]
        width, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
        attention = 2 * width * width * (1 + sizes["num_key_value_heads"] / heads)
        layers = sizes["num_hidden_layers"] * (attention + 3 * width * inner)
        tokens, completions = self.needed(step)
        return 6 * float(layers * tokens + sizes["vocab_size"] * width * completions)

    def prompts(self) -> list[str]:
        """One prompt for each group, identified by its first token. All steps have the same prompts."""
        draw = random.Random(0)
        return [
            words([FIRST_WORD + group, *(draw.randrange(FIRST_WORD, LAST_WORD) for _ in range(self.prompt - 1))])
            for group in range(self.groups)
        ]

    @cache  # noqa: B019 - a handful of workloads, and as many steps
    def completions(self, step: int) -> list[list[list[int]]]:
        """Token ids of the given completions of a step: [groups][rows]. The first token's parity is the reward."""
        draw, lengths = random.Random(step), iter(self.lengths(step))
        groups = []
        for group in range(self.groups):
            rows = [[draw.randrange(FIRST_WORD, LAST_WORD) for _ in range(next(lengths))] for _ in range(self.rows)]
            flat = group < self.constant * self.groups
            for k, ids in enumerate(rows):  # some right and some wrong, or all wrong
                ids[0] = FIRST_WORD + 1 + 2 * draw.randrange(50) + (not flat and k % 3 == 0)
            groups.append(rows)
        return groups


LONG: dict[str, Any] = {"model": "long rows", "groups": 1, "rows": 2, "micro_batch": 16384}
WORKLOADS = {
    "W1": Workload("0.4 M parameters, 8 x 8, 64 tokens, sampled by transformers", "0.4M", 8, 8, sampled=True, times=4),
    "W2": Workload("SmolLM2-135M, 2 x 8, prompts of 12, 64 new: update alone"),
    "W2v": Workload("the same, sampled; grpocli with engine=vllm: whole step", sampled=True, engine="vllm"),
    "W3": Workload("prompts of 512, 32 new: update alone", prompt=512, longest=32),
    "W4": Workload("skewed lengths up to 256: update alone", longest=256, skewed=True),
    "W5": Workload("half of the groups constant, no KL: update alone", constant=0.5),
    "W6": Workload("a vocabulary of 152,000, small layers, 256 new: update alone", model="wide head", longest=256),
    "W7": Workload(
        "10 M parameters, 1 x 2, prompts of 2,048, 4,096 new: update alone", **LONG, prompt=2048, longest=4096
    ),
}
LONG_ROWS = {
    f"{k} x long": Workload(
        f"1 x 2 rows of {512 * k:,} + {1024 * k:,} tokens", **LONG, prompt=512 * k, longest=1024 * k
    )
    for k in (1, 2, 4)
}
LINEAR = {
    **{f"{k} x rows": Workload(f"{2 * k} x 8 rows of 12 + 64 tokens", groups=2 * k) for k in (1, 2, 4)},
    **{f"{k} x length": Workload(f"2 x 8 rows of {12 * k} + {64 * k}", prompt=12 * k, longest=64 * k) for k in (2, 4)},
}
GPU = {
    f"{size}, {name}": Workload(about, f"qwen2.5-{size.lower()}", groups=8, micro_batch=16384, **sizes)
    for size in ("0.5B", "1.5B")
    for name, about, sizes in (
        ("even", "8 x 8, prompts of 128, 512 new", {"prompt": 128, "longest": 512}),
        ("prompts", "8 x 8, prompts of 1,024, 128 new", {"prompt": 1024, "longest": 128}),
        ("skewed", "8 x 8, prompts of 128, up to 2,048 new", {"prompt": 128, "longest": 2048, "skewed": True}),
        ("constant", "as even, half of the groups constant", {"prompt": 128, "longest": 512, "constant": 0.5}),
    )
}
WHOLE = {"whole run": Workload("8 x 8, 16 tokens", "0.4M", 8, 8, longest=16, sampled=True, times=50, rate=1e-3)}
SMOKE = {"smoke": Workload("2 x 4 rows of 12 + 8 tokens, for the tests of the benchmarks", "0.4M", rows=4, longest=8)}
SERVED = {
    f"{name}, vLLM": replace(work, longest=longest, sampled=True, engine="vllm")
    for name, work, longest in (("0.5B", GPU["0.5B, even"], 64), ("smoke", SMOKE["smoke"], 8))
}
"""For a transfer of 1 GB to a server, and the same for a CPU."""
ALL = WORKLOADS | LINEAR | LONG_ROWS | GPU | WHOLE | SMOKE | SERVED


def peak() -> float:
    """The peak memory of this process in GiB, on the GPU if there is one. getrusage would include the parent's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def own_tokenizer() -> None:
    """Load the tokenizer of `make_model`. transformers would load Qwen2's for any model named qwen2."""
    from transformers.models.auto import tokenization_auto

    getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set()).discard("qwen2")


def words(ids: list[int]) -> str:
    return " ".join(f"t{k}" for k in ids)


def reward(completions: list[str], **columns: object) -> list[float]:
    """1 if the first token is odd. TRL calls it like this."""
    return [float(int((text.split() or ["t0"])[0].removeprefix("t")) % 2) for text in completions]


def make_model(name: str, folder: Path) -> Path:
    """A folder with random weights and a tokenizer of one token a word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = dict(MODELS[name])
    config = AutoConfig.for_model(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    special = ["<pad>", "<bos>", "<end>"]
    texts = [*special, *(f"t{k}" for k in range(FIRST_WORD, config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({text: k for k, text in enumerate(texts)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<end>"
    ).save_pretrained(folder)
    return folder


def write_prompts(prompts: list[str], path: Path) -> None:
    """Write the prompts as grpocli reads them."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


class Multiplication:
    """W8: SmolLM2-135M learns few-shot one-digit products of docs/examples/multiplication.

    A run has arrived when the mean reward of `in_a_row` consecutive steps reaches `reward`; after `steps` it is given
    up.
    """

    reward, in_a_row, steps = 0.8, 5, 60
    groups, rows, longest, rate = 8, 8, 4, 5e-6

    @classmethod
    def arrived(cls, rewards: list[float]) -> int | None:
        """The number of the step at which a run with these rewards arrives; None if it does not."""
        n = cls.in_a_row
        return next((k for k in range(n, len(rewards) + 1) if sum(rewards[k - n : k]) >= n * cls.reward), None)
