"""Draws pictures of digits: `python examples/vision/make_digits.py DIRECTORY`, 16 x 16 pixels, noisy colours.

DIRECTORY/digits.jsonl has a line for each: its picture (a path), the question and the answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, SCALE = 16, 2
GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
)
"""Of each digit: five rows of three."""


def draw(digit: int, random: np.random.Generator) -> Image.Image:
    """A digit about the middle, light on dark."""
    glyph = np.array([*map(int, GLYPHS[digit])]).reshape(5, 3).repeat(SCALE, 0).repeat(SCALE, 1)
    top, left = ((SIDE - size) // 2 + int(random.integers(-1, 2)) for size in glyph.shape)
    ink = np.zeros((SIDE, SIDE, 1))
    ink[top : top + glyph.shape[0], left : left + glyph.shape[1], 0] = glyph
    dark, light = random.uniform(0, 80, 3), random.uniform(170, 255, 3)
    pixels = ink * light + (1 - ink) * dark + random.normal(0, 12, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write(directory: Path, count: int, seed: int) -> None:
    """The pictures and their lines."""
    random = np.random.default_rng(seed)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        digit = number % len(GLYPHS)
        path = f"images/{number:05}.png"
        draw(digit, random).save(directory / path)
        lines.append(json.dumps({"image": path, "question": "which digit?", "answer": str(digit)}))
    (directory / "digits.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.directory, options.count, options.seed)
    print(options.directory / "digits.jsonl")


if __name__ == "__main__":
    main()
