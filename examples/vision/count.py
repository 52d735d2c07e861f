"""How many quarters of a picture are bright? Two pictures, one after the other, and what the first answer was worth."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

SIDE = 8
"""Pixels of a quarter: one token of the tiny model."""


class Count:
    """A picture, an answer, what it was worth with the next picture, and another answer.

    What is no number ends it, unless it is `patient`: a model with random weights learns so to say numbers first.
    """

    images = True  # its messages have images: a run whose model reads none is refused as it is submitted

    def __init__(self, most: int = 3, patient: bool = False) -> None:
        self._most, self._patient = most, patient
        self._numbers = [str(number) for number in range(1, most + 1)]

    def reset(self, seed: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first picture."""
        self._draw, self._turn = random.Random(seed), 0
        return [self._show("?")]

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, Any]], float, bool]:
        """What an answer is worth, and the second picture."""
        said, rest = message["content"][:1], message["content"][1:]
        self._turn += 1
        right, number = said == str(self._count), said in self._numbers
        reward = float(right) - 0.1 * len(rest)  # whatever is said beside the number
        if not number:
            reward = -0.5 if said else -1.0
        told = "yes" if right else "no"
        if self._turn == 2 or not (number or self._patient):
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
