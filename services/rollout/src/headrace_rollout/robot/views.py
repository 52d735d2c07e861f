"""What a policy reads of an environment's observations. Knows no policy's insides and no wire.

Shapes: S numbers of a state, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.rpc.episodes import IMAGE, STATE, Arrays

if TYPE_CHECKING:
    from headrace_modelkit.robot.directory import AnyConfig


class Views:
    """Maps observations by their names in the environment to the names of an episode."""

    def __init__(self, policy: AnyConfig, environment: EnvironmentSection) -> None:
        self._state = environment.state
        self._cameras = environment.cameras
        self._wanted = tuple(getattr(policy, "cameras", ()))
        self._reads_state = any(getattr(policy, key, None) for key in ("state_size", "proprio", "state"))

    def __call__(self, observation: Arrays) -> dict[str, np.ndarray]:
        """STATE, (S,) float32, and IMAGE + camera, (H, W, 3) uint8: those that the policy reads.

        ValueError, which names the key of the spec, where the environment has no such observation.
        """
        found: dict[str, np.ndarray] = {}
        if self._reads_state:
            parts = [_named(observation, name, "environment.state") for name in self._state_of(observation)]
            if not parts:
                raise ValueError(
                    "environment.state: the environment has images alone, and the policy reads a state"
                )
            found[STATE] = np.concatenate([part.astype(np.float32).reshape(-1) for part in parts])
        for camera in self._wanted:
            source = camera if self._cameras is None else self._cameras.get(camera, "")
            where = f"environment.cameras: {camera!r}"
            image = _named(observation, source, where)
            if not is_image(image):
                raise ValueError(f"{where}: {source!r} is {image.dtype} {image.shape}, no (H, W, 3) of uint8")
            found[IMAGE + camera] = image
        return found

    def _state_of(self, observation: Arrays) -> Sequence[str]:
        if self._state is not None:
            return self._state
        return sorted(name for name, array in observation.items() if not is_image(array))


def is_image(array: np.ndarray) -> bool:
    """Whether an observation is a picture."""
    return array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8


def _named(observation: Arrays, name: str, where: str) -> np.ndarray:
    if name not in observation:
        have = ", ".join(sorted(observation)) or "none"
        raise ValueError(f"{where}: the environment has no observation {name!r}, it has: {have}")
    return observation[name]
