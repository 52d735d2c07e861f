"""How many quarters of a picture are bright? Two pictures, one after the other, and what the first answer was worth."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

SIDE = 8
"""Pixels of a quarter: one token of the tiny model."""


class Count:
    """A picture, an answer, what it was worth with the next picture, and another answer."""

    images = True  # its messages have images: a run whose model reads none is refused as it is submitted

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._numbers = [str(number) for number in range(1, most + 1)]

    def reset(self, seed: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first picture."""
        self._draw, self._turn = random.Random(seed), 0
        return [self._show("?")]

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, Any]], float, bool]:
        """What an answer is worth, and the second picture."""
        said, rest = message["content"][:1], message["content"][1:]
        self._turn += 1
        if said not in self._numbers:
            return [{"role": "user", "content": "no"}], -0.5 if said else -1.0, True
        right = said == str(self._count)
        reward = float(right) - 0.1 * len(rest)  # whatever is said beside the number
        told = "yes" if right else "no"
        if self._turn == 2:
            return [{"role": "user", "content": told}], reward, True
        return [self._show(told)], reward, False

    def _show(self, text: str) -> dict[str, Any]:
        self._count = self._draw.randint(1, self._most)
        bright = self._draw.sample(range(4), self._count)
        quarters = np.zeros((2, 2, 1), np.uint8)
        quarters.reshape(4)[bright] = 255
        pixels = quarters.repeat(SIDE, 0).repeat(SIDE, 1).repeat(3, 2)
        content = [{"type": "text", "text": text}, {"type": "image", "image": pixels}]
        return {"role": "user", "content": content}


def reward(episode: Mapping[str, Any], finish_reason: str) -> float:
    """The sum of both answers; less for one that a limit cut, as a model with random weights ends no turn by itself."""
    return float(episode["return"]) - 0.3 * (finish_reason == "length")
