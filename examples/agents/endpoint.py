"""An agent that knows nothing of training: a program around the `openai` client that plays a guessing game.

The model guesses a number from 1 to 3, is told whether to go up or down, and guesses again.
"""

from __future__ import annotations

import random
from typing import Any

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set for it


def play(seed: int, item: dict[str, Any]) -> float:
    """One game about the seed's secret; what it returns is the reward."""
    secret = random.Random(seed).randint(1, 3)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        guess = answer.choices[0].message.content or ""
        if guess not in ("1", "2", "3"):
            return -0.5
        if int(guess) == secret:
            return 1.0
        hint = "+" if secret > int(guess) else "-"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0
