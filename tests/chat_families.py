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


@dataclass
class ChatFamily:
    """A family's template and tokens. ends: where a turn ends. configured: the end tokens of its generation config."""

    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    configured: tuple[str, ...] = ()
    bos: str | None = None
    added: tuple[str, ...] = ()
    template_ends: str | None = None

    def __post_init__(self) -> None:
        self.configured = self.configured or self.ends

    def tokenizer(self) -> Any:
        made = make_tokenizer()
        special = [*self.special, *self.ends, self.eos, *([self.bos] if self.bos else [])]
        made.add_special_tokens({"additional_special_tokens": special})
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        made.eos_token, made.bos_token, made.chat_template = self.eos, self.bos, self.template
        made.response_template = None  # that of the built-in model
        return made


THINK = ("<think>", "</think>")
BOTH, TEXT = ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"
IM = ("<|im_start|>",)
EOT = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
CALL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


def chatml(template: str, eos: str = "<|im_end|>", ends: tuple[str, ...] = BOTH, **more: Any) -> ChatFamily:
    return ChatFamily(template, (*IM, *BOTH), eos, ends, **{"template_ends": "<|im_end|>", **more})


CHAT_FAMILIES = {
    "qwen2.5": chatml(QWEN_2_5),
    "qwen3": chatml(QWEN_3, added=THINK),
    "qwen3-base": chatml(QWEN_3, TEXT, added=THINK, configured=(TEXT,)),
    "qwen3-2507": chatml(QWEN_3_2507),
    "qwen3.5": chatml(QWEN_3_5, added=THINK),
    "llama3.2": ChatFamily(LLAMA_3_2, HEADERS, "<|eot_id|>", EOT, bos="<|begin_of_text|>", template_ends="<|eot_id|>"),
    "gemma3": ChatFamily(
        *(GEMMA_3, ("<start_of_turn>",), "<eos>", ("<eos>", "<end_of_turn>")),
        bos="<bos>",
        template_ends="<end_of_turn>",
    ),
    "smollm3": chatml(SMOLLM_3, ends=("<|im_end|>",), added=THINK),
    "olmo2": ChatFamily(OLMO_2, (), TEXT, (TEXT,), bos=TEXT, template_ends=TEXT),
    "olmo3": chatml(OLMO_3, TEXT, template_ends=None),
    "mistral": ChatFamily(MISTRAL, ("[INST]", "[/INST]"), "</s>", ("</s>",), bos="<s>", template_ends="</s>"),
    "gpt-oss": ChatFamily(GPT_OSS, CALL, "<|return|>", ("<|return|>", "<|call|>")),
    "phi3": ChatFamily(PHI_3, ("<|user|>", "<|assistant|>"), TEXT, (TEXT, "<|end|>"), template_ends="<|end|>"),
}
