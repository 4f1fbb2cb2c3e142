"""Overrides: as Hydra reads and writes them, and rewritten from what users type into what Hydra accepts.

Rewriting changes no valid override and is idempotent. Escapes are the exception: only `from_command_line` decodes
them, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, Transformer
from hydra.errors import HydraException

from grpocli.config.parts import ESCAPED, USER_CODE, is_marked
from grpocli.config.user_code import GROUP, absolute, is_spec, name_of
from grpocli.config.yaml_text import Leaf, leaves
from grpocli.errors import ConfigError

PLAIN = re.compile(r"[\w/.:+-]+|\?\?\?", re.ASCII)
"""Texts that Hydra reads without quotes, unless it reads something else than a text."""


def parse(override: str) -> Override | None:
    """The override as Hydra reads it; None if it cannot."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def leaves_of(override: Override) -> Iterator[Leaf]:
    """The plain values that an override sets, with their keys."""
    return leaves(override.value(), (override.package or override.key_or_group).replace("/", "."))


def texts_of(override: str) -> list[str]:
    """The texts of an override's list, or its only text, without quotes; as typed if Hydra reads something else."""
    found = parse(override)
    value = found._value if found else None
    values = value if isinstance(value, list) else [value]
    texts: list[Any] = [one.text if isinstance(one, QuotedString) else one for one in values]
    return texts if all(isinstance(one, str) for one in texts) else [override.partition("=")[2]]


def text_of(override: str) -> str:
    """The only text of an override, or the first of its list; `[]` for an empty one."""
    return next(iter(texts_of(override)), "[]")


def in_quotes(text: str, quote: Quote = Quote.single) -> str:
    """A text with the quotes of Hydra's syntax."""
    quoted: str = QuotedString(text, quote).with_quotes()
    return quoted


def to_text(value: Any, quote: Quote = Quote.single) -> str:
    """A value in Hydra's syntax, with quotes around a text that needs them."""
    if isinstance(value, list | tuple):
        return f"[{','.join(to_text(one, quote) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{to_text(key, quote)}:{to_text(one, quote)}' for key, one in value.items())}}}"
    if isinstance(value, int | float | QuotedString | None):
        return str(value).lower() if isinstance(value, bool) else str(Transformer.str(value))
    text = str(value)
    found = parse(f"+key={text}") if PLAIN.fullmatch(text) else None
    return text if found and found._value == text else in_quotes(text, quote)  # 5 and null are no texts


LATEX = re.compile(
    r"nabla|natural|ncong|ne|nearrow|neg|neq|newcommand|newline|nexists|ngeq|nleq|nmid|noindent|"
    r"nonumber|normalsize|not|notag|notin|nparallel|nsubseteq|nu|nwarrow|tag|tan|tanh|tau|tbinom|"
    r"text|textbf|textit|textrm|textsc|textsf|textstyle|texttt|tfrac|therefore|theta|thickapprox|"
    r"tilde|times|tiny|to|top|triangle|triangleq|tt"
)
"""LaTeX commands that begin like an escape; prompts often have them."""
ESCAPE = re.compile(r"\\(\\)(?=[nt])|\\([nt][A-Za-z]*(?:\.[A-Za-z])?)")
"""A letter after a full stop is part of the word: `\\ne.g.` is a line break and `e.g.`, not LaTeX's `\\ne`."""
CHARACTERS = {"n": "\n", "t": "\t"}


def unescape(text: str) -> str:
    r"""`\n` as a line break, `\t` as a tab, `\\n` as a backslash and an n; everything else unchanged.

    LaTeX commands (`\neq`, `\text`) and all other backslashes (`\boxed`, `\frac`, `\\`, `\d`) stay.
    """
    return ESCAPE.sub(lambda found: found[1] or _character(found[2]) or found[0], text)


def _character(word: str) -> str:
    return "" if LATEX.fullmatch(word) else CHARACTERS[word[0]] + word[1:]


