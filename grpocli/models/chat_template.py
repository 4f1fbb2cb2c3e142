"""What a model's chat template reads, and the token with which it ends a turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from grpocli.chat_clock import CLOCK
from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, config_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", CLOCK}
"""Names in a chat template that the user cannot set."""
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers that Jinja does not know."""
ANSWER = "grpocli-answer"
"""Stands in for a turn of the model."""


def arguments_of(part: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The arguments of the chat template beside the messages, from the keys of `model`.

    Raises ConfigError for an argument that the template does not read.
    """
    arguments = dict(getattr(part, "chat_template_arguments", {}))
    read = variables(tokenizer) if arguments else set()
    for name in sorted(arguments.keys() - read):
        known = f"it reads {', '.join(sorted(read))}{nearest(name, read)}" if read else "it reads none"
        problem = f"the chat template of the model reads no such variable; {known}"
        raise ConfigError(problem, key=f"model.chat_template_arguments.{name}", value=arguments[name])
    return arguments


def variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The names that the chat template reads and a user can set. Raises ConfigError if it is not valid Jinja."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # nothing is rendered
    template = tokenizer.chat_template or ""
    found: set[str] = set()
    with config_errors(TemplateSyntaxError, says="its chat template is not valid Jinja: {}", key="model"):
        for text in template.values() if isinstance(template, dict) else [template]:
            found |= meta.find_undeclared_variables(environment.parse(GENERATION.sub("", text)))
    return found - GIVEN - {*environment.globals, *tokenizer.special_tokens_map}


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template ends every turn of the model; None if it writes no such token.

    The last control token that follows a turn both at the end of a conversation and before a further message; gpt-oss
    has none.
    """
    if not tokenizer.chat_template:
        return None
    user, answer = {"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}
    chats = [[user, answer], [user, answer, user]]
    try:
        texts = [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
    except Exception:  # noqa: BLE001 - reported when a prompt is rendered
        return None
    controls = control_tokens(tokenizer)
    pattern = control_pattern(controls)
    last, earlier = (pattern.findall(text.partition(ANSWER)[2]) for text in texts)
    both = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
    return controls[both[-1]] if both else None


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokens with a meaning in conversations: special ones, and added ones that the chat template writes."""
    template = str(tokenizer.chat_template)
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content.strip() and token.content in template)
    }


def control_pattern(controls: Mapping[str, int]) -> re.Pattern[str]:
    """Matches the text of a control token."""
    texts = sorted(map(re.escape, filter(None, controls)), key=len, reverse=True)
    return re.compile("|".join(texts) or r"(?!)")
