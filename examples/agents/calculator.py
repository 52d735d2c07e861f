"""Sums of two numbers from 50 to 99, and a calculator: the model may write "57+83?" and reads "140=", then answers.

`python calculator.py > FILE` writes what a cold start shows: calls, answers, and answers to what a calculator says.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

Message = dict[str, str]
CALL = re.compile(r"(\d{1,4})\+(\d{1,4})\?")


class Sums:
    """One sum at a time; it follows from the seed."""

    def reset(self, seed: int, item: dict[str, Any]) -> list[Message]:
        """The sum."""
        chance = random.Random(seed)
        self.first, self.second = chance.randint(50, 99), chance.randint(50, 99)
        self.called = False
        return [{"role": "user", "content": f"{self.first}+{self.second}="}]

    def step(self, message: Message) -> tuple[list[Message], float, bool, dict[str, Any]]:
        """The calculator's word to a call, once; else the answer is judged."""
        said = message["content"]
        if (call := CALL.fullmatch(said)) and not self.called:
            self.called = True
            return [{"role": "tool", "content": f"{int(call[1]) + int(call[2])}="}], 0.0, False, {}
        right = said == str(self.first + self.second)
        return [], float(right), True, {"success": right}


def examples(count: int = 600, seed: int = 1) -> Iterator[dict[str, str]]:
    """Questions with what may be said: a call, an answer of one's own, and the answer to what the calculator said.

    A space stands where a turn ends in a conversation.
    """
    chance = random.Random(seed)
    for number in range(count):
        first, second = chance.randint(50, 99), chance.randint(50, 99)
        call, answer = f"{first}+{second}", str(first + second)
        if number % 3 == 0:
            yield {"question": f"{call}=", "answer": f"{call}?"}
        elif number % 3 == 1:
            yield {"question": f"{call}=", "answer": answer}
        else:
            yield {"question": f"{call}={call}? {answer}=", "answer": answer}


if __name__ == "__main__":
    for row in examples():
        print(json.dumps(row))
