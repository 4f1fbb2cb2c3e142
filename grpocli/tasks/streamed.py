"""Prompts of a stream: read, shuffled and tokenised as they are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.tasks.order import permutation
from grpocli.tasks.prompts import prompt_of, tokenize
from grpocli.tasks.text import text_hash, text_of
from grpocli.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from grpocli.tasks.loading import Row
    from grpocli.tasks.stream import ExampleStream

logger = logging.getLogger(__name__)

TRIES = 10_000
"""So many rows one after the other may be too long or held out."""


class StreamedPrompts:
    """Runs of `buffer` rows, each shuffled: which row draw n is depends on n, the seed and the data alone.

    A row that is too long or held out is not left out, as the rows after it would be others' draws then: another
    row of its run takes its place, which so comes twice in that epoch.
    """

    report = ""

    def __init__(
        self,
        stream: ExampleStream,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        long_prompts: str,
        task: str,
        buffer: int,
        seed: tuple[int, ...],
    ) -> None:
        self._stream, self._tokenizer, self._task = stream, tokenizer, task
        self._max_tokens, self._drops = max_tokens, long_prompts == "drop"
        self._buffer, self._seed = buffer, seed
        self._apart = set(stream.apart)
        self._length: int | None = None  # of an epoch, once its end has been seen
        self._told = False
        self._run = lru_cache(maxsize=2)(self._read)
        self._order = lru_cache(maxsize=2)(self._ordered)

    def keep_apart(self, hashes: Iterable[int]) -> None:
        """Do not train on prompts of these hashes."""
        self._apart.update(hashes)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task. Raises ConfigError where a row is none, or no row can be used."""
        for tries, number in enumerate(self._candidates(nth)):
            if tries == TRIES:
                break
            if prompt := self._prompt(number, uid):
                return prompt
        raise ConfigError(
            f"{TRIES} rows of {self._task} were read, and all are longer or held out; raise it, or give other data",
            key="rollout.max_prompt_tokens",
            value=self._max_tokens,
        )

    def _candidates(self, nth: int) -> Iterator[int]:
        """The number of the row that is drawn, and those that may take its place: of its run, then of the next ones."""
        while True:
            epoch, start, place = self._place(nth)
            order = self._order(epoch, start)
            rows = len(order)
            yield start + int(order[place])
            for i in range(rows):
                yield start + int(order[(place + rows // 2 + i) % rows])  # far from where it comes by itself
            nth += rows - place

    def _place(self, nth: int) -> tuple[int, int, int]:
        """The epoch, where its run starts, and the place in the run."""
        epoch, place = divmod(nth, self._length) if self._length else (0, nth)
        start, place = place - place % self._buffer, place % self._buffer
        if place < len(rows := self._run(start)):
            return epoch, start, place
        self._length = start + len(rows) if rows else self._stream.count()
        return self._place(nth)

    def _ordered(self, epoch: int, start: int) -> NDArray[np.int64]:
        return permutation(len(self._run(start)), *self._seed, epoch, start)

    def _read(self, start: int) -> list[Row]:
        return self._stream.take(start, self._buffer)

    def _prompt(self, number: int, uid: str) -> Prompt | None:
        start = number - number % self._buffer
        example = self._stream.example(self._run(start)[number - start], number)
        where = f"{self._task} example ({self._stream.where(number)})"
        text = text_of(example, where)
        if text_hash(text) in self._apart:
            return None
        (ids,) = tokenize([text], self._tokenizer, lambda _: where)
        if len(ids) > self._max_tokens and self._drops:
            self._tell()
            return None
        return prompt_of(example, ids[-self._max_tokens :], uid, self._task)

    def _tell(self) -> None:
        if not self._told:
            logger.warning("prompts of %s over %d tokens: others take their place", self._task, self._max_tokens)
        self._told = True
