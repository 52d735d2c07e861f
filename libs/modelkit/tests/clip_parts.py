"""Videos and sounds of noise and of one tone."""

from __future__ import annotations

import numpy as np
from headrace_modelkit.presets.clips import video_file

NOISE = np.random.default_rng(0)


def noisy(count: int, height: int = 16, width: int = 16) -> list[np.ndarray]:
    return [NOISE.integers(0, 255, (height, width, 3), dtype=np.uint8) for _ in range(count)]


def tone(hertz: int, seconds: float = 0.5, rate: int = 16_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


FRAMES = noisy(8)
GOOD = video_file(FRAMES)
