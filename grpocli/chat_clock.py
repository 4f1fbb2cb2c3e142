"""The clock of chat templates, which stands still, so that prompts and scores are the same on every day."""

from __future__ import annotations

from datetime import date
from typing import Any

DAY = "2025-07-01"
"""What chat templates take for today: a day after the dates up to which the models of the presets know the world."""
CLOCK = "strftime_now"
"""The function with which a chat template writes today's date."""
DIRECTIVES = ("-d", "-m", *"aAbBcdFHIjmMpSuwxXyY")
"""What follows % in its formats."""


def with_date(template: str, day: str) -> str:
    """A chat template whose clock stands at the day YEAR-MONTH-DAY: a macro, since transformers passes no functions."""
    today = date.fromisoformat(day)
    written = "".join(f"|replace({f'%{one}'!r}, {today.strftime(f'%{one}')!r})" for one in DIRECTIVES)
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{written} }}}}{{% endmacro %}}\n{template}"


def stop_clock(tokenizer: Any, day: str) -> None:
    """Have the day in the template that transformers chooses for each conversation: some models have one for tools."""
    if CLOCK in str(tokenizer.chat_template):
        chosen = tokenizer.get_chat_template
        tokenizer.get_chat_template = lambda *given, **named: with_date(chosen(*given, **named), day)
