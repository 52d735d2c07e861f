"""A client of an online run: a "user" who asks, looks at what comes back, and says what it was worth.

    eval "$(headrace run endpoint RUN)" && python examples/agents/online.py

It plays the guessing game of endpoint.py with many sessions at once, until the run has ended.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI

AT_ONCE = 16


def play(client: OpenAI, seed: int) -> float:
    """One session: a game about the seed's secret, and its reward."""
    session: Any = client.post("/sessions", cast_to=object, body={})
    mine = client.with_options(api_key=session["api_key"])
    secret, reward = random.Random(seed).randint(1, 3), 0.0
    messages: list[Any] = [{"role": "user", "content": "?"}]
    for _ in range(2):
        answer = mine.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        guess = answer.choices[0].message.content or ""
        if guess not in ("1", "2", "3"):
            reward = -0.5
            break
        if int(guess) == secret:
            reward = 1.0
            break
        hint = "+" if secret > int(guess) else "-"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    mine.post(
        f"/sessions/{session['id']}/reward", cast_to=object, body={"reward": reward, "success": reward == 1}
    )
    return reward


def user(number: int) -> int:
    """Plays game after game while the run is served; returns how many."""
    client, games = OpenAI(timeout=600), 0  # OPENAI_BASE_URL and OPENAI_API_KEY are those of the run
    while True:
        try:
            play(client, 1_000_000 * number + games)
        except (APIConnectionError, APIStatusError) as error:
            print(f"user {number} leaves after {games} games: {error}")
            return games
        games += 1


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_ONCE) as users:
        print(sum(users.map(user, range(AT_ONCE))), "games")
