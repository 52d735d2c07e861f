"""Where somebody lives, which only a search tells: the model may write "cat?" and reads "57=", then answers.

`python lookup.py corpus > FILE` writes the texts that are searched, `python lookup.py calls > FILE` what a cold start
shows: searches, guesses, and answers to what was found.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

Message = dict[str, str]
CALL = re.compile(r"([a-z]{3})\?")
LETTERS = "acdoprsty"


def homes(seed: int = 0) -> dict[str, str]:
    """Everybody's number, by name; there are 600."""
    chance = random.Random(seed)
    names = ["".join(letters) for letters in product(LETTERS, repeat=3)]
    return {name: str(chance.randint(10, 99)) for name in sorted(chance.sample(names, 600))}


class Lookup:
    """One question at a time; it follows from the seed. `path` is the index, or the corpus itself."""

    def __init__(self, path: str) -> None:
        from headrace_search.tool import SearchOptions, build

        self.search = build(SearchOptions(path=Path(path), by="words", results=1))
        self.homes = list(homes().items())

    def reset(self, seed: int, item: dict[str, Any]) -> list[Message]:
        """Who is asked for."""
        self.name, self.number = random.Random(seed).choice(self.homes)
        self.searched = False
        return [{"role": "user", "content": f"{self.name}="}]

    def step(self, message: Message) -> tuple[list[Message], float, bool, dict[str, Any]]:
        """What a search finds, once; else the answer is judged."""
        said = message["content"]
        if (call := CALL.fullmatch(said)) and not self.searched:
            self.searched = True
            found = str(self.search.begin({"query": call[1]}, 5.0)(5.0))
            return [{"role": "tool", "content": f"{found.split()[-1][:4]}="}], 0.0, False, {}
        right = said == self.number
        return [], float(right), True, {"success": right}


def corpus() -> Iterator[dict[str, str]]:
    """A text for each of them."""
    for name, number in homes().items():
        yield {"text": f"{name} {number}"}


def calls(count: int = 3000, seed: int = 1) -> Iterator[dict[str, str]]:
    """Questions with what may be said, with numbers that are nobody's. A space stands where a turn ends."""
    chance = random.Random(seed)
    for number in range(count):
        name, home = "".join(chance.choices(LETTERS, k=3)), str(chance.randint(10, 99))
        if number % 3 == 0:
            yield {"question": f"{name}=", "answer": f"{name}?"}
        elif number % 3 == 1:
            yield {"question": f"{name}=", "answer": home}
        else:
            yield {"question": f"{name}={name}? {home}=", "answer": home}


if __name__ == "__main__":
    for row in {"corpus": corpus, "calls": calls}[sys.argv[1]]():
        print(json.dumps(row))
