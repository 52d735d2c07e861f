"""Colours whose hue is turned: what `vision.hue` does to surfaces and textures. Knows no simulator."""

from __future__ import annotations

import numpy as np

_PIECE = 1 << 20
"""Pixels that are turned at once: a texture of 4096² as float32 would be 200 MB."""


def turned(colours: np.ndarray, part: float) -> np.ndarray:
    """Colours, (…, 3 or more) with red, green and blue first, whose hue is turned by a part of the whole circle.

    They are rotated about the axis of greys, which stay what they are; the type stays too (uint8 up to 255, floats up
    to 1).
    """
    matrix, flat = _rotation(part), colours.reshape(-1, colours.shape[-1])
    most = 255 if colours.dtype == np.uint8 else 1.0
    result = flat.copy()
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE, :3].astype(np.float32) @ matrix.T
        if colours.dtype == np.uint8:
            piece = np.rint(piece)
        result[start : start + _PIECE, :3] = np.clip(piece, 0, most).astype(colours.dtype)
    return result.reshape(colours.shape)


def _rotation(part: float) -> np.ndarray:
    """Rodrigues' rotation about (1, 1, 1)."""
    angle = 2 * np.pi * part
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)
    matrix = np.cos(angle) * np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) / 3
    return np.asarray(matrix, np.float32)
