"""task=letter_counting: how often a letter is in a word."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from grpocli.config.parts import part, require
from grpocli.tasks.generated import Generated

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

SYLLABLES = (
    *("ba", "ber", "can", "co", "der", "din", "el", "en", "fer", "gol", "ha", "in", "ka", "lar", "lo", "mem", "mi"),
    *("na", "nes", "or", "per", "pol", "qua", "ra", "rub", "sal", "so", "ster", "ta", "ter", "un", "ver", "wil", "zo"),
)


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
