"""What a variant may change of a compiled MuJoCo model: physics, lights, cameras. Knows no simulator's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from headrace_simulator.backends.base import Knob


def knobs(model: Any) -> dict[str, Knob]:
    """Knobs of a model by their names in a variant. Each works on the model's values of now, from the next step on."""
    lights = [np.asarray(getattr(model, f"light_{part}")) for part in ("ambient", "diffuse", "specular")]
    headlight = model.vis.headlight
    lights += [np.asarray(getattr(headlight, part)) for part in ("ambient", "diffuse", "specular")]
    return {
        "execution.gravity": _scale(np.asarray(model.opt.gravity)),
        "execution.mass": _scale(np.asarray(model.body_mass), np.asarray(model.body_inertia)),
        "execution.friction": _scale(np.asarray(model.geom_friction)),
        "execution.damping": _scale(np.asarray(model.dof_damping)),
        "vision.lighting": _scale(*lights),
        "vision.camera": partial(_shift, np.asarray(model.cam_pos), _sideways(model)),
    }


def _scale(*arrays: np.ndarray) -> Callable[[float], None]:
    """Sets arrays in place to a factor times what they hold now."""
    nominal = [array.copy() for array in arrays]

    def turn(factor: float) -> None:
        for array, value in zip(arrays, nominal, strict=True):
            array[...] = value * factor

    return turn


def _sideways(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the cameras now, and the direction to the right of each, in the frame of its body."""
    w, x, y, z = np.asarray(model.cam_quat).T
    right = np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=1)
    return np.asarray(model.cam_pos).copy(), right


def _shift(position: np.ndarray, nominal: tuple[np.ndarray, np.ndarray], metres: float) -> None:
    at, right = nominal
    position[...] = at + metres * right
