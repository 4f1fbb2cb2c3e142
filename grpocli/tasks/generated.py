"""Tasks whose examples are made from a seed: task=arithmetic, letter_counting."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from grpocli.config.parts import one_of, part, require, section
from grpocli.errors import ConfigError
from grpocli.tasks.task import BaseTask, Example

HELD_OUT = 1 / 10
"""Share of the examples that belong to `eval`."""
TRIES = 50
"""Examples made per example wanted, since small tasks repeat examples."""
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
STRIDE = 2654435761
"""A prime near 2**32 divided by the golden ratio. It does not divide the number of pairs, whose prime factors are 2, 3
and 5, so its multiples visit every pair once; the first n of them are spread evenly."""
HELD_OUT_PAIRS = 26 / 256
"""Share of the pairs that belong to `eval`."""
SYLLABLES = (
    *("ba", "ber", "can", "co", "der", "din", "el", "en", "fer", "gol", "ha", "in", "ka", "lar", "lo", "mem", "mi"),
    *("na", "nes", "or", "per", "pol", "qua", "ra", "rub", "sal", "so", "ster", "ta", "ter", "un", "ver", "wil", "zo"),
)


def is_held_out(text: str, share: float) -> bool:
    """True for about `share` of all texts, in 256ths."""
    return hashlib.sha256(text.encode()).digest()[0] < share * 256


@section("task")
class Generated(BaseTask):
    """Base of tasks whose examples are made from a seed.

    The hash of an example puts it into `train` or `eval`, whatever the sizes are.
    """

    train_size: int = 10000
    """Most different examples to train on; small tasks have fewer."""
    eval_size: int = 500
    """Most different examples to evaluate on; small tasks have fewer."""
    generator_seed: int = 0
    """Seed of the examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("train_size", 1), ("eval_size", 1), ("generator_seed", 0)):
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")

    def make(self, random: random.Random) -> Example:
        """An example without its prompt: the column `question`, and further columns."""
        raise NotImplementedError

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; the same on every machine."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        found = list(islice(different(self._made(TRIES * limit), split), limit))
        if not found:
            hint = "choose larger questions"
            raise ConfigError(f"these settings leave no example for {split}", key="task", hint=hint)
        return [{**one, "prompt": [{"role": "user", "content": one["question"]}]} for one in found]

    def _made(self, n: int) -> Iterator[Example]:
        source = random.Random(self.generator_seed)
        return (self.make(source) for _ in range(n))


def different(examples: Iterable[Example], split: str) -> Iterator[Example]:
    """The examples of a split, chosen by the hashes of their questions; each question once."""
    seen = set[str]()
    for example in examples:
        question = example["question"]
        if question not in seen and is_held_out(question, HELD_OUT) == (split == "eval"):
            seen.add(question)
            yield example


@part("task", "arithmetic")
class Arithmetic(BaseTask):
    """Problems like `47+85=` with the answer `132`, as a conversation of one message.

    The hash of a pair of operands puts it into `train` or `eval`, whatever the sizes are.
    """

    digits: int = 2
    """Digits of both operands, 1 to 9: 2 is 10 to 99, 1 is 0 to 9."""
    operation: str = "+"
    """`+`, `-` or `*`."""
    train_size: int = 10000
    """Most problems to train on; fewer if there are fewer pairs."""
    eval_size: int = 1000
    """Most problems to evaluate on; fewer if there are fewer pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "digits", 1 <= self.digits <= 9, "must be between 1 and 9")
        one_of(self, "operation", OPERATIONS)
        for name in ("train_size", "eval_size"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt` and `answer`; the same on every machine."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        return _examples(self.operation, self.digits, split, limit)


@lru_cache(maxsize=8)
def _examples(operation: str, digits: int, split: str, limit: int) -> Sequence[Example]:
    asked = ((f"{first}{operation}{second}", first, second) for first, second in _pairs(digits))
    chosen = (one for one in asked if is_held_out(one[0], HELD_OUT_PAIRS) == (split == "eval"))
    return [
        {"prompt": [{"role": "user", "content": f"{text}="}], "answer": str(OPERATIONS[operation](first, second))}
        for text, first, second in islice(chosen, limit)
    ]


def _pairs(digits: int) -> Iterator[tuple[int, int]]:
    """Every pair of operands once, in a pseudo-random order."""
    low = 10 ** (digits - 1) if digits > 1 else 0
    values = 10**digits - low
    total = values**2
    for place in range(total):
        first, second = divmod(place * STRIDE % total, values)
        yield low + first, low + second


@part("task", "letter_counting")
class LetterCounting(Generated):
    """Questions such as: how many times is the letter r in "rubranester"? `reward=[number]` checks the answer.

    Words are made of random syllables, so that no model has memorized them.
    """

    syllables: int = 6
    """Most syllables of a word, 2 to 50."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "syllables", 2 <= self.syllables <= 50, "must be between 2 and 50")

    def make(self, random: random.Random) -> Example:
        word = "".join(random.choice(SYLLABLES) for _ in range(random.randint(2, self.syllables)))
        letter = random.choice(word if random.random() < 0.9 else "abcdefghijklmnopqrstuvwxyz")
        question = f'How many times is the letter {letter} in "{word}"? Answer with a number.'
        return {"question": question, "answer": str(word.count(letter)), "word": word, "letter": letter}
