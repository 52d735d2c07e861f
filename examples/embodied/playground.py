"""MuJoCo Playground's tasks as environments of Gymnasium: how a simulator that is no such environment is adapted.

A task is a pure function of a state, compiled at the first reset. `environment.tasks:
[examples/embodied/playground.py:make]`, where the simulator's Python has `playground` and `jax[cpu]`; the option `task`
names one, such as CartpoleBalance or CheetahRun. Tasks of DeepMind's suite need nothing else; those of locomotion and
manipulation download their robots as they are made.
"""

from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from mujoco_playground import registry


class Playground(gymnasium.Env[np.ndarray, np.ndarray]):
    """One task; an episode is cut after `max_steps`, 0 for never. `changes` are those of the task's configuration.

    `impl` computes the physics: MuJoCo Warp, the tasks' own choice, compiles for minutes where there is no GPU.
    """

    def __init__(
        self, task: str = "CartpoleBalance", max_steps: int = 0, impl: str = "jax", **changes: Any
    ) -> None:
        self._task = registry.load(task, config_overrides={"impl": impl, **changes})
        self._reset, self._step = jax.jit(self._task.reset), jax.jit(self._task.step)
        self._max_steps, self._steps = max_steps, 0
        self._state: Any = None
        self.action_space = spaces.Box(-1.0, 1.0, (self._task.action_size,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._task.observation_size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode, of the seed; without one the environment's own stream goes on."""
        super().reset(seed=seed)
        key = jax.random.PRNGKey(int(self.np_random.integers(1 << 31)))
        if self._state is None:  # compiled now: a step has a shorter time limit than a reset
            self._step(self._reset(key), jax.numpy.zeros(self._task.action_size))
        self._state, self._steps = self._reset(key), 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Acts once."""
        self._state = self._step(self._state, jax.numpy.asarray(action))
        self._steps += 1
        ended, cut = bool(self._state.done), 0 < self._max_steps <= self._steps
        return self._seen(), float(self._state.reward), ended, cut, {}

    def _seen(self) -> np.ndarray:
        return np.asarray(self._state.obs, np.float32)


make = Playground
