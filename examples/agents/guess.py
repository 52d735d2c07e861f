"""A guessing game in two turns: the model guesses a number from 1 to 3, is told whether to go up or down, and guesses
again. Who guesses 2 first and follows the hint is always right.
"""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, str]


class Guess:
    """One game at a time. The secret follows from the seed, so that all answers of a prompt are about one secret."""

    def reset(self, seed: int, item: dict[str, Any]) -> list[Message]:
        """What the model reads first."""
        self.secret = random.Random(seed).randint(1, 3)
        self.guesses = 0
        return [{"role": "user", "content": "?"}]

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """What follows the model's guess, its reward, and whether the game is over."""
        self.guesses += 1
        guess, rest = message["content"][:1], message["content"][1:]
        if guess not in ("1", "2", "3"):
            return [{"role": "user", "content": "no"}], -0.5, True
        chatter = -0.1 * len(rest)  # whatever is said beside the number
        if int(guess) == self.secret:
            return [{"role": "user", "content": "yes"}], 1.0 + chatter, True
        hint = "+" if self.secret > int(guess) else "-"
        return [{"role": "user", "content": hint}], chatter, self.guesses == 2


def reward(episode: dict[str, Any], finish_reason: str) -> float:
    """What the game gave, and less where the last turn came to no end: the game only goes on behind a turn's end."""
    return float(episode["return"]) - 0.3 * (finish_reason == "length")
