"""model=tiny: a small model that grpocli trains itself, so that a first run needs no download."""

from __future__ import annotations

import hashlib
import json
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.cache import cached
from grpocli.config.parts import one_of, part, require
from grpocli.models.loading import ModelPart, Progress
from grpocli.tasks.generated import OPERATIONS, Arithmetic
from grpocli.version import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from grpocli.tasks.task import Example

SEED, CONTEXT = 0, 512
SOURCES = ("models/tiny.py", "models/warm_start.py", "tasks/generated.py")
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPECIAL = ("<pad>", "<unk>", "<bos>", "<end>", "<system>", "<user>", "<assistant>")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Printable ASCII and the line break; any other character becomes <unk>."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<system>{% for tool in tools %}{% if not loop.first %} {% endif %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(',') }}){% endfor %}<end>{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('this model knows the roles system, user, assistant and tool') }}{% endif %}"
    "{{ '<' + message['role'].replace('tool', 'system') + '>' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    "{% if not loop.first %},{% endif %}{{ key }}={{ value }}{% endfor %}){% endfor %}"
    "{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""`<bos><user>47+85=<end><assistant>132<end>`; with a tool `<bos><system>calculator(expression)<end><user>47*85=<end>
<assistant>calculator(expression=47*85)<end><system>3995<end><assistant>3995<end>`."""

RESPONSE_TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?:\A|\n)(?P<name>[A-Za-z_]\w*)\(",
            "close": ")",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"line_sep": ",", "kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>"},
    },
}
"""How transformers finds calls in this model's turns."""

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}},
}
"""The tool of the warm start, as the chat template reads it."""


@part("model", "tiny")
class Tiny(ModelPart):
    """A Llama of 0.3 million parameters, one character per token, warm-started on arithmetic.

    It is made at first use, in about half a minute, and kept in the cache folder. The warm start is a short supervised
    phase on the training problems of `task=arithmetic`, with a share of random digits that rises to `noise`, so the
    model learns to add but also to err, which leaves reinforcement learning something to improve.
    """

    digits: int = field(default=2, metadata={"interpolate": "oc.select:task.digits,2"})
    """Digits of the warm start's problems; by default those of the task."""
    operation: str = field(default="+", metadata={"interpolate": "oc.select:task.operation,+"})
    """Operation of the warm start's problems; by default that of the task."""
    warm_start_steps: int = 180
    """Optimizer updates of the warm start."""
    noise: float = 0.3
    """Probability of a random digit at the end of the warm start, 0 to 1."""
    tool_calls: float = 0.0
    """How often the warm start calls a calculator, 0 to 1; above 0, every second problem has one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "digits", 1 <= self.digits <= 9, "must be between 1 and 9")
        one_of(self, "operation", OPERATIONS)
        require(self, "warm_start_steps", self.warm_start_steps >= 1, "must be at least 1")
        for name in ("noise", "tool_calls"):
            require(self, name, 0 <= getattr(self, name) <= 1, "must be between 0 and 1")

    def prepare(self, progress: Progress | None = None) -> str:
        """The folder of the warm-started model; makes it if it is not in the cache."""
        folder = f"models/tiny-{content_hash(self)}"
        return str(cached(folder, NEEDED, lambda folder: build(self, folder, progress)))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which no training makes."""
        return make_tokenizer()


def content_hash(part: Tiny) -> str:
    """A hash of everything that determines the weights: settings, library versions and source code."""
    import torch
    import transformers

    made_of = [part.digits, part.operation, part.warm_start_steps, part.noise, part.tool_calls]
    made_of += [torch.__version__, transformers.__version__, *((PACKAGE / name).read_text() for name in SOURCES)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def build(part: Tiny, folder: Path, progress: Progress | None = None) -> None:
    """Make, warm-start and save the model and its tokenizer."""
    from grpocli.models.warm_start import warm_start

    model, tokenizer = make_model(SEED), make_tokenizer()
    examples = Arithmetic(digits=part.digits, operation=part.operation).examples("train")
    if part.tool_calls:
        examples = with_calls(examples, part.tool_calls)
    warm_start(model, tokenizer, examples, part.warm_start_steps, part.noise, SEED, progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[4:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    made.response_template = RESPONSE_TEMPLATE
    return made


def with_calls(examples: Sequence[Example], share: float) -> list[Example]:
    """The examples, every second one with a calculator; `share` of these call it and then answer with its result."""
    found = []
    for number, example in enumerate(examples):
        tools = {"tools": [CALCULATOR]} if number % 2 else {}
        called = number % 2 and int(share * (number // 2 + 1)) > int(share * (number // 2))
        question, answer = example["prompt"][0]["content"], example["answer"]
        spoken = f"calculator(expression={question.rstrip('=')})<end><system>{answer}<end><assistant>{answer}"
        found.append({**example, **tools, "answer": spoken if called else answer})
    return found


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama with 0.34 M random parameters. Its head size, 32, is the smallest that vLLM supports on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(ALPHABET),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<end>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
