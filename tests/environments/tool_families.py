"""Tokenizers with chat templates for tools, built like those of three model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from grpocli.models.tiny import make_tokenizer

QWEN = (  # JSON between tags, results in a turn of the user; the tags are added tokens, but not special ones
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    'Call them as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # the turn is the JSON object, results are turns of a role, quoted as JSON
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (  # no JSON, and results continue the model's turn: written only after their calls
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endmacro %}'
    "<bos>{% if tools %}<|turn>system\n{% for t in tools %}<|tool>declaration:{{ t.function.name }}"
    "{{ '{' }}description:{{ value(t.function.description) }}}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role != 'tool' %}{% set ns.open = false %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name ~ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(v) }}{% endfor %}"
    "}<tool_call|>{% endfor %}"
    "{% if m.tool_calls %}{% for r in messages[loop.index:] %}{% if r.role == 'tool' %}{% set ns.open = true %}"
    "<|tool_response>response:{{ r.name ~ '{' }}value:{{ value(r.content) }}}<tool_response|>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if not ns.open %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A model family's template. calls: the text of calls as it writes them, each a name and JSON arguments."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    end: str
    call: str
    after_call: str
    separator: str = ""

    def tokenizer(self) -> Any:
        made = make_tokenizer()
        made.add_special_tokens({"additional_special_tokens": list(self.special)})
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        made.eos_token, made.chat_template = self.end, self.template
        made.response_template = None  # that of the built-in model
        return made

    def calls(self, *calls: tuple[str, str]) -> str:
        """The text of a turn with these calls, with its end."""
        return self.separator.join(self.call.format(name=n, arguments=a) for n, a in calls) + self.after_call


def call(name: str, **values: Any) -> dict[str, Any]:
    """A call in a message."""
    return {"type": "function", "function": {"name": name, "arguments": values}}


FAMILIES = {
    "qwen": Family(
        QWEN,
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "<|im_end|>",
        '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "<|im_end|>",
        "\n",
    ),
    "llama": Family(
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        (),
        "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}',
        "<|eot_id|>",
    ),
    "gemma": Family(
        GEMMA,
        ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", '<|"|>'),
        (),
        "<turn|>",
        "<|tool_call>call:{name}{arguments}<tool_call|>",
        "<|tool_response>",
    ),
}  # fmt: skip
