"""Tokenizers with chat templates built like those of the model families in docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from grpocli.models.tiny import make_tokenizer

CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN_2_5 = (  # a system turn of its own if there is none
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}" + CHATML_TURN + "{% endfor %}" + CHATML_PROMPT
)
FORGETS = (  # of earlier turns, thinking is dropped; after the last question it is written even if it is empty
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% set content = m.content %}"
    "{%- if m.role == 'assistant' %}{% set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{%- if loop.index0 > ns.last %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
NO_THOUGHT = "{{ '<think>\n\n</think>\n\n' }}"
QWEN_3 = (
    FORGETS + "{% if enable_thinking is defined and enable_thinking is false %}" + NO_THOUGHT + "{% endif %}{% endif %}"
)
QWEN_3_5 = (  # the thought is begun by the prompt
    FORGETS + "{% if enable_thinking is defined and enable_thinking is false %}" + NO_THOUGHT + "{% else %}"
    "{{ '<think>\n' }}{% endif %}{% endif %}"
)
QWEN_3_2507 = "{% for m in messages %}" + CHATML_TURN + "{% endfor %}" + CHATML_PROMPT
SMOLLM_3 = (  # writes the date; its system turn has no end
    "{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{%- set mode = '/think' if enable_thinking else '/no_think' %}"
    "{{ '<|im_start|>system\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + mode + '\n\n' }}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}"
    "{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)
LLAMA_3_2 = (  # writes the date unless it is given, and <|begin_of_text|>
    "{{- bos_token }}"
    "{%- if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA_3 = (  # roles must alternate; a system message becomes a part of the question
    "{{ bos_token }}{%- set first = '' %}{%- set rest = messages %}"
    "{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% endif %}"
    "{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
OLMO_2 = (  # roles are plain text, only the end of a turn is a token
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}"
)
OLMO_3 = (  # the last turn of the model ends with another token than earlier ones
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + CHATML_PROMPT
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
GPT_OSS = (  # channels: <|end|> ends a thought, <|return|> the last turn
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}"
    "\nReasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI_3 = (  # a conversation ends with a further token
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


@dataclass(frozen=True)
class ChatFamily:
    """A family's template and tokens. configured: the end tokens of its generation config. ends: where a turn ends."""

    template: str
    special: tuple[str, ...]
    eos: str
    configured: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None
    added: tuple[str, ...] = ()
    template_ends: str | None = None

    def tokenizer(self) -> Any:
        made = make_tokenizer()
        special = [*self.special, *self.ends, self.eos, *([self.bos] if self.bos else [])]
        made.add_special_tokens({"additional_special_tokens": special})
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        made.eos_token, made.bos_token, made.chat_template = self.eos, self.bos, self.template
        made.response_template = None  # that of the built-in model
        return made


THINK = ("<think>", "</think>")
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = {"special": IM, "eos": "<|im_end|>", "ends": ("<|im_end|>", "<|endoftext|>"), "template_ends": "<|im_end|>"}
BOTH = ("<|im_end|>", "<|endoftext|>")

CHAT_FAMILIES = {
    "qwen2.5": ChatFamily(QWEN_2_5, **CHATML, configured=BOTH),  # type: ignore[arg-type]
    "qwen3": ChatFamily(QWEN_3, **CHATML, configured=BOTH, added=THINK),  # type: ignore[arg-type]
    "qwen3-base": ChatFamily(
        QWEN_3, IM, "<|endoftext|>", ("<|endoftext|>",), BOTH, added=THINK, template_ends="<|im_end|>"
    ),
    "qwen3-2507": ChatFamily(QWEN_3_2507, **CHATML, configured=BOTH),  # type: ignore[arg-type]
    "qwen3.5": ChatFamily(QWEN_3_5, **CHATML, configured=BOTH, added=THINK),  # type: ignore[arg-type]
    "llama3.2": ChatFamily(
        LLAMA_3_2,
        ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eom_id|>", "<|end_of_text|>"),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        template_ends="<|eot_id|>",
    ),
    "gemma3": ChatFamily(
        GEMMA_3,
        ("<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        bos="<bos>",
        template_ends="<end_of_turn>",
    ),
    "smollm3": ChatFamily(
        SMOLLM_3, IM, "<|im_end|>", ("<|im_end|>",), ("<|im_end|>",), added=THINK, template_ends="<|im_end|>"
    ),
    "olmo2": ChatFamily(
        OLMO_2,
        ("<|endoftext|>",),
        "<|endoftext|>",
        ("<|endoftext|>",),
        ("<|endoftext|>",),
        bos="<|endoftext|>",
        template_ends="<|endoftext|>",
    ),
    "olmo3": ChatFamily(OLMO_3, IM, "<|endoftext|>", BOTH, BOTH),
    "mistral": ChatFamily(
        MISTRAL, ("[INST]", "[/INST]"), "</s>", ("</s>",), ("</s>",), bos="<s>", template_ends="</s>"
    ),
    "gpt-oss": ChatFamily(
        GPT_OSS,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|return|>",
        ("<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
    "phi3": ChatFamily(
        PHI_3,
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        ("<|endoftext|>", "<|end|>"),
        ("<|endoftext|>", "<|end|>"),
        template_ends="<|end|>",
    ),
}
