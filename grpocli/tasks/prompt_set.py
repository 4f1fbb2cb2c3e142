"""The prompts of a split, tokenised once at the start, none longer than the limit, and supervised training's targets.

A target is the answer of the data, as the tokens that the model would write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from grpocli.environments.environment import loaded_environment_of
from grpocli.environments.tools import Schema, encodable, tools_of
from grpocli.errors import ConfigError
from grpocli.rewards.reward import with_one_answer
from grpocli.tasks.prompts import QUIET, fill, prompt_of, rendered, settle_last_turn, text_hash, text_of, tokenize
from grpocli.tasks.task import Example
from grpocli.types import Message, Prompt, Text, begun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "task.target_template"
PARTS = ("content", "reasoning_content", "thinking", "tool_calls")
"""Parts of an answer, which the chat template must write if a message has them."""
Target: TypeAlias = str | Message
"""The text of an answer, or the model's turn with its calls and thoughts."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Makes the targets of a task's examples."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    template: str | None = None
    """Text with {column} fields; None: the last turn of a conversation that ends with the assistant's, otherwise
    `otherwise`."""
    otherwise: str = "{answer}"
    required: bool = True
    """Whether an example whose target has more than `max_tokens` is left out."""
    tools: Sequence[Schema] = ()
    """Schemas that the chat template shows."""
    last_turn: str | None = None
    """`task.last_turn`; the target of a prompt that the model continues is the template's text."""

    @classmethod
    def of(cls, task: object, tokenizer: PreTrainedTokenizerBase, max_tokens: int, end_ids: frozenset[int]) -> Targets:
        """The targets of a task, by its keys `target_template` and `shot_template`."""
        template, otherwise = getattr(task, "target_template", None), getattr(task, "shot_template", None)
        tools = tools_of(loaded_environment_of(task))
        last_turn = getattr(task, "last_turn", None)
        return cls(tokenizer, max_tokens, end_ids, template, otherwise or "{answer}", tools=tools, last_turn=last_turn)

    def split(self, example: Example, where: str) -> tuple[Example, Target]:
        """The example without the assistant's last turn, and its target: that turn, or the template's text.

        Raises ConfigError, naming `where`, for a missing column, an empty target and a call that is none.
        """
        prompt = example["prompt"]
        last = prompt[-1] if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) else {}
        if last.get("role") != "assistant" or self.last_turn == "continue":
            return example, self._filled(example, self.template or self.otherwise, where)
        if len(prompt) == 1:
            raise ConfigError(f"{where} has only an answer", key="task", hint="give it a prompt before the answer")
        full = {name: value for name, value in last.items() if value != []}  # some templates print an empty part
        turn: Any = text_of({**example, "prompt": [full]}, where)[0]
        for call in turn.get("tool_calls", ()):
            _check_call(call, where)
        bare = {**example, "prompt": prompt[:-1]}
        if self.template is not None:
            return bare, self._filled(example, self.template, where)
        parts = [turn[part] for part in PARTS if turn.get(part)]
        written = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in parts]
        self._checked("".join(written), where)
        return bare, turn

    def _filled(self, example: Example, template: str, where: str) -> str:
        return self._checked(fill(template, with_one_answer(example), where, KEY), where)

    def _checked(self, target: str, where: str) -> str:
        if not target.strip() or encodable(target) != target:
            problem = "is empty" if not target.strip() else "has a lone surrogate, half of a character"
            raise ConfigError(f"the target of {where} {problem}", key=KEY, hint="repair or remove the row")
        return target

    def token_ids(
        self, prompts: Sequence[Text], targets: Sequence[Target], where: Callable[[int], str] = "example {}".format
    ) -> list[list[int]]:
        """The tokens that follow each tokenised prompt: the target and the token that ends it.

        In a conversation they are what the chat template writes after the generation prompt. Raises ConfigError if the
        template writes something else before it.
        """
        prompt_ids = tokenize(prompts, self.tokenizer, where, self.tools)
        pairs = enumerate(zip(prompts, targets, strict=True))
        texts = [self._texts(prompt, one, where(i)) for i, (prompt, one) in pairs]
        whole_ids = self._whole(prompts, [whole for whole, _ in texts])
        after_ids = self.tokenizer([after for _, after in texts], add_special_tokens=False, **QUIET).input_ids
        found = zip(prompt_ids, whole_ids, after_ids, strict=True)
        return [self._ended(_after(before, whole, after)) for before, whole, after in found]

    def _texts(self, prompt: Text, target: Target, where: str) -> tuple[str, str]:
        """The text of prompt and target together, and the part of it after the prompt."""
        if isinstance(prompt, str):
            return f"{prompt}{target}", str(target)
        turn = target if isinstance(target, dict) else {"role": "assistant", "content": target}
        before = rendered(prompt, self.tokenizer, where, tools=self.tools)
        whole = self._answered(prompt, turn, where)
        self._check_written(prompt, turn, whole, where)
        if not whole.startswith(before):
            problem = f"its chat template writes the prompt of {where} in another way when an answer follows"
            hint = "give model.chat_template=FILE whose generation prompt is the beginning of an answer"
            raise ConfigError(problem, key="model", hint=hint)
        return whole, whole.removeprefix(before)

    def _answered(self, prompt: Sequence[Message], turn: Message, where: str) -> str:
        before, beginning = begun(list(prompt))
        if beginning:
            turn = {**turn, "content": beginning + turn["content"]}
        return rendered([*before, turn], self.tokenizer, where, answered=True, tools=self.tools)

    def _check_written(self, prompt: Sequence[Message], turn: Message, whole: str, where: str) -> None:
        """Raise ConfigError if the template leaves out a part of the answer. Every template writes a content alone."""
        parts = [part for part in PARTS if turn.get(part)]
        for part in parts if parts != ["content"] else []:
            without = {name: value for name, value in turn.items() if name != part}
            try:
                written = self._answered(prompt, {"content": "", **without}, where) != whole
            except ConfigError:  # the template needs the part
                written = True
            if not written:
                problem = f"its chat template does not write the {part} of the answer of {where}"
                hint = "remove it from the data, or give model.chat_template=FILE"
                raise ConfigError(problem, key="model", hint=hint)

    def _whole(self, prompts: Sequence[Text], texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts, with the special tokens that `tokenize` gives their prompts."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, **QUIET).input_ids
        plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        for i, one in zip(plain, tokenize([texts[i] for i in plain], self.tokenizer), strict=True):
            ids[i] = one
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        """The tokens up to the last one that ends a completion; with one, if there is none."""
        ends = self.end_ids | {int(self.tokenizer.eos_token_id)}
        last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in ends), None)
        return [*ids, int(self.tokenizer.eos_token_id)] if last is None else ids[: last + 1]


