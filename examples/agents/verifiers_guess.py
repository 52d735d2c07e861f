"""An environment of the package verifiers: the guessing game of guess.py, as verifiers' users write one.

It knows nothing of Headrace; `vf-eval` plays it as well.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """The model guesses a number from 1 to 3, is told whether to go up or down, and guesses again."""

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        """What follows a guess; nothing does where the game is over."""
        guess, secret = messages[-1]["content"], state["answer"]
        reply = [{"role": "user", "content": "+" if secret > guess else "-"}]
        if guess == secret or guess not in ("1", "2", "3"):
            state["final_env_response"] = reply
        return reply


def right(completion: Any, answer: str) -> float:
    """1 for the secret, 0 for another number, -0.5 for none."""
    guesses = [message["content"] for message in completion if message["role"] == "assistant"]
    if not guesses or guesses[-1] not in ("1", "2", "3"):
        return -0.5
    return float(guesses[-1] == answer)


def load_environment(rows: int = 512) -> vf.Environment:
    """Called by the name of this function."""
    secrets = [
        {"prompt": [{"role": "user", "content": "?"}], "answer": str(1 + row % 3)} for row in range(rows)
    ]
    return Guess(
        dataset=Dataset.from_list(secrets),
        rubric=vf.Rubric(funcs=[right]),
        max_turns=2,
        sampling_args={"max_tokens": 1},
    )
