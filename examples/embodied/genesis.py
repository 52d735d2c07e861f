"""A scene of Genesis as an environment of Gymnasium: Franka's hand is to reach a point, on a CPU.

`environment.tasks: [examples/embodied/genesis.py:make]`, where the simulator's Python has `genesis-world` and torch
beside the simulator service. A process compiles its first scene as the environment is made, for 100 s of a core.
"""

from typing import Any

import genesis as gs
import gymnasium
import numpy as np
from gymnasium import spaces

HOME = np.array([0.0, -0.3, 0.0, -2.2, 0.0, 2.0, 0.8, 0.04, 0.04])
"""Angles of the arm's seven joints, and its two fingers."""
NEAREST, FARTHEST = np.array([0.3, -0.3, 0.2]), np.array([0.6, 0.3, 0.6])
NEAR = 0.05
"""Metres between hand and point that are a success."""


class Reach(gymnasium.Env[np.ndarray, np.ndarray]):
    """An action moves the targets of the seven joints by at most 0.1; an episode is cut after `max_steps`, 0: never."""

    def __init__(self, max_steps: int = 100, dt: float = 0.02) -> None:
        if not getattr(gs, "_initialized", False):
            gs.init(backend=gs.cpu, logging_level="error")
        self._scene = gs.Scene(show_viewer=False, sim_options=gs.options.SimOptions(dt=dt))
        self._arm = self._scene.add_entity(gs.morphs.MJCF(file="xml/franka_emika_panda/panda.xml"))
        self._hand = self._arm.get_link("hand")
        self._scene.build()
        self._arm.control_dofs_position(HOME)
        self._scene.step()  # compiled now: a step has a time limit
        self._max_steps, self._steps = max_steps, 0
        self._goal, self._target = np.zeros(3), HOME
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (24,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode, with the point that the seed gives."""
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(NEAREST, FARTHEST)
        self._target, self._steps = HOME.copy(), 0
        self._scene.reset()
        self._arm.set_dofs_position(HOME)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Acts once."""
        self._target[:7] += 0.1 * action
        self._arm.control_dofs_position(self._target)
        self._scene.step()
        self._steps += 1
        seen = self._seen()
        distance = float(np.linalg.norm(seen[18:21] - seen[21:]))
        cut = 0 < self._max_steps <= self._steps
        return seen, -distance, False, cut, {"success": distance < NEAR}

    def _seen(self) -> np.ndarray:
        parts = (self._arm.get_dofs_position(), self._arm.get_dofs_velocity(), self._hand.get_pos())
        return np.concatenate([*(part.cpu().numpy().ravel() for part in parts), self._goal]).astype(
            np.float32
        )


make = Reach