def settle_example(
    example: Example, where: str, last_turn: str | None, targets: Targets | None
) -> tuple[Example, Target]:
    """The example with the prompt that the model gets, and its target; without `targets` an empty one.

    last_turn: `task.last_turn`. Raises ConfigError, naming `where`, for an unusable prompt or target.
    """
    target: Target = ""
    if targets:
        example, target = targets.split(example, where)
    text = text_of(example, where)
    if not isinstance(text, str) and (not targets or last_turn == "continue"):
        text = settle_last_turn(text, last_turn, where)
    return {**example, "prompt": text}, target


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    parts = [function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    if list(map(type, parts)) != [str, dict]:
        hint = 'it must be {"type": "function", "function": {"name": NAME, "arguments": OBJECT}}'
        raise ConfigError(f"{where} has the call {call!r:.200}", key="task", hint=hint)


def _after(prompt_ids: list[int], whole_ids: list[int], after_ids: list[int]) -> list[int]:
    """The tokens of the whole after the prompt; those of the text alone, if a token spans the border."""
    n = len(prompt_ids)
    return list(whole_ids[n:]) if whole_ids[:n] == prompt_ids and len(whole_ids) > n else list(after_ids)


class PromptSet:
    """The examples of one split as token ids.

    task: name of the task, which every prompt has as the column `task_name`. limit: limit of examples, from the first.
    Prompts over `max_tokens` are dropped (`long_prompts="drop"`) or lose their beginning (`"truncate"`).
    tools: schemas that the chat template shows to the model. last_turn: `task.last_turn`.
    targets: of supervised training. Examples with a longer target are dropped, too, or the target loses its end.
    Raises ConfigError if an example has no usable prompt, the tokenizer has no chat template for a conversation, or
    all prompts are too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        long_prompts: str,
        name: str,
        task: str = "",
        limit: int | None = None,
        targets: Targets | None = None,
        tools: Sequence[Schema] = (),
        last_turn: str | None = None,
    ) -> None:
        self.name, self.max_tokens, self.task, self._last_turn = name, max_tokens, task, last_turn
        self._examples, self._targets = examples, targets
        self._drops = long_prompts == "drop"
        pairs = [self._settled(example, i) for i, example in enumerate(islice(examples, limit))]
        texts = [example["prompt"] for example, _ in pairs]
        token_ids = tokenize(texts, tokenizer, self._where, tools)
        long = {i for i, ids in enumerate(token_ids) if len(ids) > max_tokens}
        if self._drops and len(long) == len(token_ids):
            shortest = min(map(len, token_ids))
            problem = f"all {len(long)} {name} prompts are longer, the shortest has {shortest} tokens"
            raise ConfigError(problem, key="rollout.max_prompt_tokens", value=max_tokens, hint="raise it")
        self._total, self.n_long, self.n_long_targets = len(token_ids), len(long), 0
        left_out = long if self._drops else set()
        self._target_ids: dict[int, list[int]] = {}
        if targets:
            left_out = left_out | self._take_targets(targets, texts, [answer for _, answer in pairs], left_out)
        self._kept = [i for i in range(len(token_ids)) if i not in left_out]
        self._token_ids = {i: token_ids[i][-max_tokens:] for i in self._kept}
        self.hashes = [text_hash(texts[i]) for i in self._kept]

    def _take_targets(
        self, targets: Targets, texts: Sequence[Text], answers: Sequence[Target], left_out: set[int]
    ) -> set[int]:
        """Tokenise the targets. Returns the examples to leave out because theirs is too long."""
        every = targets.token_ids(texts, answers, self._where)
        long = {i for i, ids in enumerate(every) if len(ids) > targets.max_tokens} - left_out
        self.n_long_targets = len(long)
        self._target_ids = {
            i: ids[: targets.max_tokens] for i, ids in enumerate(every) if not (self._drops and i in long)
        }
        if not (self._drops and targets.required):
            return set()
        if len(long) + len(left_out) == len(texts):
            shortest = min(len(every[i]) for i in long)
            problem = f"all {len(long)} {self.name} targets are longer, the shortest has {shortest} tokens"
            raise ConfigError(problem, key="rollout.max_completion_tokens", value=targets.max_tokens, hint="raise it")
        return long

    def _settled(self, example: Example, index: int) -> tuple[Example, Target]:
        return settle_example(example, self._where(index), self._last_turn, self._targets)

    @property
    def report(self) -> str:
        """A sentence about long prompts and targets; empty if there are none."""
        sentences, key = [], "rollout.max_prompt_tokens"
        if self.n_long:
            what = "dropped" if self._drops else "cut on the left"
            long = f"{self.n_long} of {self._total} {self.name} prompts are longer than {key}={self.max_tokens}"
            sentences.append(f"{long} and were {what}")
        if self._targets and self.n_long_targets:
            dropped = "dropped" if self._targets.required else "left out of eval/loss"
            what, key = dropped if self._drops else "cut at the end", "rollout.max_completion_tokens"
            long = f"{self.n_long_targets} of {self._total} {self.name} targets"
            sentences.append(f"{long} are longer than {key}={self._targets.max_tokens} and were {what}")
        return "; ".join(sentences)

    def __len__(self) -> int:
        return len(self._kept)

    def shared_with(self, others: PromptSet) -> list[int]:
        """Indices of the prompts that are also among `others`, by a hash of their text."""
        theirs = set(others.hashes)
        return [index for index, one in enumerate(self.hashes) if one in theirs]

    def prompt(self, index: int, uid: str) -> Prompt:
        """The index-th kept prompt."""
        place = self._kept[index]
        example, _ = self._settled(self._examples[place], place)
        ids, target_ids = self._token_ids[place], self._target_ids.get(place)
        return prompt_of(example, ids, uid, self.task, self._numbers[place], target_ids)

    @property
    def rows(self) -> list[int]:
        """The number in the data of each kept prompt, ascending."""
        return [self._numbers[place] for place in self._kept]

    def values(self, column: str) -> dict[int, tuple[Any, str]]:
        """{row: (its value in a column, the name of the example in errors)}, None without the column."""
        kept, numbers = set(self._kept), self._numbers
        examples = ((i, one) for i, one in enumerate(self._examples) if i in kept)
        return {numbers[i]: (one.get(column), self._where(i)) for i, one in examples}

    @property
    def _numbers(self) -> Sequence[int]:
        """The number in its data of each example."""
        numbers: Sequence[int] = getattr(self._examples, "numbers", range(len(self._examples)))
        return numbers

    def _where(self, index: int) -> str:
        """The name of an example in errors, with its row if it comes from a table."""
        row = getattr(self._examples, "where", None)
        return f"{self.name} example {index}" + (f" ({row(index)})" if row else "")