def rewrite(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra accepts them.

    Raises ConfigError for a choice or folder without a name, and a list that names a task twice.
    """
    _refuse_empty(overrides)
    overrides = [INFINITE.sub(r"\1inf", override) for override in expand_task_lists(overrides)]
    overrides = [_absolute(override) for override in overrides]
    # the resolver of ${hydra:...} knows nothing before a job begins, the node does
    overrides = [one.replace("${hydra:", "${hydra.") if one.startswith("hydra.") else one for one in overrides]
    return _hf_for_path(overrides)


PATH = re.compile(r"(?!hydra\.).*[._](path|file|folder|chat_template|kl\.model(\.\w+)?)")
INFINITE = re.compile(r"^(\+*algorithm\.[\w.]+=-?)\.inf$")
"""`.inf` as in a YAML; Hydra's overrides have `inf`."""


def from_command_line(overrides: Sequence[str]) -> list[str]:
    """`rewrite` for a command line, in which escapes stand for line breaks and tabs."""
    return rewrite([_unescaped(_quote(override)) for override in overrides])


ODD = re.compile(r"[^\w\s/\\+.$%*@?|:,\[\]{}()'\"-]", re.ASCII)
"""Characters that Hydra reads in quotes alone."""
TEXT = re.compile(r"[^\s,\[\]{}()'\"]([^,\[\]{}()'\"]*[^\s,\[\]{}()'\"])?")
"""A text without quotes, in a list or alone."""


def _quote(override: str) -> str:
    """The override with quotes around texts such as /home/josé; unchanged if Hydra reads it without them.

    A value whose folder exists is one path, whatever Hydra would read in its commas and brackets; a comma after the
    folder (`./a,tiny`) is a sweep's, unless the value exists.
    """
    key, _, value = override.partition("=")
    if "/" in value and texts_of(override) == [value]:
        folder, name = os.path.split(value)  # pathlib fails at long texts
        if os.path.exists(os.path.expanduser(value if "," in name and parse(override) else folder)):  # noqa: PTH110, PTH111
            return f"{key}={to_text(value)}"
    if not ODD.search(value) or parse(override):
        return override
    new = f"{key}={TEXT.sub(lambda text: to_text(text[0]) if ODD.search(text[0]) else text[0], value)}"
    return new if parse(new) else override


def _unescaped(override: str) -> str:
    escaped = "\\" in override and is_marked(key_of_override(override), ESCAPED)
    return _changed(override, unescape) if escaped else override


def key_of_override(override: str) -> str:
    """The key or group, without `+` and `@PACKAGE`."""
    return override.partition("=")[0].lstrip("+").partition("@")[0]


def _changed(override: str, change: Callable[[str], str]) -> str:
    """The override with `change` applied to each text of its value; the same string if nothing changes."""
    found = parse(override)
    if found is None:
        return override  # Hydra reports the error
    before = found._value  # with its quotes, which value() drops
    after = _each(before, change)
    if after == before:
        return override
    several = isinstance(after, ChoiceSweep)
    value = ",".join(map(to_text, after.list)) if several else to_text(after)
    return f"{found.get_key_element()}={value}"


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` applied to each text; a shuffled or tagged sweep stays as it is."""
    if isinstance(value, ChoiceSweep):
        return value if value.shuffle or value.tags else replace(value, list=[_each(one, change) for one in value.list])
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    if isinstance(value, QuotedString):
        return replace(value, text=change(value.text))
    return change(value) if isinstance(value, str) else value


def _absolute(override: str) -> str:
    """The override with absolute paths of user code, models and data, because a resume may start in another folder."""
    key = key_of_override(override)
    if PATH.fullmatch(key):
        return _changed(override, _absolute_path)
    if key == "model":
        return _changed(override, _absolute_model)
    code = GROUP.fullmatch(key) or is_marked(key, USER_CODE)
    return _changed(override, lambda text: absolute(text) if is_spec(text) else text) if code else override


def _absolute_model(text: str) -> str:
    if is_spec(text):
        return absolute(text)
    folder = Path(text).expanduser()
    return str(folder.resolve()) if text.startswith((".", "~")) or ("/" in text and folder.is_dir()) else text


def _absolute_path(text: str) -> str:
    path = Path(text).expanduser()
    return str(path.resolve()) if path.exists() else text


def _hf_for_path(overrides: list[str]) -> list[str]:
    """Add `model=hf` to `model.path=...`, unless another override chooses the model."""
    keys = set(map(key_of_override, overrides))
    return overrides if "model.path" not in keys or keys & {"model", "recipe", "resume"} else ["model=hf", *overrides]


TASK_LIST = re.compile(r"task=\[(.*)\]\s*")


def expand_task_lists(overrides: Sequence[str]) -> list[str]:
    """Replace `task=[A,B]` by `task=mixture` and an override for each task, so that they share no keys.

    Raises ConfigError for an empty list or a duplicate task.
    """
    expanded: list[str] = []
    for override in overrides:
        if not (found := TASK_LIST.fullmatch(override)):
            expanded.append(override)
            continue
        named: dict[str, str] = {}
        for choice in filter(None, texts_of(override)):
            if (name := name_of(choice)) in named:
                hint = f"leave one out and give it a name: +task@task.NAME={choice}"
                raise ConfigError(f"names {name} twice", key="task", value=f"[{found[1]}]", hint=hint)
            named[name] = choice
        if not named:
            raise ConfigError("choose at least one task", key="task", value="[]")
        expanded += ["task=mixture", *(f"+task@task.{name}={to_text(choice)}" for name, choice in named.items())]
    return expanded


def _refuse_empty(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty choice or folder, for example `resume=$UNSET`, where Hydra would use a default."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and not value.strip(" '\"") and NEVER_EMPTY.fullmatch(key_of_override(override)):
            hint = f"give one, or leave {key}= out (is a shell variable unset?)"
            raise ConfigError("has no value", key=f"{key}=", hint=hint)


NEVER_EMPTY = re.compile(rf"{GROUP.pattern}|algorithm|recipe|resume|hydra/\w+|hydra\.(run|sweep)\.dir")
"""Keys whose value names a choice or a folder."""
