"""A game of two roles: the speaker sees a number from 1 to 3 and says a number; the guesser sees what it said alone,
and guesses. Both win or both lose, so they have to agree on what numbers mean.

As long as nobody means anything by a number, nothing that either says changes who wins: neither has a reason to begin.
`habit` is what the guesser gets for saying what it was told, which is a reason, and one that holds.
"""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, str]


class Hint:
    """One game at a time."""

    roles = ("speaker", "guesser")

    def __init__(self, habit: float = 0.0) -> None:
        self.habit = habit

    def reset(self, seed: int, item: dict[str, Any]) -> list[Message]:
        """What the speaker reads; the last message's `to` says who speaks next."""
        self.secret = random.Random(seed).choice("123")
        return [{"role": "user", "content": f"{self.secret}?", "to": "speaker"}]

    def step(self, message: Message) -> tuple[list[Message], dict[str, float], bool]:
        """What follows, what it was worth to each role, and whether the game is over."""
        said, rest = message["content"][:1], message["content"][1:]
        # A number, and nothing beside it, in a turn that comes to its end.
        form = 0.3 * (said in ("1", "2", "3")) - 0.1 * len(rest)
        if message["by"] == "speaker":
            self.told = said
            return [{"role": "user", "content": f"{said}=", "to": "guesser"}], {"speaker": form}, False
        won = float(said == self.secret)
        habit = self.habit * (said == self.told and said in ("1", "2", "3"))
        return [], {"speaker": won, "guesser": won + form + habit}, True
