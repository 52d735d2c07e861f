"""What a variant may change of a compiled MuJoCo model: physics, lights, cameras, hues. Knows no simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from headrace_simulator.backends.base import Knob
from headrace_simulator.backends.colours import turned

Upload = Callable[[int], None]
"""Shows a texture that was changed, by its number in the model, in the renderers that there are."""


def knobs(model: Any, upload: Upload = lambda texture: None) -> dict[str, Knob]:
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
        "vision.hue": _Hue(model, upload),
    }


def uploader(environment: Any) -> Upload:
    """Of a Gymnasium environment, which makes its renderers at its first pictures."""

    def upload(texture: int) -> None:
        import mujoco

        renderer = environment.mujoco_renderer
        for viewer in renderer._viewers.values():
            viewer.make_context_current()
            mujoco.mjr_uploadTexture(environment.model, viewer.con, texture)

    return upload


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


class _Hue:
    """Turns the hue of geometries, materials and textures. Textures are many megabytes: copied at the first turn."""

    def __init__(self, model: Any, upload: Upload) -> None:
        self._model, self._upload = model, upload
        self._colours: list[np.ndarray] = []
        self._nominal: list[np.ndarray] = []

    def __call__(self, part: float) -> None:
        model = self._model
        if not self._nominal:
            self._colours = [np.asarray(model.geom_rgba), np.asarray(model.mat_rgba), *self._textures()]
            self._nominal = [array.copy() for array in self._colours]
        for array, value in zip(self._colours, self._nominal, strict=True):
            array[...] = turned(value, part)
        for texture in range(model.ntex):
            self._upload(texture)

    def _textures(self) -> list[np.ndarray]:
        """Views of the textures with colours, (pixels, channels)."""
        model, found = self._model, []
        data = np.asarray(model.tex_data)
        for start, channels, height, width in zip(
            model.tex_adr, model.tex_nchannel, model.tex_height, model.tex_width, strict=True
        ):
            if channels >= 3:
                pixels = int(height) * int(width)
                found.append(data[start : start + pixels * channels].reshape(pixels, channels))
        return found
